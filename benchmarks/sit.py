"""Studies the effect of decayed shortcuts on the samples and on the features of a diffusion transformer.

    python benchmarks/sit.py --data "DATA/cifar10-{split}.parquet" --device cuda --workers 3 --limit 540
    python benchmarks/sit.py                                # smoke test: tiny models on digits, on the CPU
    python benchmarks/sit.py --data ... --show              # tables and figures of the recorded runs; runs nothing

    judge    one residual classifier, trained first; its features are used for Fréchet distances (FD-judge), recorded
             with a hash of its weights
    sit      plain, decay with long skips (two seeds each), only long skips, and a decay to the same product that ends
             at the middle block
    uvit     plain, and with decay

The model is SiT-S/4 in pixel space, about 33 million weights, trained for 15000 steps of 128 images. The EMA weights of
each run draw 10000 samples with 25 steps of Heun's method, which are compared with the training set (with --guided,
also with guidance); distances of the test images are a reference for the best possible value. kNN and linear probes are
evaluated by block and noise level on a held-out tenth of the training set; the best block and noise level are then
evaluated on the test set.

A result is added to the JSON when its run is done, and recorded runs are not repeated. At the limit, runs are stopped;
their folders (--runs) contain checkpoints, from which the same command continues. The classifier's weights are kept in
--judge. Runs that are added later, also on another machine, need that folder; any other classifier is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _sit_results import CFG, PROTOCOLS, figure, judge_line, table
from _study import ROOT, Job, about, arguments, folder_of, opened, serve, study

PLAIN = {"shortcut": "keep", "long_skips": False}
# Settings of the study that are not fields of a config. The last three add results to a run without changing others:
# guidance scales, numbers of Heun steps, and times at which the middle block is evaluated.
MORE = ("guided", "curve", "levels")
NOT_OF_A_RUN = ("judge", "samples", "sampling_steps", "times", *MORE)
GRID = 64  # samples per picture
PATIENCE = 1800  # seconds that a trained run waits for the classifier


def jobs(done: dict[str, Any], fields: dict[str, Any], alpha: str) -> list[Job]:
    """The runs that are not done, by priority. They can be trained before the classifier is ready."""
    decay, halfway = {"shortcut": f"decay:{alpha}"}, {"shortcut": ends_in_the_middle(alpha, fields)}
    result: list[Job] = [
        ("sit | plain | seed 0", {"recipe": "sit", **PLAIN, "seed": 0}),
        (f"sit | decay {alpha} | seed 0", {"recipe": "sit", **decay, "seed": 0}),
        ("sit | long skips | seed 0", {"recipe": "sit", "shortcut": "keep", "seed": 0}),
        ("sit | plain | seed 1", {"recipe": "sit", **PLAIN, "seed": 1}),
        (f"sit | decay {alpha} | seed 1", {"recipe": "sit", **decay, "seed": 1}),
        (f"sit | decay {alpha} to the middle | seed 0", {"recipe": "sit", **halfway}),
        ("uvit | plain | seed 0", {"recipe": "uvit", "shortcut": "keep"}),
        (f"uvit | decay {alpha} | seed 0", {"recipe": "uvit", **decay}),
    ]
    return waiting(result, done, fields)


def waiting(runs: list[Job], done: dict[str, Any], fields: dict[str, Any]) -> list[Job]:
    """The classifier and those of `runs` that are not done, with the settings of all runs."""
    judge = {"recipe": "supervised", **fields["judge"], "data": fields["data"], "device": fields["device"]}
    common = {key: value for key, value in fields.items() if key not in NOT_OF_A_RUN}
    every = [("judge", judge), *((name, {**common, **config}) for name, config in runs)]
    return [(name, config) for name, config in every if name not in done]


def ends_in_the_middle(alpha: str, fields: dict[str, Any]) -> str:
    """A decay over the first half of the sites, constant afterwards, with the same product as that over all sites."""
    from unskip.wiring import effective_decay, parse

    sites = 24 if fields["preset"] == "cifar" else 10
    product = effective_decay(weight.alpha for weight in parse(f"decay:{alpha}").weights(sites))
    return f"decay:product={product!r},until=0.5"


# --- One run ----------------------------------------------------------------------------------------------------------


def work(task: dict[str, Any]) -> dict[str, Any] | None:
    """Trains or resumes, then evaluates, one run in this process; None if it was stopped."""

    import unskip
    from unskip.training import RunFolder

    warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
    start, folder = time.perf_counter(), Path(task["folder"])
    config = dict(task["config"])
    recipe = config.pop("recipe")
    planned = getattr(unskip.recipes, recipe)(config.pop("preset"), **config)
    result: dict[str, Any] = {"config": {key: value for key, value in task["config"].items() if key != "data"}}
    judge = recipe == "supervised"
    try:
        resumed = (folder / "config.json").exists()
        outcome = unskip.resume(folder, quiet=True) if resumed else unskip.train(planned, folder, quiet=True)
        if not outcome.finished:
            return None
        trained = time.perf_counter() - start
        result |= dict(outcome.evaluations)
        result |= save_judge(task, folder, planned) if judge else evaluated(task, folder)
        result["judged_seconds"] = time.perf_counter() - start - trained
    except unskip.errors.TrainingError as error:
        broken = [row for row in RunFolder(folder).read("warnings.jsonl") if row["warning"] == "non-finite-loss"]
        if judge or not broken:
            raise  # such as a full disk, after which the run can be resumed
        result["diverged"] = str(error).partition(": ")[2]
    finally:
        if judge and "weights" not in result:
            failure_file(Path(task["judge"])).touch()
    run = RunFolder(folder)
    metrics = run.read("metrics.jsonl")
    early = metrics[:20] + metrics[20 :: max(1, len(metrics) // 30)]
    result |= {
        "loss": [[row["step"], row["loss"]] for row in early],
        "effective_decay": metrics[-1].get("effective_decay", 1.0) if metrics else None,
        "images_per_second": statistics.median(row["samples_per_second"] for row in metrics) if metrics else None,
        "warnings": sorted({row["warning"] for row in run.read("warnings.jsonl")}),
        "seconds": time.perf_counter() - start,
        "folder": folder.name,
    }
    online = [row for row in run.read("evals.jsonl") if row["evaluation"].startswith("knn-dino-v1, ")]
    if online:
        result["online"] = [[row["step"], row["knn20"], row["rank"]] for row in online]
    return result


def save_judge(task: dict[str, Any], folder: Path, config: Any) -> dict[str, Any]:
    """Saves the classifier and its statistics of the training images to the folder --judge, in one atomic rename.

    Returns its hash and the distances of the test images. Its weights are rounded to bfloat16, so that a compressed
    archive is small, since every machine that adds runs needs it.
    """
    import unskip
    from unskip.evals import extractor, generation
    from unskip.evals import statistics as statistics_of
    from unskip.recipes import open_splits
    from unskip.training import RunFolder

    place, last = Path(task["judge"]), RunFolder.open(folder).last_checkpoint()
    assert last is not None
    temporary = place.with_name(f"{place.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    unskip.save(unskip.load(last[1]).bfloat16().float(), temporary)
    judge = extractor(temporary, name="judge", device=task["device"])
    train, test = open_splits(config)
    options: dict[str, Any] = {"size": config.size, "batch": task["batch"]}
    reference = statistics_of(train, judge, cache=temporary / "statistics", **options)
    real = generation(test, reference, judge, **options)
    temporary.rename(place)
    return {"weights": judge.key, "real": {**real, "n": len(test)}}


def wait_for_judge(place: Path) -> Path:
    """Waits until the folder of the classifier exists, and returns it."""
    end = time.monotonic() + PATIENCE
    while not place.is_dir():
        if failure_file(place).exists() or time.monotonic() > end:
            raise RuntimeError(f"{place}: no judge was saved; this run is trained, and the same command continues it")
        time.sleep(1)
    return place


def failure_file(place: Path) -> Path:
    """The file that exists if the training of the classifier failed."""
    return place.with_name(f"{place.name}.failed")


def evaluated(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Evaluates a run: Fréchet distances, a picture of some samples, and features by block and time."""
    import unskip
    from unskip.evals import extractor
    from unskip.models import Sampling
    from unskip.recipes import evaluate_samples, open_run

    run, place = open_run(folder), wait_for_judge(Path(task["judge"]))
    judge = extractor(place, name="judge", device=task["device"])
    options: dict[str, Any] = {"precision": run.config.precision, "batch": task["batch"]}
    result: dict[str, Any] = {"weights": sum(weight.numel() for weight in run.model.parameters())}
    result |= {"judge": judge.key, "generation": {}}

    def drawn(how: Any, count: int) -> Any:
        return unskip.sample(run, count, how.cfg, sampler="heun", steps=how.steps, write=False, **options)

    def distances(how: Any, samples: Any) -> dict[str, float]:
        return evaluate_samples(run, judge, sampling=how, samples=samples, cache=place / "statistics", **options)

    for cfg in dict.fromkeys((1.0, CFG, *task["guided"])):
        begin, how = time.perf_counter(), Sampling("heun", task["sampling_steps"], cfg)
        full = cfg == 1.0 or cfg in task["guided"]
        samples = drawn(how, task["samples"] if full else GRID)
        if cfg in (1.0, CFG):
            picture(samples.images[:GRID], Path(task["pictures"]), f"{task['word']}-cfg{cfg:g}")
        if full:
            values = distances(how, samples)
            result["generation"][f"{cfg:g}"] = {**values, "seconds": time.perf_counter() - begin}
    for steps in task["curve"]:
        begin, how = time.perf_counter(), Sampling("heun", steps)
        values = distances(how, drawn(how, task["samples"]))
        entry = {**values, "seconds": time.perf_counter() - begin}
        result.setdefault("curve", {})[f"{values['evaluations']:g}"] = entry
    if task["levels"]:
        result["middle"] = middle_block(run, task["levels"], options)
    return {**result, "features": features_by_block(run, task["times"], options)}


