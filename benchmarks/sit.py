"""What do decayed shortcuts do to what a diffusion transformer draws, and to what its blocks know? One study.

    python benchmarks/sit.py --data "DATA/cifar10-{split}.parquet" --device cuda --workers 3 --limit 540
    python benchmarks/sit.py                                # digits on the CPU, tiny models: to see that it runs
    python benchmarks/sit.py --data ... --show              # tables and figures of what is there; runs nothing

    judge    one residual classifier, trained first; Fréchet distances are over its features, FD-judge, with its hash
    sit      plain, decay with long skips (two seeds each), long skips alone, decay that ends in the middle
    uvit     plain, and decayed

SiT-S/4 in pixel space, about 33 million weights, 15000 steps of 128 images. Of each run 10000 samples at 50 steps of
Heun's, with and without guidance, against the training set; neighbours over blocks and noise levels, then linear probes
over blocks at the noise level that was best for neighbours.

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
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLAIN = {"shortcut": "keep", "long_skips": False}
STOPPED = 3  # the exit code of a run that will be gone on with
CFG = 1.5
Job = tuple[str, dict[str, Any]]


def jobs(done: dict[str, Any], fields: dict[str, Any], alpha: str) -> list[Job]:
    """What is still to be run, what matters most first. The judge comes before all others."""
    if "judge" not in done:
        keys = ("data", "device")
        return [("judge", {"recipe": "supervised", **fields["judge"], **{key: fields[key] for key in keys}})]
    decay = {"shortcut": f"decay:{alpha}"}
    found: list[Job] = [
        ("sit | plain | seed 0", {"recipe": "sit", **PLAIN, "seed": 0}),
        (f"sit | decay {alpha} | seed 0", {"recipe": "sit", **decay, "seed": 0}),
        ("sit | long skips | seed 0", {"recipe": "sit", "shortcut": "keep", "seed": 0}),
        ("sit | plain | seed 1", {"recipe": "sit", **PLAIN, "seed": 1}),
        (f"sit | decay {alpha} | seed 1", {"recipe": "sit", **decay, "seed": 1}),
        (f"sit | decay {alpha} to the middle | seed 0", {"recipe": "sit", "shortcut": f"decay:{alpha},until=0.5"}),
        ("uvit | plain | seed 0", {"recipe": "uvit", "shortcut": "keep"}),
        (f"uvit | decay {alpha} | seed 0", {"recipe": "uvit", **decay}),
    ]
    common = {key: value for key, value in fields.items() if key not in ("judge", "samples", "times")}
    return [(name, {**common, **config}) for name, config in found if name not in done]


# --- One run ----------------------------------------------------------------------------------------------------------


def work(task: dict[str, Any]) -> dict[str, Any] | None:
    """One run in this process, from its checkpoint where it has one; None where it was told to stop."""
    import unskip
    from unskip.recipes import _generate, _judge, _judge_generation
    from unskip.training import RunFolder

    warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
    # Training and judging open the same images: decode them once.
    cached = functools.cache(unskip.data.open_images)
    _generate.open_images = _judge.open_images = _judge_generation.open_images = cached
    start, folder = time.perf_counter(), Path(task["folder"])
    config = dict(task["config"])
    recipe = config.pop("recipe")
    planned = getattr(unskip.recipes, recipe)(config.pop("preset"), **config)
    found: dict[str, Any] = {"config": task["config"]}
    try:
        going = (folder / "config.json").exists()
        outcome = unskip.resume(folder, quiet=True) if going else unskip.train(planned, folder, quiet=True)
        if not outcome.finished:
            return None
        found |= dict(outcome.evaluations)
        found |= about_judge(folder) if recipe == "supervised" else judged(task, folder)
    except unskip.errors.TrainingError as error:
        found["diverged"] = str(error).partition(": ")[2]
    run = RunFolder(folder)
    metrics = run.read("metrics.jsonl")
    early = metrics[:20] + metrics[20 :: max(1, len(metrics) // 30)]
    found |= {
        "loss": [[row["step"], row["loss"]] for row in early],
        "effective_decay": metrics[-1].get("effective_decay", 1.0) if metrics else None,
        "images_per_second": statistics.median(row["samples_per_second"] for row in metrics) if metrics else None,
        "warnings": sorted({row["warning"] for row in run.read("warnings.jsonl")}),
        "seconds": time.perf_counter() - start,
        "folder": folder.name,
    }
    online = [row for row in run.read("evals.jsonl") if row["evaluation"].startswith("knn-dino-v1, ")]
    if online:
        found["online"] = [[row["step"], row["knn20"], row["rank"]] for row in online]
    return found


def about_judge(folder: Path) -> dict[str, Any]:
    from unskip.evals import extractor

    return {"weights": extractor(folder).key}


def judged(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Distances of samples with and without guidance, a grid of each, and features over blocks and times."""
    import unskip
    from unskip.models import Sampling
    from unskip.recipes._judge import open_run
    from unskip.recipes._judge_generation import judge_samples, judge_times

    run = open_run(folder)
    precision = run.config.precision
    found: dict[str, Any] = {"weights": sum(weight.numel() for weight in run.model.parameters()), "generation": {}}
    for cfg in (1.0, CFG):
        begin = time.perf_counter()
        values = judge_samples(
            run,
            Path(task["judge"]),
            task["samples"],
            Sampling("heun", 50, cfg),
            precision=precision,
            cache=Path(task["judge"]).parent / "cache",
        )
        seconds = time.perf_counter() - begin
        found["generation"][f"{cfg:g}"] = {**values, "seconds": seconds}
        unskip.sample(run, n=64, cfg=cfg, precision=precision)
    _, sweep = judge_times(run, ["knn-dino-v1"], task["times"], precision=precision)
    found["knn20"] = {f"{t:g}": [round(each.values["knn20"], 5) for each in rows] for t, rows in sweep.items()}
    best = max(found["knn20"], key=lambda t: max(found["knn20"][t]))
    _, probes = judge_times(run, ["probe-lbfgs-v1"], [float(best)], precision=precision)
    (rows,) = probes.values()
    found["probe"] = {"time": float(best), "accuracy": [round(each.values["probe_lbfgs"], 5) for each in rows]}
    return found


