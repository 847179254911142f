"""Studies the effect of decayed shortcuts on the features of a masked autoencoder, in many short runs.

    python benchmarks/mae.py --data "DATA/cifar10-{split}.parquet" --device cuda --workers 3 --limit 540
    python benchmarks/mae.py                                # smoke test: tiny models on digits, on the CPU
    python benchmarks/mae.py --data ... --show              # tables and figures of the recorded runs; runs nothing

    sweep     alpha_min 0.9 to 0.4; the best is chosen by kNN of the last block
    final     plain MAE, only long skips, and the best decay: three seeds, also fine-tuned
    rate      half and twice the learning rate: does the ranking depend on the shared learning rate?
    longer    the same three for three times the epochs, each at its best rate: does longer training change the gaps?
              long skips and the decay also at the shared rate
    ablation  those of the paper, at the best alpha_min, and their baselines: plain MAE and only long skips
    depth     6, 12 (in sweep and ablation) and 24 blocks: one alpha_min, one effective decay, only long skips
    size      a plain model twice as wide, compared with the small one with decay
    start     alpha_min 0.4 and 0.6 without the zero initialisation; feature norms over steps

The final and the longer runs are evaluated on the test set, all others on a held-out tenth of the training set; all but
the final runs have one seed. A result is added to the JSON when its run is done, and recorded runs are not repeated. A
run that is stopped at the limit leaves a checkpoint in its folder (--runs), from which the same command continues.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from _mae_results import ALPHAS, RATES, answers, best_rate, chosen, correlations, figures, last, table
from _study import ROOT, Job, about, arguments, folder_of, opened, results, serve, study

SEEDS = (0, 1, 2)
PROTOCOLS = ("knn-dino-v1", "rank-v1", "probe-lbfgs-v1", "probe-mae-v1", "probe-decayed-v1")
TUNED = "finetune-mae-v1"
PLAIN = {"shortcut": "keep", "long_skips": False, "init": "default"}
LONGER = 3  # factor on the epochs of the final runs
LOOKS = 12  # online evaluations per run
IMAGES = {"cifar": (50_000, 512), "digits": (1438, 64)}  # images in the training set and in a batch


def jobs(done: dict[str, Any], fields: dict[str, Any], epochs: tuple[float, float]) -> list[Job]:
    """The runs that are not done, by priority, without those whose settings depend on missing results."""
    sizes, depths = fields["model_args"], (2, 4, 8) if fields["preset"] == "digits" else (6, 12, 24)
    base, best = depths[1], chosen(done)

    def sized(depth: int, times: int = 1) -> dict[str, str]:
        words = dict(word.split("=") for word in sizes.split(","))
        words |= {"depth": str(depth)}
        words |= {name: str(times * int(words[name])) for name in ("embed_dim", "num_heads")}
        return {"model_args": ",".join(f"{name}={value}" for name, value in words.items())}

    short: list[Job] = [(f"sweep | alpha_min {alpha:g}", {"shortcut": f"decay:{alpha:g}"}) for alpha in ALPHAS]
    final: list[Job] = []
    for seed in SEEDS:
        final.append((f"final | plain | seed {seed}", {**PLAIN, "seed": seed}))
        final.append((f"final | long skips | seed {seed}", {"shortcut": "keep", "seed": seed}))
        if best is not None:
            final.append((f"final | decay {best:g} | seed {seed}", {"shortcut": f"decay:{best:g}", "seed": seed}))
    rates: list[Job] = []
    longer: list[Job] = []
    if best is not None:
        main_wirings = {"long skips": {"shortcut": "keep"}, f"decay {best:g}": {"shortcut": f"decay:{best:g}"}}
        others = {"plain": PLAIN, "decay 0.6": {"shortcut": "decay:0.6"}}
        for name, config in (main_wirings | others).items():
            rates += [(f"rate | {name} | x {times:g}", {**config, "lr": times * fields["lr"]}) for times in RATES]
        for name, config in (main_wirings | {"plain": PLAIN}).items():
            fastest = best_rate(done, name)
            shared = {1.0} if name in main_wirings else set()
            for times in sorted({fastest} | shared) if fastest is not None else ():
                longer.append((f"longer | {name} | x {times:g}", {**config, "lr": times * fields["lr"]}))
    later: list[Job] = [("ablation | long skips", {"shortcut": "keep"}), ("ablation | plain", PLAIN)]
    if best is not None:
        decay = {"shortcut": f"decay:{best:g}"}
        product = product_of(best, 2 * base)
        for depth in (depths[0], depths[2]):
            by_product = {"shortcut": f"decay:product={product!r}"}
            later += [
                (f"depth | {depth} | alpha_min {best:g}", {**decay, **sized(depth)}),
                (f"depth | {depth} | product {product:.2g}", {**by_product, **sized(depth)}),
                (f"depth | {depth} | long skips", {"shortcut": "keep", **sized(depth)}),
            ]
        later += [
            ("size | plain, twice as wide", {**PLAIN, **sized(base, 2)}),
            ("ablation | both branches x 0.7071", {"shortcut": "scale:0.7071,0.7071"}),
            ("ablation | branch x 0.7071", {"shortcut": "scale:1,0.7071"}),
            ("ablation | attention only", {**decay, "where": "attention"}),
            ("ablation | mlp only", {**decay, "where": "mlp"}),
            ("ablation | decay without long skips", {**decay, "long_skips": False}),
            ("ablation | learnable", {"shortcut": "learn:1.0"}),
            ("ablation | without zero start", {**decay, "init": "default"}),
        ]
        for alpha in (0.4, 0.6):
            config = {"shortcut": f"decay:{alpha:g}", "init": "default"}
            later.append((f"start | alpha_min {alpha:g} without zero start", config))
    images, batch = IMAGES[fields["preset"]]

    def planned(name: str, config: dict[str, Any]) -> Job:
        last = name.startswith(("final", "longer"))
        length = epochs[1] if last else epochs[0]
        length *= LONGER if name.startswith("longer") else 1
        steps = length * ((images if last else images - images // 10) // batch)
        every = max(1, round(steps / LOOKS))
        return name, {**fields, **config, "validate": not last, "epochs": length, "evaluate_every": every}

    return [planned(*job) for job in short + rates + longer + final + later if job[0] not in done]


def product_of(alpha: float, sites: int) -> float:
    from unskip.wiring import Decay, effective_decay

    return effective_decay(weight.alpha for weight in Decay(alpha).weights(sites))


# --- One run ----------------------------------------------------------------------------------------------------------


def work(task: dict[str, Any]) -> dict[str, Any] | None:
    """Trains or resumes, then evaluates, one run in this process; None if it was stopped."""
    import unskip
    from unskip.training import RunFolder

    warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
    start = time.perf_counter()
    name, config, folder = task["name"], task["config"], Path(task["folder"])
    fields = dict(config)
    planned = unskip.recipes.mae(fields.pop("preset"), **fields)
    run = RunFolder(folder)
    recorded = {key: value for key, value in config.items() if key not in ("data", "device")}
    result: dict[str, Any] = {"config": recorded}
    try:
        resumed = (folder / "config.json").exists()
        outcome = unskip.resume(folder, quiet=True) if resumed else unskip.train(planned, folder, quiet=True)
        if not outcome.finished:
            return None
        result |= dict(outcome.evaluations) | evaluated(name, planned, folder, task["finetune"])
    except (unskip.errors.TrainingError, unskip.errors.BadInput) as error:  # non-finite loss or features
        if not run.read("metrics.jsonl"):
            raise  # the run did not start
        result["diverged"] = str(error).partition(": ")[2]
    metrics, raised = run.read("metrics.jsonl"), run.read("warnings.jsonl")
    online = [row for row in run.read("evals.jsonl") if row["evaluation"].startswith("knn-dino-v1, ")]
    early = metrics[:40] + metrics[40 :: max(1, len(metrics) // 30)]
    result |= {
        "online": [[row["step"], row["knn20"], row["rank"]] for row in online],
        "loss": [[row["step"], row["loss"], row["feature_norm"]] for row in early],
        "effective_decay": metrics[-1].get("effective_decay", 1.0) if metrics else None,
        "images_per_second": statistics.median(row["samples_per_second"] for row in metrics) if metrics else None,
        "warnings": sorted({row["warning"] for row in raised}),
        "seconds": time.perf_counter() - start,
    }
    shutil.rmtree(folder)  # all that is reported is in the JSON
    return result


def evaluated(name: str, config: Any, folder: Path, finetune_epochs: float) -> dict[str, Any]:
    """Results of every protocol by block; final runs are also fine-tuned and measured."""
    import torch

    import unskip
    from unskip.data import Feed, open_images
    from unskip.recipes import evaluate_run

    started = time.perf_counter()
    run, results = evaluate_run(folder, PROTOCOLS, seed=config.seed, batch=max(2048, config.batch))
    result: dict[str, Any] = {"depth": {}}
    for each in results:
        for key, value in each.values.items():
            if key not in ("knn10", "knn100", "rank_entropy"):
                result["depth"].setdefault(key, []).append(round(value, 5))
    if name.startswith("final"):
        train, test = (open_images(config.data, split=split, root=config.data_root) for split in ("train", "test"))
        changes: dict[str, Any] = {"epochs": finetune_epochs, "warmup": finetune_epochs / 20}
        if config.preset == "digits":
            changes |= {"batch": 64, "flip": False, "crop": "none"}
        options: dict[str, Any] = {"size": config.size, "seed": config.seed, "precision": config.precision}
        options |= {"graph": config.graph, "changes": changes}
        result["finetune"] = unskip.evals.finetune(run.encoder, train, test, TUNED, **options)
        result["changes"] = {TUNED: changes, "precision": config.precision}
        device = next(run.model.parameters()).device
        batch = next(iter(Feed(test.select(range(256)), 256, config.size, device=device).evaluate()))[0]
        with torch.no_grad():
            rows = unskip.measure(run.encoder.eval(), batch, jacobians="off").to_dict()["blocks"]
        result["measure"] = [{k: v for k, v in row.items() if isinstance(v, int | float)} for row in rows]
    return result | {"judging_seconds": time.perf_counter() - started}


def tell(name: str, row: dict[str, Any]) -> str:
    if "depth" not in row:
        return f"diverged: {row['diverged']}"
    shown = ", ".join(f"{key} {last(row, key):.3f}" for key in ("knn20", "probe_lbfgs", "rank"))
    return f"{shown}, {row['images_per_second']:.0f} images/s, {row['judging_seconds']:.0f} s of evaluation"


def main() -> None:
    parser = arguments(__doc__, "mae-cifar.json")
    parser.add_argument(
        "--epochs", type=float, nargs=2, default=(25, 60), help="epochs of most runs, and of the final runs"
    )
    parser.add_argument("--finetune", type=float, default=15, help="epochs of fine-tuning")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--compile", action="store_true", help="compile each model; useful with parallel runs on a GPU")
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    fields: dict[str, Any] = {"preset": "digits", "model_args": "depth=4,embed_dim=32,num_heads=2", "log_every": 10}
    fields |= {"online_images": 500, "lr": options.lr}
    epochs, finetune = (3, 4), 3
    if options.data is not None:
        fields = {"preset": "cifar", "model_args": "depth=12,embed_dim=192,num_heads=3", "lr": options.lr}
        fields |= {"online_images": 5000, "log_every": 10, "checkpoint_every": 2000}
        fields |= {"health": False}  # feature norms and ranks are recorded anyway
        epochs, finetune = tuple(options.epochs), options.finetune
    word = fields["preset"]
    options.out = options.out or results(options.data) / f"mae-{word}.json"
    settings = {**fields, "epochs": [*epochs], "finetune": finetune}
    if options.show:
        data = json.loads(options.out.read_text())
    else:
        data = opened(options.out, settings)
        import unskip

        protocols = {name: unskip.evals.PROTOCOLS[name].to_dict() for name in (*PROTOCOLS, TUNED)}
        data |= about(__file__, options.device, settings, protocols=protocols)
        job_fields = fields | {"device": options.device, "compile": options.compile}
        job_fields |= {"data": options.data} if options.data else {}

        def task_of(name: str, config: dict[str, Any]) -> dict[str, Any]:
            folder = str(folder_of(options.runs, name, config))
            return {"name": name, "config": config, "folder": folder, "finetune": finetune}

        study(__file__, data, lambda: jobs(data["runs"], job_fields, epochs), task_of, options, tell)
    done = data["runs"]
    print(table(done))
    print(json.dumps(answers(done), indent=1))
    print(json.dumps(correlations(done), indent=1))
    figures(done, ROOT / "docs" / "img" if options.data else ROOT / "build", word)


if __name__ == "__main__":
    main()