def middle_block(run: Any, levels: list[float], options: dict[str, Any]) -> dict[str, Any]:
    """Test kNN of the middle block by noise level; nothing is selected here, so there is no held-out set."""
    from unskip.recipes import evaluate_run

    begin = time.perf_counter()
    _, rows = evaluate_run(run, [PROTOCOLS["knn20"]], times=levels, blocks="middle", pool="mean", **options)
    found = {f"{row.time:g}": round(row.values["knn20"], 5) for row in rows}
    return {"block": rows[0].block, "n": rows[0].n, "knn20": found, "seconds": time.perf_counter() - begin}


def features_by_block(run: Any, times: list[float], options: dict[str, Any]) -> dict[str, Any]:
    """kNN and probes; block and time are chosen on a held-out tenth of the training set, then tested."""
    from unskip.data._splits import HELD_OUT, divided
    from unskip.evals import evaluate, noised
    from unskip.recipes import evaluate_run, open_splits

    train, _ = open_splits(run.config)
    rest, held_out_part = (train.select(rows) for rows in divided(train.labels, HELD_OUT))
    names = list(PROTOCOLS.values())
    shared = {"pool": "mean", "size": run.config.size, **options}
    inputs = {time: noised(run.config.flow, time) for time in times}
    sweep = {
        time: evaluate(run.model, rest, held_out_part, names, inputs=hook, **shared) for time, hook in inputs.items()
    }
    result: dict[str, Any] = {}
    for number in PROTOCOLS:
        held_out = {f"{t:g}": by_block(rows, number) for t, rows in sweep.items()}
        _, block, t = max((value, -b, t) for t, values in held_out.items() for b, value in enumerate(values))
        result[number] = {"held_out": held_out, "block": -block, "time": float(t)}
    chosen = sorted({each["time"] for each in result.values()})
    _, tested = evaluate_run(run, names, times=chosen, pool="mean", **options)
    for number, each in result.items():
        each["test"] = by_block([row for row in tested if row.time == each["time"]], number)
    return result