# --- Side by side -----------------------------------------------------------------------------------------------------


def study(data: dict[str, Any], fields: dict[str, Any], options: argparse.Namespace) -> None:
    """Keeps `workers` runs going until nothing is left, or until the limit."""
    done, begun, stopping = data["runs"], time.perf_counter(), False
    running: dict[str, subprocess.Popen[str]] = {}
    while True:
        late = time.perf_counter() - begun > options.limit
        waiting = [] if late else [job for job in jobs(done, fields, options.alpha) if job[0] not in running]
        while waiting and len(running) < options.workers:
            name, config = waiting.pop(0)
            task = {"name": name, "config": config, "folder": str(options.runs / place(name, config))}
            task |= {"samples": fields["samples"], "times": fields["times"]}
            task["judge"] = str(options.runs / done["judge"]["folder"]) if "judge" in done else ""
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
            for grid in sorted((options.runs / done[name]["folder"] / "samples").glob("*.png")):
                cfg = grid.stem.partition("cfg")[2].partition("-")[0]
                options.pictures.mkdir(parents=True, exist_ok=True)
                word = name.replace(" | ", "-").replace(" ", "-")
                shutil.copy(grid, options.pictures / f"sit-{fields['preset']}-{word}-cfg{cfg}.png")
            row = done[name]
            shown = {key: round(value, 3) for key, value in row.get("generation", {}).get("1", {}).items()}
            print(f"{name}: {shown or row.get('diverged', '')} in {row['seconds']:.0f} s", flush=True)


