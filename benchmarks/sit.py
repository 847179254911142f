"""What do decayed shortcuts do to what a diffusion transformer draws, and to what its blocks know? One study.

    python benchmarks/sit.py --data "DATA/cifar10-{split}.parquet" --device cuda --workers 3 --limit 540
    python benchmarks/sit.py                                # digits on the CPU, tiny models: to see that it runs
    python benchmarks/sit.py --data ... --show              # tables and figures of what is there; runs nothing

    judge    one residual classifier, trained first; Fréchet distances are over its features, FD-judge, with its hash
    sit      plain, decay with long skips (two seeds each), long skips alone, decay that ends in the middle
    uvit     plain, and decayed

SiT-S/4 in pixel space, about 33 million weights, 15000 steps of 128 images. Of each run 10000 samples at 25 steps of
Heun's against the training set (with guidance too where --guided is said); neighbours over blocks and noise levels,
then linear probes over blocks at the noise level that was best for neighbours.

A result is added to the JSON when its run is done, and what is there is not run again. At the limit runs are stopped;
their folders (--runs) hold a checkpoint, from which the same command goes on. The judge's weights stay in --judge: runs
that are added later, on another machine too, need that folder, and are refused with any other judge.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from _study import ROOT, Job, about, arguments, drawing, folder_of, opened, serve, study

PLAIN = {"shortcut": "keep", "long_skips": False}
CFG = 1.5
PROTOCOLS = ("knn-dino-v1", "probe-lbfgs-v1")
NOT_OF_A_RUN = ("judge", "samples", "sampling_steps", "times", "guided")  # settings of the study that no config has
GRID = 64  # samples in a picture


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
    common = {key: value for key, value in fields.items() if key not in NOT_OF_A_RUN}
    return [(name, {**common, **config}) for name, config in found if name not in done]


# --- One run ----------------------------------------------------------------------------------------------------------


def work(task: dict[str, Any]) -> dict[str, Any] | None:
    """One run in this process, from its checkpoint where it has one; None where it was told to stop."""
    import unskip
    from unskip.training import RunFolder

    warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
    start, folder = time.perf_counter(), Path(task["folder"])
    config = dict(task["config"])
    recipe = config.pop("recipe")
    planned = getattr(unskip.recipes, recipe)(config.pop("preset"), **config)
    found: dict[str, Any] = {"config": {key: value for key, value in task["config"].items() if key != "data"}}
    try:
        going = (folder / "config.json").exists()
        outcome = unskip.resume(folder, quiet=True) if going else unskip.train(planned, folder, quiet=True)
        if not outcome.finished:
            return None
        trained = time.perf_counter() - start
        found |= dict(outcome.evaluations)
        found |= kept_judge(task, folder) if recipe == "supervised" else judged(task, folder)
        found["judged_seconds"] = time.perf_counter() - start - trained
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


def kept_judge(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The judge's model alone, in a place of its own, with the statistics of the images it is to compare with."""
    from unskip.data import open_images
    from unskip.evals import extractor
    from unskip.evals import statistics as gathered
    from unskip.training import RunFolder

    place, last = Path(task["judge"]), RunFolder.open(folder).last_checkpoint()
    assert last is not None
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in ("model.safetensors", "unskip.json"):
        shutil.copy(last[1] / name, place / name)
    config = RunFolder.open(folder).config
    judge = extractor(place, name="judge", device=task["device"])
    images = open_images(config["data"], split="train", root=config["data_root"], hold_out=False)
    gathered(images, judge, size=config["size"], batch=task["batch"], cache=place / "statistics")
    return {"weights": judge.key}


