"""What do decayed shortcuts do to the features of a masked autoencoder? One study, many short runs.

    python benchmarks/mae.py --data "DATA/cifar10-{split}.parquet" --device cuda --workers 4 --limit 540
    python benchmarks/mae.py                                # digits on the CPU, tiny models: to see that it runs
    python benchmarks/mae.py --data ... --show              # tables and figures of what is there; runs nothing

    sweep     alpha_min 0.9 to 0.4, one seed, judged on a tenth of the training set that is held out; the best by KNN
    final     plain MAE, long skips alone, and the best decay: three seeds, judged on the test set, fine-tuned too
    ablation  the paper's, one seed, at the best alpha_min
    depth     6, 12 and 24 blocks at one alpha_min and at one effective decay, and with long skips alone
    size      a plain model twice as wide, against the decayed small one
    start     alpha_min 0.4 and 0.6 without the zero start; their feature norms over steps

Every run is a process of its own, several side by side. A result is added to the JSON when its run is done, and what is
there is not run again. At the limit runs are stopped; their folders (--runs) hold a checkpoint, from which the same
command goes on.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (0, 1, 2)
ALPHAS = (0.6, 0.7, 0.8, 0.5, 0.9, 0.4)
PROTOCOLS = ("knn-dino-v1", "rank-v1", "probe-lbfgs-v1", "probe-mae-v1", "probe-decayed-v1")
PLAIN = {"shortcut": "keep", "long_skips": False, "init": "default"}
STOPPED = 3  # the exit code of a run that will be gone on with
Job = tuple[str, dict[str, Any]]


def jobs(done: dict[str, Any], fields: dict[str, Any]) -> list[Job]:
    """What is still to be run, what matters most first; what a missing result decides is not there yet."""
    arguments, depths = fields["model_args"], (6, 12, 24)
    if fields["preset"] == "digits":
        depths = (2, 4, 8)
    base = depths[1]

    def sized(depth: int, times: int = 1) -> dict[str, str]:
        words = dict(word.split("=") for word in arguments.split(","))
        words |= {"depth": str(depth)}
        words |= {name: str(times * int(words[name])) for name in ("embed_dim", "num_heads")}
        return {"model_args": ",".join(f"{name}={value}" for name, value in words.items())}

    found: list[Job] = []
    for seed in SEEDS:
        found.append((f"final | plain | seed {seed}", {**PLAIN, "seed": seed}))
        found.append((f"final | long skips | seed {seed}", {"shortcut": "keep", "seed": seed}))
        if seed == 0:
            for alpha in ALPHAS:
                found.append((f"sweep | alpha_min {alpha:g}", {"shortcut": f"decay:{alpha:g}", "validate": True}))
        best = chosen(done)
        if best is not None:
            found.append((f"final | decay {best:g} | seed {seed}", {"shortcut": f"decay:{best:g}", "seed": seed}))
    if best is not None:
        decay = {"shortcut": f"decay:{best:g}"}
        product = product_of(best, 2 * base)
        found += [
            ("ablation | both branches x 0.7071", {"shortcut": "scale:0.7071,0.7071"}),
            ("ablation | branch x 0.7071", {"shortcut": "scale:1,0.7071"}),
            ("ablation | attention only", {**decay, "where": "attention"}),
            ("ablation | mlp only", {**decay, "where": "mlp"}),
            ("ablation | decay without long skips", {**decay, "long_skips": False}),
            ("ablation | learnable", {"shortcut": "learn:1.0"}),
            ("ablation | without zero start", {**decay, "init": "default"}),
        ]
        for depth in (depths[0], depths[2]):
            found += [
                (f"depth | {depth} | alpha_min {best:g}", {**decay, **sized(depth)}),
                (
                    f"depth | {depth} | product {product:.2g}",
                    {"shortcut": f"decay:product={product!r}", **sized(depth)},
                ),
                (f"depth | {depth} | long skips", {"shortcut": "keep", **sized(depth)}),
            ]
        found.append(("size | plain, twice as wide", {**PLAIN, **sized(base, 2)}))
        for alpha in (0.4, 0.6):
            config = {"shortcut": f"decay:{alpha:g}", "init": "default", "validate": True}
            found.append((f"start | alpha_min {alpha:g} without zero start", config))
    return [(name, {**fields, **config}) for name, config in found if name not in done]


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


def work(name: str, config: dict[str, Any], folder: Path, finetune_epochs: float) -> dict[str, Any] | None:
    """One run in this process, from its checkpoint where it has one; None where it was told to stop."""
    import unskip
    from unskip.recipes import _judge, _mae
    from unskip.training import RunFolder

    warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
    # Training and judging open the same images: decode them once.
    _mae.open_images = _judge.open_images = functools.cache(unskip.data.open_images)
    start = time.perf_counter()
    fields = dict(config)
    planned = unskip.recipes.mae(fields.pop("preset"), **fields)
    run = RunFolder(folder)
    found: dict[str, Any] = {"config": config}
    try:
        going = (folder / "config.json").exists()
        outcome = unskip.resume(folder, quiet=True) if going else unskip.train(planned, folder, quiet=True)
        if not outcome.finished:
            return None
        found |= dict(outcome.evaluations) | judged(name, planned, folder, finetune_epochs)
    except unskip.errors.TrainingError as error:
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
    return found


def judged(name: str, config: Any, folder: Path, finetune_epochs: float) -> dict[str, Any]:
    """Every protocol over depth; the final runs are fine-tuned and measured too."""
    import torch

    import unskip
    from unskip.data import Feed
    from unskip.recipes._judge import judge_run, open_images

    protocols, changes = list(PROTOCOLS), {}
    if name.startswith("final"):
        protocols.append("finetune-mae-v1")
        changes["finetune-mae-v1"] = {"epochs": finetune_epochs, "warmup": finetune_epochs / 20}
        if config.preset == "digits":
            changes["finetune-mae-v1"] |= {"batch": 64, "flip": False, "crop": "none"}
    run, results = judge_run(folder, protocols, changes=changes)
    found: dict[str, Any] = {"depth": {}}
    for each in results:
        for key, value in each.values.items():
            if each.block is None:
                found[key] = value
            elif key not in ("knn10", "knn100", "rank_entropy"):
                found["depth"].setdefault(key, []).append(round(value, 5))
    found["changes"] = changes
    if name.startswith("final"):
        images = open_images(config.data, split="test", root=config.data_root).select(range(256))
        batch = next(iter(Feed(images, 256, config.size, device=next(run.model.parameters()).device).evaluate()))[0]
        with torch.no_grad():
            rows = unskip.measure(run.encoder.eval(), batch, jacobians="off").to_dict()["blocks"]
        found["measure"] = [{k: v for k, v in row.items() if isinstance(v, int | float)} for row in rows]
    return found


# --- Side by side -----------------------------------------------------------------------------------------------------


def study(data: dict[str, Any], fields: dict[str, Any], options: argparse.Namespace) -> None:
    """Keeps `workers` runs going until nothing is left, or until the limit."""
    done, begun, stopping = data["runs"], time.perf_counter(), False
    running: dict[str, subprocess.Popen[str]] = {}
    while True:
        late = time.perf_counter() - begun > options.limit
        waiting = [] if late else [job for job in jobs(done, fields) if job[0] not in running]
        while waiting and len(running) < options.workers:
            name, config = waiting.pop(0)
            digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
            folder = options.runs / f"{name.replace(' | ', '_').replace(' ', '-')}-{digest}"
            task = {"name": name, "config": config, "folder": str(folder), "finetune_epochs": options.finetune}
            command = [sys.executable, __file__, "--work", json.dumps(task)]
            running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if late and not stopping:
            stopping = True
            for process in running.values():
                process.terminate()  # in training it writes a checkpoint first
        if not running:
            return
        time.sleep(0.2)
        for name, process in list(running.items()):
            if process.poll() is None:
                continue
            out, err = process.communicate()
            del running[name]
            if process.returncode == STOPPED or (stopping and process.returncode):
                print(f"{name}: stopped; the same command goes on with it", flush=True)
                continue
            if process.returncode:
                raise SystemExit(f"{name} failed:\n{err[-3000:]}")
            done[name] = json.loads(out.splitlines()[-1])
            options.out.parent.mkdir(parents=True, exist_ok=True)
            aside = options.out.with_suffix(".tmp")
            aside.write_text(json.dumps(data, indent=None, separators=(",", ":")).replace('"runs":{', '"runs":{\n'))
            aside.replace(options.out)
            row = done[name]
            shown = (
                {key: round(last(row, key), 3) for key in ("knn20", "probe_lbfgs", "rank")} if "depth" in row else {}
            )
            print(f"{name}: {shown or row.get('diverged')} in {row['seconds']:.0f} s", flush=True)


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


def correlations(done: dict[str, Any]) -> dict[str, Any]:
    """Rank against KNN over configurations at the same share of training, and over the checkpoints of each run."""
    curves = {name: row["online"] for name, row in done.items() if len(row.get("online", ())) > 3}
    curves = {name: curve for name, curve in curves.items() if not name.startswith(("depth", "size"))}
    found: dict[str, Any] = {"over configurations": {}, "over checkpoints": {}}
    if len(curves) > 3:
        count = min(len(curve) for curve in curves.values())
        for at in range(count):
            points = [curve[at] for curve in curves.values()]
            share = f"{(at + 1) / count:.0%}"
            found["over configurations"][share] = pearson([p[2] for p in points], [p[1] for p in points])
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
        if not name.startswith(("depth", "size")):
            ranks.scatter([last(r, "rank") for r in whole], [100 * last(r, "knn20") for r in whole], s=14, label=label)
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
        whole = [row["measure"] for row in rows if "measure" in row]
        for key, axes in (("echo", echo), ("high_frequency", frequency)) if whole else ():
            each = zip(*([block.get(key) for block in row] for row in whole), strict=True)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="CIFAR-10: cifar10, or parquet files (default: digits)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side")
    parser.add_argument("--limit", type=float, default=float("inf"), help="stop after this many seconds")
    parser.add_argument("--compile", action="store_true", help="compile each model: pays off in long runs")
    parser.add_argument("--epochs", type=float, default=60)
    parser.add_argument("--finetune", type=float, default=20, help="epochs of fine-tuning")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, help="the JSON (default docs/results/mae-cifar.json)")
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "mae-runs", help="where the run folders go")
    parser.add_argument("--show", action="store_true", help="tables and figures of what is there; run nothing")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        task = json.loads(options.work)
        result = work(task["name"], task["config"], Path(task["folder"]), task["finetune_epochs"])
        if result is None:
            raise SystemExit(STOPPED)
        print(json.dumps(result))
        return
    fields: dict[str, Any] = {"preset": "digits", "device": options.device, "epochs": 4, "online_images": 500}
    fields |= {"model_args": "depth=4,embed_dim=32,num_heads=2", "evaluate_every": 22, "log_every": 10}
    if options.data is not None:
        steps = options.epochs * (50_000 // 512)
        fields = {"preset": "cifar", "data": options.data, "device": options.device, "epochs": options.epochs}
        fields |= {"lr": options.lr, "compile": options.compile, "log_every": 10, "checkpoint_every": 1000}
        fields |= {"model_args": "depth=12,embed_dim=192,num_heads=3", "evaluate_every": max(1, round(steps / 16))}
        fields |= {"online_images": 5000, "health": False}  # feature norms and ranks are recorded anyway
    else:
        options.finetune = 3
    word = fields["preset"]
    results = ROOT / "docs" / "results" if options.data else ROOT / "build"
    options.out = options.out or results / f"mae-{word}.json"
    data = json.loads(options.out.read_text()) if options.out.exists() else {"runs": {}}
    settings = {key: value for key, value in fields.items() if key not in ("data", "device", "compile")}
    if data.get("settings", settings) != settings and not options.show:
        raise SystemExit(f"{options.out} holds runs of other settings, {data['settings']}; choose another --out")
    if not options.show:
        import torch

        import unskip

        data |= {
            "script": "benchmarks/mae.py",
            "device": torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU",
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "unskip": unskip.__version__},
            "protocols": {name: unskip.evals.PROTOCOLS[name].to_dict() for name in (*PROTOCOLS, "finetune-mae-v1")},
            "settings": settings,
            "runs": data["runs"],  # last, a run a line
        }
        study(data, fields, options)
    print(table(data["runs"]))
    print(json.dumps(correlations(data["runs"])["over configurations"]))
    figures(data["runs"], ROOT / "docs" / "img" if options.data else ROOT / "build", word)


if __name__ == "__main__":
    main()
