"""What do decayed shortcuts do to the features of a masked autoencoder? One study, many short runs.

    python benchmarks/mae.py --data "DATA/cifar10-{split}.parquet" --device cuda --workers 3 --limit 540
    python benchmarks/mae.py                                # digits on the CPU, tiny models: to see that it runs
    python benchmarks/mae.py --data ... --show              # tables and figures of what is there; runs nothing

    sweep     alpha_min 0.9 to 0.4; the best by KNN of the last block
    final     plain MAE, long skips alone, and the best decay: three seeds, fine-tuned too
    longer    long skips alone and the best decay, three times as long as the final runs: does more training part them?
    ablation  the paper's, at the best alpha_min, and what they are held against: plain MAE and long skips alone
    depth     6, 12 (in sweep and ablation) and 24 blocks: one alpha_min, one effective decay, long skips alone
    size      a plain model twice as wide, against the decayed small one
    start     alpha_min 0.4 and 0.6 without the zero start; their feature norms over steps

The final and the longer runs are judged on the test set, all others on a tenth of the training set that is held out;
all but the final runs have one seed. Each result is added to the JSON when its run is done, and what is there is not
run again. A run that is stopped at the limit leaves a checkpoint in its folder (--runs), from which the same command
goes on.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from _study import ROOT, Job, about, arguments, folder_of, opened, serve, study

SEEDS = (0, 1, 2)
ALPHAS = (0.6, 0.7, 0.8, 0.5, 0.9, 0.4)
PROTOCOLS = ("knn-dino-v1", "rank-v1", "probe-lbfgs-v1", "probe-mae-v1", "probe-decayed-v1")
TUNED = "finetune-mae-v1"
PLAIN = {"shortcut": "keep", "long_skips": False, "init": "default"}
LONGER = 3
LOOKS = 12  # online evaluations of a run
IMAGES = {"cifar": (50_000, 512), "digits": (1438, 64)}  # of the training set, and of a batch


def jobs(done: dict[str, Any], fields: dict[str, Any], epochs: tuple[float, float]) -> list[Job]:
    """What is still to be run, what matters most first; what a missing result decides is not there yet."""
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
    longer: list[Job] = []
    if best is not None:
        longer = [
            ("longer | long skips", {"shortcut": "keep"}),
            (f"longer | decay {best:g}", {"shortcut": f"decay:{best:g}"}),
        ]
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

    return [planned(*job) for job in short + longer + final + later if job[0] not in done]


def chosen(done: dict[str, Any]) -> float | None:
    """The alpha_min with the best KNN of the last block on the held-out part, once all have run."""
    names = {alpha: f"sweep | alpha_min {alpha:g}" for alpha in ALPHAS}
    if not all(name in done for name in names.values()):
        return None
    return max(names, key=lambda alpha: last(done[names[alpha]], "knn20"))


def product_of(alpha: float, sites: int) -> float:
    from unskip.wiring.shortcuts import Decay, effective_decay

    return effective_decay(weight.alpha for weight in Decay(alpha).weights(sites))


# --- One run ----------------------------------------------------------------------------------------------------------


def work(task: dict[str, Any]) -> dict[str, Any] | None:
    """One run in this process, from its checkpoint where it has one; None where it was told to stop."""
    import unskip
    from unskip.training import RunFolder

    warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
    start = time.perf_counter()
    name, config, folder = task["name"], task["config"], Path(task["folder"])
    fields = dict(config)
    planned = unskip.recipes.mae(fields.pop("preset"), **fields)
    run = RunFolder(folder)
    told = {key: value for key, value in config.items() if key not in ("data", "device")}
    found: dict[str, Any] = {"config": told}
    try:
        going = (folder / "config.json").exists()
        outcome = unskip.resume(folder, quiet=True) if going else unskip.train(planned, folder, quiet=True)
        if not outcome.finished:
            return None
        found |= dict(outcome.evaluations) | judged(name, planned, folder, task["finetune"])
    except (unskip.errors.TrainingError, unskip.errors.BadInput) as error:  # a loss, or features, that are not finite
        found["diverged"] = str(error).partition(": ")[2]
    metrics, raised = run.read("metrics.jsonl"), run.read("warnings.jsonl")
    online = [row for row in run.read("evals.jsonl") if row["evaluation"].startswith("knn-dino-v1, ")]
    early = metrics[:40] + metrics[40 :: max(1, len(metrics) // 30)]
    found |= {
        "online": [[row["step"], row["knn20"], row["rank"]] for row in online],
        "loss": [[row["step"], row["loss"], row["feature_norm"]] for row in early],
        "effective_decay": metrics[-1].get("effective_decay", 1.0) if metrics else None,
        "images_per_second": statistics.median(row["samples_per_second"] for row in metrics) if metrics else None,
        "warnings": sorted({row["warning"] for row in raised}),
        "seconds": time.perf_counter() - start,
    }
    shutil.rmtree(folder)  # what is shown lies in the JSON
    return found


def judged(name: str, config: Any, folder: Path, finetune_epochs: float) -> dict[str, Any]:
    """Every protocol over depth; the final runs are fine-tuned and measured too."""
    import torch

    import unskip
    from unskip.data import Feed, open_images
    from unskip.recipes._judge import judge_run

    begun = time.perf_counter()
    run, results = judge_run(folder, PROTOCOLS, seed=config.seed, batch=max(2048, config.batch))
    found: dict[str, Any] = {"depth": {}}
    for each in results:
        for key, value in each.values.items():
            if key not in ("knn10", "knn100", "rank_entropy"):
                found["depth"].setdefault(key, []).append(round(value, 5))
    if name.startswith("final"):
        train, test = (open_images(config.data, split=split, root=config.data_root) for split in ("train", "test"))
        changes: dict[str, Any] = {"epochs": finetune_epochs, "warmup": finetune_epochs / 20}
        if config.preset == "digits":
            changes |= {"batch": 64, "flip": False, "crop": "none"}
        options: dict[str, Any] = {"size": config.size, "seed": config.seed, "precision": config.precision}
        options |= {"graph": config.graph, "changes": changes}
        found["finetune"] = unskip.evals.finetune(run.encoder, train, test, TUNED, **options)
        found["changes"] = {TUNED: changes, "precision": config.precision}
        device = next(run.model.parameters()).device
        batch = next(iter(Feed(test.select(range(256)), 256, config.size, device=device).evaluate()))[0]
        with torch.no_grad():
            rows = unskip.measure(run.encoder.eval(), batch, jacobians="off").to_dict()["blocks"]
        found["measure"] = [{k: v for k, v in row.items() if isinstance(v, int | float)} for row in rows]
    return found | {"judging_seconds": time.perf_counter() - begun}


# --- What is shown ----------------------------------------------------------------------------------------------------


def last(row: dict[str, Any], key: str) -> float:
    """A number of the last block; 0 for a run that diverged."""
    return float(row["depth"][key][-1]) if "depth" in row else 0.0


def groups(done: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Runs that differ in their seed alone, together."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, row in done.items():
        found.setdefault(name.partition(" | seed")[0], []).append(row)
    return found


def table(done: dict[str, Any]) -> str:
    """A line for each configuration: numbers of the last block, and the best KNN over depth with its block."""
    keys = ("knn20", "probe_lbfgs", "probe_mae", "probe_decayed", "rank")
    lines = [f"| run | seeds | {' | '.join(keys)} | best KNN (block) | fine-tuned | split |", "|---" * 10 + "|"]
    for name, rows in sorted(groups(done).items()):
        whole = [row for row in rows if "depth" in row]
        if not whole:
            lines.append(f"| {name.replace(' | ', ': ')} | {len(rows)} | diverged" + " |" * 8)
            continue
        cells = [spread([last(row, key) for row in whole], 1 if key == "rank" else 100) for key in keys]
        best = [max(range(len(row["depth"]["knn20"])), key=row["depth"]["knn20"].__getitem__) for row in whole]
        top = spread([row["depth"]["knn20"][block] for row, block in zip(whole, best, strict=True)], 100)
        tuned = spread([row["finetune"] for row in whole], 100) if "finetune" in whole[0] else ""
        split = "val" if whole[0]["config"].get("validate") else "test"
        blocks = ", ".join(str(block) for block in sorted(set(best)))
        title = name.replace(" | ", ": ")
        lines.append(f"| {title} | {len(whole)} | {' | '.join(cells)} | {top} ({blocks}) | {tuned} | {split} |")
    return "\n".join(lines)


def spread(values: list[float], scale: float) -> str:
    middle = f"{scale * statistics.mean(values):.1f}"
    return middle + (f" ± {scale * statistics.stdev(values):.1f}" if len(values) > 1 else "")


def answers(done: dict[str, Any]) -> dict[str, Any]:
    """What the study was made for, in points: the gain of the decay, what transfers over depth, small against large."""
    best = chosen(done)
    if best is None:
        return {}
    found: dict[str, Any] = {"alpha_min": best}
    rows = {name: [row for row in each if "depth" in row] for name, each in groups(done).items()}

    def mean(name: str, key: str) -> float | None:
        # A row holds the last online numbers too, of fewer images: only fine-tuning has none over depth.
        values = [row[key] if key == "finetune" else last(row, key) for row in rows.get(name, ())]
        return 100 * statistics.mean(values) if values else None

    def gain(ours: str, theirs: str, key: str) -> float | None:
        a, b = mean(ours, key), mean(theirs, key)
        return None if a is None or b is None else round(a - b, 2)

    for key in ("knn20", "probe_lbfgs"):
        found[f"{key}, longer: decayed less long skips"] = gain(f"longer | decay {best:g}", "longer | long skips", key)
    ours, sweep = f"final | decay {best:g}", f"sweep | alpha_min {best:g}"
    for other in ("plain", "long skips"):
        for key in ("knn20", "probe_lbfgs", "probe_mae", "probe_decayed", "finetune"):
            found[f"{key}, decayed less {other}"] = gain(ours, f"final | {other}", key)
    for name in sorted(rows):
        if name.startswith("depth") and "long skips" not in name:
            depth = name.split(" | ")[1]
            for key in ("knn20", "probe_lbfgs"):
                found[f"{key}, {name} less long skips"] = gain(name, f"depth | {depth} | long skips", key)
    for key in ("knn20", "probe_lbfgs"):
        found[f"{key}, {sweep} less long skips"] = gain(sweep, "ablation | long skips", key)
    for key in ("probe_lbfgs", "probe_mae", "probe_decayed"):
        found[f"{key}, decayed less plain twice as wide"] = gain(sweep, "size | plain, twice as wide", key)
    return found


def correlations(done: dict[str, Any]) -> dict[str, Any]:
    """Rank against KNN over configurations at the same share of training, and over the checkpoints of each run."""
    curves = {name: row["online"] for name, row in done.items() if len(row.get("online", ())) > 3}
    curves = {name: curve for name, curve in curves.items() if not name.startswith(("depth", "size", "longer"))}
    found: dict[str, Any] = {"over checkpoints": {}}
    for kind, long in (("final runs", True), ("other runs", False)):
        alike = [curve for name, curve in curves.items() if name.startswith("final") == long]
        over = found.setdefault(f"over configurations, {kind}", {})
        count = min((len(curve) for curve in alike), default=0)
        for at in range(count if len(alike) > 3 else 0):
            points = [curve[at] for curve in alike]
            over[f"{(at + 1) / count:.0%}"] = pearson([p[2] for p in points], [p[1] for p in points])
    for name, curve in curves.items():
        half = len(curve) // 2
        parts = {"early": curve[:half], "late": curve[half:]}
        found["over checkpoints"][name] = {
            part: pearson([p[2] for p in rows], [p[1] for p in rows]) for part, rows in parts.items() if len(rows) > 2
        }
    return found


def pearson(x: list[float], y: list[float]) -> float | None:
    try:
        return round(statistics.correlation(x, y), 3)
    except statistics.StatisticsError:
        return None


def figures(done: dict[str, Any], folder: Path, word: str) -> None:
    """KNN over depth and training, and rank against KNN; feature norms, echo and frequency; as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "mae"
    figure, (depth, training, ranks) = pyplot.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    for name, rows in sorted(groups(done).items()):
        whole = [row for row in rows if "depth" in row]
        if not whole:
            continue
        label = name.partition(" | ")[2]
        if name.startswith("final"):
            means = [
                100 * statistics.mean(values) for values in zip(*(r["depth"]["knn20"] for r in whole), strict=True)
            ]
            (line,) = depth.plot(means, marker="o", markersize=3, label=label)
            for row in whole:
                depth.plot([100 * v for v in row["depth"]["knn20"]], color=line.get_color(), alpha=0.25, linewidth=0.8)
                steps = [point[0] for point in row["online"]]
                training.plot(steps, [100 * p[1] for p in row["online"]], color=line.get_color(), alpha=0.7)
        if not name.startswith(("depth", "size", "longer")):
            mark = "o" if name.startswith("final") else "x"
            points = [last(r, "rank") for r in whole], [100 * last(r, "knn20") for r in whole]
            ranks.scatter(*points, s=14, marker=mark, label=label)
    depth.set(xlabel="block", ylabel="KNN accuracy, k = 20 (%)", title="over depth")
    training.set(xlabel="step", title="over training, last block")
    ranks.set(xlabel="effective rank, last block", title="rank against KNN")
    _legend(depth, 7)
    _legend(ranks, 5)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"mae-{word}.svg", metadata={"Date": None})
    pyplot.close(figure)
    figure, (norms, echo, frequency) = pyplot.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    for name, rows in sorted(groups(done).items()):
        if name.startswith("start") or name in ("sweep | alpha_min 0.4", "sweep | alpha_min 0.6"):
            label = name.partition(" | ")[2] + ("" if name.startswith("start") else " with zero start")
            norms.plot([point[0] for point in rows[0]["loss"]], [point[2] for point in rows[0]["loss"]], label=label)
        measured: Any = [row["measure"] for row in rows if "measure" in row]
        for key, axes in (("echo", echo), ("high_frequency", frequency)) if measured else ():
            each = zip(*([block.get(key) for block in row] for row in measured), strict=True)
            means = [statistics.mean(values) if None not in values else None for values in each]
            axes.plot(means, marker="o", markersize=3, label=name.partition(" | ")[2])
    norms.set(xlabel="step", ylabel="length of the last tokens", title="feature norm over training", yscale="log")
    echo.set(xlabel="block", ylabel="R² of the first stream", title="echo")
    frequency.set(xlabel="block", ylabel="share of energy", title="high frequencies")
    for axes in (norms, echo, frequency):
        _legend(axes, 7)
    figure.savefig(folder / f"mae-{word}-inside.svg", metadata={"Date": None})
    pyplot.close(figure)