def place(name: str, config: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    return "judge" if name == "judge" else f"{name.replace(' | ', '_').replace(' ', '-')}-{digest}"


# --- What is shown ----------------------------------------------------------------------------------------------------


def groups(done: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Runs that differ in their seed alone, together."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, row in done.items():
        if name != "judge" and "generation" in row:
            found.setdefault(name.partition(" | seed")[0], []).append(row)
    return found


def spread(values: list[float], digits: int) -> str:
    middle = f"{statistics.mean(values):.{digits}f}"
    return middle + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def peak(row: dict[str, Any]) -> tuple[float, int, str]:
    """The best KNN, its block and its time."""
    cells = [(value, block, t) for t, values in row["knn20"].items() for block, value in enumerate(values)]
    return max(cells)


def table(done: dict[str, Any]) -> str:
    """A line for each configuration."""
    heads = "FD-judge", f"FD-judge, cfg {CFG:g}", "precision", "recall", "KNN (block, t)", "probe (block)", "test loss"
    lines = [f"| run | seeds | decay | {' | '.join(heads)} |", "|---" * (len(heads) + 3) + "|"]
    for name, rows in groups(done).items():
        plain, guided = ([row["generation"][cfg] for row in rows] for cfg in ("1", f"{CFG:g}"))
        best = [peak(row) for row in rows]
        where = ", ".join(sorted({f"{block}, {t}" for _, block, t in best}))
        probes = [max((value, block) for block, value in enumerate(row["probe"]["accuracy"])) for row in rows]
        cells = [
            name.replace(" | ", ": "),
            str(len(rows)),
            f"{rows[0]['effective_decay']:.2g}",
            spread([each["FD-judge"] for each in plain], 3),
            spread([each["FD-judge"] for each in guided], 3),
            spread([each["precision"] for each in plain], 3),
            spread([each["recall"] for each in plain], 3),
            f"{spread([100 * value for value, _, _ in best], 1)} ({where})",
            f"{spread([100 * value for value, _ in probes], 1)} ({', '.join(sorted({str(b) for _, b in probes}))})",
            spread([row["test_loss"] for row in rows], 4),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(done: dict[str, Any], file: Path) -> None:
    """Distances, neighbours over blocks at each run's best time, and over times at its best block; as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "sit"
    drawing, (distance, depth, noise) = pyplot.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    every = groups(done)
    names = [name.replace(" | ", ": ") for name in every]
    for offset, cfg in ((-0.2, "1"), (0.2, f"{CFG:g}")):
        values = [statistics.mean(row["generation"][cfg]["FD-judge"] for row in rows) for rows in every.values()]
        places = [index + offset for index in range(len(values))]
        distance.barh(places, values, height=0.38, label=f"cfg {cfg}")
    distance.set(yticks=range(len(names)), yticklabels=names, xlabel="FD-judge (less is better)", title="samples")
    distance.invert_yaxis()
    for name, rows in every.items():
        _, block, t = peak(rows[0])
        (line,) = depth.plot([100 * v for v in rows[0]["knn20"][t]], marker="o", markersize=3, label=f"{name}, t = {t}")
        times = [float(each) for each in rows[0]["knn20"]]
        over = [100 * values[block] for values in rows[0]["knn20"].values()]
        noise.plot(times, over, marker="o", markersize=3, color=line.get_color(), label=f"{name}, block {block}")
    depth.set(xlabel="block", ylabel="KNN accuracy, k = 20 (%)", title="over depth, at the best noise level")
    noise.set(xlabel="time: noise 0, data 1", title="over noise levels, at the best block")
    for axes in (distance, depth, noise):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=6)
    file.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(file, metadata={"Date": None})
    pyplot.close(drawing)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    if options.data is None:
        tiny: dict[str, Any] = {"preset": "digits", "data": "digits", "device": options.device, "steps": 40}
        tiny |= {"model_args": "width=32,depth=5,heads=2", "log_every": 10, "online_images": 500, "health": False}
        tiny["judge"] = {"preset": "digits", "steps": 40, "model_args": "depth=2,embed_dim=32,num_heads=2"}
        return {**tiny, "samples": 200, "times": [0.5, 1.0]}
    fields: dict[str, Any] = {"preset": "cifar", "data": options.data, "device": options.device}
    fields |= {"steps": options.steps, "batch": options.batch, "compile": options.compile, "graph": options.graph}
    fields |= {"evaluate_every": max(1, options.steps // 6), "checkpoint_every": 1000, "log_every": 50, "health": False}
    judge = {"preset": "cifar", "graph": options.graph, "epochs": options.judge_epochs, "seed": 0}
    return {**fields, "judge": judge, "samples": options.samples, "times": [0.5, 0.7, 0.8, 0.9, 0.95, 1.0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="CIFAR-10: cifar10, or parquet files (default: digits)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side")
    parser.add_argument("--limit", type=float, default=float("inf"), help="stop after this many seconds")
    parser.add_argument("--alpha", default="0.8", help="alpha_min, or product=5e-3 for an effective decay")
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--judge-epochs", type=float, default=25)
    parser.add_argument("--compile", action="store_true", help="compile each model: pays off in long runs")
    parser.add_argument("--graph", action="store_true", help="a step as one CUDA graph")
    parser.add_argument("--out", type=Path, help="the JSON (default docs/results/sit-cifar.json)")
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "sit-runs", help="where the run folders go")
    parser.add_argument("--pictures", type=Path, help="where grids and figures go (default docs/img)")
    parser.add_argument("--show", action="store_true", help="tables and figures of what is there; run nothing")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        result = work(json.loads(options.work))
        if result is None:
            raise SystemExit(STOPPED)
        print(json.dumps(result))
        return
    fields = settings_of(options)
    word = fields["preset"]
    real = options.data is not None
    options.out = options.out or (ROOT / "docs" / "results" if real else ROOT / "build") / f"sit-{word}.json"
    options.pictures = options.pictures or (ROOT / "docs" / "img" if real else ROOT / "build" / "img")
    data = json.loads(options.out.read_text()) if options.out.exists() else {"runs": {}}
    settings = {key: value for key, value in fields.items() if key not in ("data", "device", "compile", "graph")}
    settings["judge"] = {key: value for key, value in settings["judge"].items() if key != "graph"}
    if data.get("settings", settings) != settings and not options.show:
        raise SystemExit(f"{options.out} holds runs of other settings, {data['settings']}; choose another --out")
    if not options.show:
        import torch

        import unskip

        data |= {
            "script": "benchmarks/sit.py",
            "device": torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU",
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "unskip": unskip.__version__},
            "protocols": {name: unskip.evals.PROTOCOLS[name].to_dict() for name in ("knn-dino-v1", "probe-lbfgs-v1")},
            "sampling": {"sampler": "heun", "steps": 50, "cfg": [1.0, CFG], "reference": "the whole training set"},
            "settings": settings,
            "runs": data["runs"],  # last, a run a line
        }
        study(data, fields, options)
    if "judge" in data["runs"]:
        judge = data["runs"]["judge"]
        print(f"judge: accuracy {judge.get('test_accuracy', float('nan')):.3f}, weights {judge['weights']}")
    print(table(data["runs"]))
    if groups(data["runs"]):
        figure(data["runs"], options.pictures / f"sit-{word}.svg")


if __name__ == "__main__":
    main()