def by_block(results: list[Any], number: str) -> list[float]:
    return [round(each.values[number], 5) for each in results if number in each.values]


def picture(images: Any, folder: Path, name: str) -> None:
    from PIL import Image

    from unskip.recipes._sample import grid_of

    folder.mkdir(parents=True, exist_ok=True)
    grid = grid_of(images).permute(1, 2, 0).numpy()
    Image.fromarray(grid[..., 0] if grid.shape[2] == 1 else grid).save(folder / f"{name}.png")


def check_judge(judge: dict[str, Any], place: Path) -> None:
    """Refuses a classifier other than that of the recorded runs, since their distances are not comparable."""
    from unskip.errors import UnskipError
    from unskip.evals import extractor

    result = None
    with contextlib.suppress(UnskipError):
        result = extractor(place).key
    if result != judge["weights"]:
        raise SystemExit(
            f"the judge of the recorded runs has weights {judge['weights']}, but {place} has "
            f"{result or 'none'}: set --judge to its folder, or choose another --out"
        )


# --- The study --------------------------------------------------------------------------------------------------------


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    if options.data is None:
        tiny: dict[str, Any] = {"preset": "digits", "data": "digits", "device": options.device, "steps": 40}
        tiny |= {"model_args": "width=32,depth=5,heads=2", "log_every": 10, "online_images": 500, "health": False}
        tiny["judge"] = {"preset": "digits", "steps": 300, "model_args": "depth=2,embed_dim=32,num_heads=2"}
        return {**tiny, "samples": 200, "sampling_steps": 5, "times": [0.5, 1.0]}
    graph = options.device == "cuda"
    fields: dict[str, Any] = {"preset": "cifar", "data": options.data, "device": options.device}
    fields |= {"steps": options.steps, "batch": options.batch, "compile": options.compile, "graph": graph}
    # Checkpoints are half a gigabyte, so they are written only at the end and when a run is stopped.
    fields |= {"evaluate_every": max(1, options.steps // 3), "checkpoint_every": options.steps, "log_every": 50}
    fields |= {"health": False, "samples": options.samples, "sampling_steps": options.sampling_steps}
    fields["times"] = [0.7, 0.8, 0.9, 0.95, 1.0]
    judge = {"preset": "cifar", "epochs": options.judge_epochs, "checkpoint_every": 10**6, "seed": 0}
    judge |= {"compile": options.compile, "graph": graph}
    return {**fields, "judge": judge}


def recorded_settings(fields: dict[str, Any]) -> dict[str, Any]:
    """The settings that affect results, without those of location and speed."""
    speed = ("data", "device", "compile", "graph", *MORE)
    kept = {key: value for key, value in fields.items() if key not in speed}
    return {**kept, "judge": {key: value for key, value in kept["judge"].items() if key not in speed}}


def arguments_of(description: str | None, out: str) -> argparse.ArgumentParser:
    """The command-line options of a study with a classifier for Fréchet distances."""
    parser = arguments(description, out)
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument(
        "--sampling-steps", type=int, default=25, help="steps of Heun's method, with two network evaluations each"
    )
    parser.add_argument("--judge-epochs", type=float, default=25)
    parser.add_argument("--judge-batch", type=int, default=2500, help="batch size of sampling and evaluation")
    parser.add_argument("--compile", action="store_true", help="compile each model; useful in long runs")
    parser.add_argument("--judge", type=Path, help="folder of the classifier for FD-judge (default RUNS/STUDY-judge)")
    parser.add_argument("--pictures", type=Path, help="folder of sample grids and figures (default docs/img)")
    return parser


def run_study(
    script: str,
    options: argparse.Namespace,
    fields: dict[str, Any],
    word: str,
    jobs: Callable[[dict[str, Any]], list[Job]],
) -> dict[str, Any]:
    """Does the runs of `jobs`, and returns all runs in the JSON; `word` is the name of the study."""
    real = options.data is not None
    options.out = options.out or (ROOT / "docs" / "results" if real else ROOT / "build") / f"{word}.json"
    options.pictures = options.pictures or (ROOT / "docs" / "img" if real else ROOT / "build" / "img")
    options.judge = options.judge or options.runs / f"{word}-judge"
    if options.show:
        shown: dict[str, Any] = json.loads(options.out.read_text())["runs"]
        return shown
    from unskip.evals import PROTOCOLS as KNOWN

    data = opened(options.out, recorded_settings(fields))
    done: dict[str, Any] = data["runs"]
    data |= about(
        script,
        options.device,
        recorded_settings(fields),
        protocols={name: KNOWN[name].to_dict() for name in PROTOCOLS.values()},
        splits="a tenth of the training set, held out of it, chooses block and time; the test set evaluates there",
        sampling={"sampler": "heun", "steps": fields["sampling_steps"], "reference": "the whole training set"},
    )
    if "judge" in done:
        check_judge(done["judge"], options.judge)
    elif options.judge.exists():
        raise SystemExit(
            f"{options.judge} has a judge that is not recorded in {options.out}. Set --out to the JSON of its study,"
            " choose another folder with --judge, or delete this one"
        )
    options.judge.parent.mkdir(parents=True, exist_ok=True)
    failure_file(options.judge).unlink(missing_ok=True)
    options.only = ["judge", *options.only]  # all runs need it; a single worker would otherwise wait forever

    def task_of(name: str, config: dict[str, Any]) -> dict[str, Any]:
        task = {"config": config, "folder": str(folder_of(options.runs, name, config))}
        task |= {key: fields[key] for key in ("samples", "sampling_steps", "times", "device")}
        task |= {key: fields.get(key, []) for key in MORE}
        task |= {"judge": str(options.judge), "pictures": str(options.pictures), "batch": options.judge_batch}
        return task | {"word": f"{word}-{name.replace(' | ', '-').replace(',', '').replace(' ', '-')}"}

    study(script, data, lambda: jobs(done), task_of, options, tell)
    return done


def main() -> None:
    parser = arguments_of(__doc__, "sit-cifar.json; digits go to build/sit-digits.json")
    parser.add_argument("--alpha", default="0.8", help="alpha_min, or product=5e-3 for an effective decay")
    parser.add_argument(
        "--guided", action="store_true", help=f"also distances with guidance {CFG:g}; three times the work"
    )
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    fields = {**settings_of(options), "guided": [CFG] if options.guided else []}
    word = f"sit-{fields['preset']}"
    done = run_study(__file__, options, fields, word, lambda done: jobs(done, fields, options.alpha))
    print(judge_line(done) + table(done))
    if any("generation" in row for row in done.values()):
        figure(done, options.pictures / f"{word}.svg")


def tell(name: str, row: dict[str, Any]) -> str:
    shown = {key: round(value, 3) for key, value in row.get("generation", {}).get("1", {}).items()}
    pace = f"{row['images_per_second'] or 0:.0f} images/s, judged in {row.get('judged_seconds', 0):.0f} s"
    return f"{shown or row.get('diverged') or row.get('test_accuracy')}, {pace}"


if __name__ == "__main__":
    main()