def _legend(axes: Any, size: int) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=size)


def tell(name: str, row: dict[str, Any]) -> str:
    if "depth" not in row:
        return f"diverged: {row['diverged']}"
    shown = ", ".join(f"{key} {last(row, key):.3f}" for key in ("knn20", "probe_lbfgs", "rank"))
    return f"{shown}, {row['images_per_second']:.0f} images/s, {row['judging_seconds']:.0f} s of judging"


def main() -> None:
    parser = arguments(__doc__, "mae-cifar.json")
    parser.add_argument("--epochs", type=float, nargs=2, default=(25, 60), help="of most runs, and of the final ones")
    parser.add_argument("--finetune", type=float, default=15, help="epochs of fine-tuning")
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    fields: dict[str, Any] = {"preset": "digits", "model_args": "depth=4,embed_dim=32,num_heads=2", "log_every": 10}
    fields |= {"online_images": 500}
    epochs, finetune = (3, 4), 3
    if options.data is not None:
        fields = {"preset": "cifar", "model_args": "depth=12,embed_dim=192,num_heads=3", "lr": options.lr}
        fields |= {"online_images": 5000, "log_every": 10, "checkpoint_every": 2000}
        fields |= {"health": False}  # feature norms and ranks are recorded anyway
        epochs, finetune = tuple(options.epochs), options.finetune
    word = fields["preset"]
    results = ROOT / "docs" / "results" if options.data else ROOT / "build"
    options.out = options.out or results / f"mae-{word}.json"
    settings = {**fields, "epochs": [*epochs], "finetune": finetune}
    if options.show:
        data = json.loads(options.out.read_text())
    else:
        data = opened(options.out, settings)
        import unskip

        protocols = {name: unskip.evals.PROTOCOLS[name].to_dict() for name in (*PROTOCOLS, TUNED)}
        data |= about(__file__, options.device, settings, protocols=protocols)
        given = fields | {"device": options.device} | ({"data": options.data} if options.data else {})

        def task_of(name: str, config: dict[str, Any]) -> dict[str, Any]:
            folder = str(folder_of(options.runs, name, config))
            return {"name": name, "config": config, "folder": folder, "finetune": finetune}

        study(__file__, data, lambda: jobs(data["runs"], given, epochs), task_of, options, tell)
    done = data["runs"]
    print(table(done))
    print(json.dumps(answers(done), indent=1))
    print(json.dumps(correlations(done), indent=1))
    figures(done, ROOT / "docs" / "img" if options.data else ROOT / "build", word)


if __name__ == "__main__":
    main()