def judged(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Distances of samples, a grid of some, and features over blocks and times. Few large batches: few launches."""
    import unskip
    from unskip.evals import extractor
    from unskip.models import Sampling
    from unskip.recipes._judge import open_run
    from unskip.recipes._judge_generation import judge_samples, judge_times

    run, place = open_run(folder), Path(task["judge"])
    judge = extractor(place, name="judge", device=task["device"])
    options: dict[str, Any] = {"precision": run.config.precision, "batch": task["batch"]}
    found: dict[str, Any] = {"weights": sum(weight.numel() for weight in run.model.parameters()), "generation": {}}
    for cfg in (1.0, CFG):
        judging = cfg == 1.0 or task["guided"]
        begin = time.perf_counter()
        how = Sampling("heun", task["sampling_steps"], cfg)
        count = task["samples"] if judging else GRID
        drawn = unskip.sample(run, count, cfg, sampler="heun", steps=how.steps, write=False, **options)
        picture(drawn.images[:GRID], Path(task["pictures"]), f"{task['word']}-cfg{cfg:g}")
        if judging:
            values = judge_samples(run, judge, sampling=how, samples=drawn, cache=place / "statistics", **options)
            found["generation"][f"{cfg:g}"] = {**values, "seconds": time.perf_counter() - begin}
    knn, probe = PROTOCOLS
    _, sweep = judge_times(run, [knn], task["times"], **options)
    found["knn20"] = {f"{t:g}": [round(each.values["knn20"], 5) for each in rows] for t, rows in sweep.items()}
    best = max(found["knn20"], key=lambda t: max(found["knn20"][t]))
    _, probes = judge_times(run, [probe], [float(best)], **options)
    (rows,) = probes.values()
    accuracies = [round(value, 5) for each in rows for value in each.values.values()]
    return found | {"probe": {"time": float(best), "accuracy": accuracies}}


def picture(images: Any, folder: Path, name: str) -> None:
    from PIL import Image

    from unskip.recipes._sample import grid_of

    folder.mkdir(parents=True, exist_ok=True)
    grid = grid_of(images).permute(1, 2, 0).numpy()
    Image.fromarray(grid[..., 0] if grid.shape[2] == 1 else grid).save(folder / f"{name}.png")


def checked_judge(judge: dict[str, Any], place: Path) -> None:
    """Distances over different judges do not compare."""
    from unskip.errors import UnskipError
    from unskip.evals import extractor

    found = None
    with contextlib.suppress(UnskipError):
        found = extractor(place).key
    if found != judge["weights"]:
        raise SystemExit(
            f"the judge of the runs that are there has the weights {judge['weights']}, and {place} holds "
            f"{found or 'none'}: name its folder by --judge, or begin anew with another --out"
        )


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
    every, strong = groups(done), f"{CFG:g}"
    guided = any(strong in row["generation"] for rows in every.values() for row in rows)
    heads = ["FD-judge", *([f"FD-judge, cfg {strong}"] if guided else []), "precision", "recall"]
    heads += ["KNN (block, t)", "probe (block)", "test loss"]
    lines = [f"| run | seeds | decay | {' | '.join(heads)} |", "|---" * (len(heads) + 3) + "|"]
    for name, rows in every.items():
        plain, led = ([row["generation"][cfg] for row in rows if cfg in row["generation"]] for cfg in ("1", strong))
        best = [peak(row) for row in rows]
        where = ", ".join(sorted({f"{block}, {t}" for _, block, t in best}))
        probes = [max((value, block) for block, value in enumerate(row["probe"]["accuracy"])) for row in rows]
        cells = [
            name.replace(" | ", ": "),
            str(len(rows)),
            f"{rows[0]['effective_decay']:.2g}",
            spread([each["FD-judge"] for each in plain], 3),
            *([spread([each["FD-judge"] for each in led], 3) if led else ""] if guided else []),
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
    pyplot = drawing("sit")
    sheet, (distance, depth, noise) = pyplot.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    every = groups(done)
    names = [name.replace(" | ", ": ") for name in every]
    for offset, cfg in ((-0.2, "1"), (0.2, f"{CFG:g}")):
        found = [
            [row["generation"][cfg]["FD-judge"] for row in rows if cfg in row["generation"]] for rows in every.values()
        ]
        places = [index + offset for index, values in enumerate(found) if values]
        if places:
            distance.barh(
                places, [statistics.mean(values) for values in found if values], height=0.38, label=f"cfg {cfg}"
            )
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
    sheet.savefig(file, metadata={"Date": None})
    pyplot.close(sheet)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    if options.data is None:
        tiny: dict[str, Any] = {"preset": "digits", "data": "digits", "device": options.device, "steps": 40}
        tiny |= {"model_args": "width=32,depth=5,heads=2", "log_every": 10, "online_images": 500, "health": False}
        tiny["judge"] = {"preset": "digits", "steps": 40, "model_args": "depth=2,embed_dim=32,num_heads=2"}
        return {**tiny, "samples": 200, "sampling_steps": 5, "times": [0.5, 1.0], "guided": options.guided}
    graph = options.device == "cuda"
    fields: dict[str, Any] = {"preset": "cifar", "data": options.data, "device": options.device}
    fields |= {"steps": options.steps, "batch": options.batch, "compile": options.compile, "graph": graph}
    # A checkpoint is half a gigabyte: written at the end, and where a run is stopped.
    fields |= {"evaluate_every": max(1, options.steps // 3), "checkpoint_every": options.steps, "log_every": 50}
    fields |= {"health": False, "samples": options.samples, "sampling_steps": options.sampling_steps}
    fields["times"] = [0.7, 0.8, 0.9, 0.95, 1.0]
    judge = {"preset": "cifar", "graph": graph, "epochs": options.judge_epochs, "checkpoint_every": 10**6, "seed": 0}
    return {**fields, "judge": judge, "guided": options.guided}


def told(fields: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide a number; where and how fast it is computed does not."""
    kept = {key: value for key, value in fields.items() if key not in ("data", "device", "compile", "graph", "guided")}
    return {**kept, "judge": {key: value for key, value in kept["judge"].items() if key != "graph"}}


def main() -> None:
    parser = arguments(__doc__, "sit-cifar.json; digits go to build/sit-digits.json")
    parser.add_argument("--alpha", default="0.8", help="alpha_min, or product=5e-3 for an effective decay")
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--sampling-steps", type=int, default=25, help="of Heun's, two evaluations of the network each")
    parser.add_argument("--judge-epochs", type=float, default=25)
    parser.add_argument("--judge-batch", type=int, default=2500, help="images at a time in sampling and judging")
    parser.add_argument(
        "--guided", action="store_true", help=f"distances with guidance of {CFG:g} too: thrice the work"
    )
    parser.add_argument("--compile", action="store_true", help="compile each model: pays off in long runs")
    parser.add_argument("--judge", type=Path, help="where the judge's weights are kept (default RUNS/sit-judge)")
    parser.add_argument("--pictures", type=Path, help="where grids and figures go (default docs/img)")
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    fields = settings_of(options)
    word, real = fields["preset"], options.data is not None
    options.out = options.out or (ROOT / "docs" / "results" if real else ROOT / "build") / f"sit-{word}.json"
    options.pictures = options.pictures or (ROOT / "docs" / "img" if real else ROOT / "build" / "img")
    options.judge = options.judge or options.runs / "sit-judge"
    data = json.loads(options.out.read_text()) if options.show else opened(options.out, told(fields))
    done = data["runs"]
    if not options.show:
        from unskip.evals import PROTOCOLS as KNOWN

        data |= about(
            __file__,
            options.device,
            told(fields),
            protocols={name: KNOWN[name].to_dict() for name in PROTOCOLS},
            sampling={"sampler": "heun", "steps": fields["sampling_steps"], "reference": "the whole training set"},
        )
        if "judge" in done:
            checked_judge(done["judge"], options.judge)
        options.only = [*options.only, "judge"]  # which any run needs

        def task_of(name: str, config: dict[str, Any]) -> dict[str, Any]:
            task = {"config": config, "folder": str(folder_of(options.runs, name, config))}
            task |= {key: fields[key] for key in ("samples", "sampling_steps", "times", "guided", "device")}
            task |= {"judge": str(options.judge), "pictures": str(options.pictures), "batch": options.judge_batch}
            return task | {"word": f"sit-{word}-{name.replace(' | ', '-').replace(' ', '-')}"}

        study(__file__, data, lambda: jobs(done, fields, options.alpha), task_of, options, tell)
    if "judge" in done:
        judge = done["judge"]
        print(f"judge: accuracy {judge.get('test_accuracy', float('nan')):.3f}, weights {judge['weights']}")
    print(table(done))
    if groups(done):
        figure(done, options.pictures / f"sit-{word}.svg")


def tell(name: str, row: dict[str, Any]) -> str:
    shown = {key: round(value, 3) for key, value in row.get("generation", {}).get("1", {}).items()}
    pace = f"{row['images_per_second'] or 0:.0f} images/s, judged in {row.get('judged_seconds', 0):.0f} s"
    return f"{shown or row.get('diverged') or row.get('test_accuracy')}, {pace}"


if __name__ == "__main__":
    main()
