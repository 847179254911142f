"""Measures what removing skips costs a trained classifier: four ways, three choices of sites, three lengths.

python benchmarks/convert.py --data "DATA/cifar10-{split}.parquet" --device cuda --workers 8 --limit 540 --begin
python benchmarks/convert.py                                            # digits on the CPU, a few steps per run

A residual classifier is trained for 100 epochs, or reused if --runs contains one from an earlier call. The skips of its
MLPs, of attention, or all skips are removed during 1, 5 or 20 epochs of fine-tuning:

at once                the skips are cut from the first step on
annealed               from 1 to 0 over the first half of the steps
annealed, distilled    the same, with the outputs of the original as targets instead of the labels
site by site           one site after the other, from the last to the first, over the first half of the steps

The control is fine-tuned for the same number of epochs with its skips. For each choice of sites and each way, the
learning rate is chosen at 5 epochs on a held-out tenth of the training set, which the original used in the search was
not trained on either; if the best rate is at the edge of the grid, the grid is extended. There is one original; seeds
are those of fine-tuning. Accuracy with 8 bits is that of quantised-accuracy-v1 with one range per tensor. Latency and
memory depend only on the wiring: they are measured first, alternating between wirings in one process, while nothing
else runs.

Estimated on one H200: 35 million images for the first seed, 15 minutes at 40,000 images/s of 8 workers, and about 5
minutes for compiling and evaluating; 8 minutes for the second seed. Each result is written to the JSON as soon as it is
available; to continue, run the same command again.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import statistics
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _study import Job, about, arguments, attempt, folder_of, opened, results, search, serve, study

Config = dict[str, Any]
SITES = {"MLPs": "mlp", "attention": "attention", "all": None}
WAYS: dict[str, Config] = {
    "at once": {"shortcut": "cut"},
    "annealed": {"shortcut": "anneal:keep>cut@{half}"},
    "annealed, distilled": {"shortcut": "anneal:keep>cut@{half}", "teacher": "original"},
    "site by site": {"shortcut": "anneal:keep>cut@{half},last-first"},
}
KEPT = ("none", "kept")  # the control
PAIRS = [KEPT, *itertools.product(SITES, WAYS)]
EPOCHS = (1, 5, 20)
SEARCHED = 5  # epochs in the learning-rate search
RATE, FACTOR, EDGES = 1e-3, 3.0, 2  # the grid: middle rate, factor between rates, and most steps from the middle
SEEDS = (0, 1)  # of fine-tuning; the original has seed 0
DECAY = 0.3
ORIGINAL = {"lr": 3e-3, "init": "default:position_code=orthogonal"}
SHARED: Config = {"optimizer": "soap", "weight_decay": DECAY, "decays": "blocks", "mixup": 0.8, "cutmix": 1.0}
SHARED |= {"health": False, "log_every": 40}
# By preset: model shape, (images, batch), steps of the original (100 epochs) and of each length, input format.
SHAPES = {"digits": (2, 32, 2), "cifar": (12, 192, 3)}  # depth, width, heads
IMAGES = {"digits": (1438, 64), "cifar": (50_000, 512)}
STEPS = {"digits": {100: 20, 1: 4, 5: 6, 20: 8}}
QUANTISED = "quantised-accuracy-v1"
ROUNDED = "accuracy_8_tensor_minmax"
FACTS = {"digits": {"img_size": 8, "patch_size": 2, "in_chans": 1}, "cifar": {"img_size": 32, "patch_size": 4}}


def steps_of(preset: str, epochs: int, validate: bool) -> int:
    if preset in STEPS:
        return STEPS[preset][epochs]
    images, batch = IMAGES[preset]
    return epochs * ((images - images // 10 if validate else images) // batch)


def shape_of(preset: str) -> Config:
    depth, width, heads = SHAPES[preset]
    return {"class_token": False, "global_pool": "avg", "depth": depth, "embed_dim": width, "num_heads": heads}


def converted(preset: str, sites: str, way: str, lr: float, epochs: int, validate: bool, seed: int = 0) -> Config:
    """The config of a fine-tuning run."""
    steps = steps_of(preset, epochs, validate)
    own = dict(WAYS.get(way, {}))
    if "shortcut" in own:
        own |= {"shortcut": own["shortcut"].format(half=max(1, steps // 2)), "where": SITES[sites]}
    return {**own, "lr": lr, "steps": steps, "validate": validate, "seed": seed}


def chosen_of(preset: str, sites: str, way: str, done: dict[str, Any]) -> tuple[list[Job], Config | None]:
    """The runs that the learning-rate search still needs, and the best config once it is complete."""

    def job(step: int, decay: float) -> Job:
        lr = float(f"{RATE * FACTOR**step:.2g}")
        return f"search | {sites} | {way} | {lr:g}", converted(preset, sites, way, lr, SEARCHED, True)

    return search(job, (DECAY,), EDGES, lambda row: float(row.get("val_accuracy") or 0), done)


def original_of(preset: str, validate: bool) -> Job:
    """The run of the residual classifier, trained on all images or without the held-out ones."""
    steps = steps_of(preset, 100, validate)
    name = "a tenth held out" if validate else "all images"
    return f"original | {name}", {**ORIGINAL, "steps": steps, "validate": validate, "seed": 0}


def waiting(preset: str, runs: Path, done: dict[str, Any]) -> Iterator[Job]:
    """Yields the runs that can start now. The cost is measured first, while nothing else runs."""
    if "cost" not in done:
        yield "cost", {}
        return
    found = {pair: chosen_of(preset, *pair, done) for pair in PAIRS}
    searches = [job for jobs, _ in found.values() for job in jobs]
    finals = []
    for seed, epochs, (pair, (_, chosen)) in itertools.product(SEEDS, EPOCHS, found.items()):
        name = f"final | {' | '.join(pair)} | {epochs} epochs | seed {seed}"
        if chosen is not None and name not in done:
            finals.append((name, converted(preset, *pair, chosen["lr"], epochs, False, seed)))
    for validate, jobs in ((True, searches), (False, finals)):
        name, config = original_of(preset, validate)
        if name in done and place(runs, preset, name, config).exists():
            yield from jobs
        elif jobs or searches:
            yield name, config


def place(runs: Path, preset: str, name: str, config: Config) -> Path:
    """The folder of a run."""
    return folder_of(runs, f"convert-{preset} | {name}", config)


# --- One run ----------------------------------------------------------------------------------------------------------


def work(task: Config) -> dict[str, Any] | None:
    """Trains or resumes one run in this process; None if it was stopped."""
    warnings.simplefilter("ignore")
    kinds = {"cost": measured, "original": original}
    unrecorded = ("name", "preset", "data", "device", "folder", "weights")
    return attempt(task, kinds.get(task["name"].partition(" | ")[0], tuned), unrecorded)


def trained(task: Config) -> tuple[Any, dict[str, Any]]:
    """Trains the recipe; returns its outcome (None if it diverged) and the record."""
    import unskip
    from unskip.training import RunFolder

    preset, folder = task["preset"], Path(task["folder"])
    fields = {key: value for key, value in task.items() if key not in ("name", "preset", "folder")}
    more = {"model_args": shape_of(preset), "checkpoint_every": 2000}
    config = unskip.recipes.supervised(preset, **SHARED, **more, **fields)
    going = (folder / "config.json").exists()
    try:
        outcome = unskip.resume(folder, quiet=True) if going else unskip.train(config, folder, quiet=True)
    except unskip.errors.TrainingError as error:
        return None, {"diverged": str(error).partition(": ")[2]}
    rows = RunFolder.open(folder).read("metrics.jsonl")
    result = {key: round(float(value), 5) for key, value in outcome.evaluations.items()}
    result["loss"] = [[row["step"], round(float(row["loss"]), 4)] for row in rows[:: max(1, len(rows) // 20)]]
    result["images_per_second"] = round(statistics.median(row["samples_per_second"] for row in rows))
    return outcome, result


def original(task: Config) -> dict[str, Any] | None:
    """Trains a residual classifier and keeps its folder; also measures accuracy with skips cut, without training."""
    import unskip

    outcome, result = trained(task)
    if outcome is None or not outcome.finished:
        return result if outcome is None else None
    run = unskip.recipes.open_run(task["folder"])
    run, rounded = unskip.recipes.evaluate_run(run, [QUANTISED])
    result |= {"quantised": values(rounded[0]), "n": rounded[0].n}
    result["cut, not trained"] = {}
    for name, where in SITES.items():
        with unskip.rewired(run.model, "cut", run.objective.example(run.facts).to(device_of(run.model)), where):
            (found,) = unskip.recipes.evaluate_run(run, ["accuracy-v1"])[1]
        result["cut, not trained"][name] = found.values["accuracy"]
    result["weights"] = digest(task["folder"])
    return result


def tuned(task: Config) -> dict[str, Any] | None:
    """Fine-tunes the weights of the original; for a final run, also measures quantised accuracy."""
    import unskip

    outcome, result = trained(task)
    if outcome is not None:
        if not outcome.finished:
            return None
        result["of"] = digest(task["weights"])
        if not task["validate"]:
            _, rounded = unskip.recipes.evaluate_run(task["folder"], [QUANTISED])
            result |= {"quantised": values(rounded[0]), "n": rounded[0].n}
    shutil.rmtree(task["folder"])  # all that is reported is in the JSON
    return result


def measured(task: Config) -> dict[str, Any]:
    """Latency and memory with each choice of skips removed."""
    from _wiring_cost import costs

    return costs({**FACTS[task["preset"]], **shape_of(task["preset"])}, SITES, task["device"])


def values(result: Any) -> dict[str, float]:
    return {key: float(f"{value:.4g}") for key, value in result.values.items()}


def digest(run: str) -> str:
    """A hash of the weights of a run, which identifies the original."""
    from unskip.training import RunFolder

    last = RunFolder.open(run).last_checkpoint()
    assert last is not None
    return hashlib.sha256((last[1] / "model.safetensors").read_bytes()).hexdigest()[:12]


def device_of(model: Any) -> Any:
    return next(model.parameters()).device


# --- Results ----------------------------------------------------------------------------------------------------------


def tell(name: str, row: dict[str, Any]) -> str:
    if name == "cost":
        return ", ".join(
            f"{key}: all cut x {entry['all']['ratio']:.3f}" for key, entry in row.items() if "batch" in key
        )
    shown = {key: round(entry, 4) for key, entry in row.items() if key.endswith("accuracy")}
    return f"{row.get('diverged') or row.get('failed') or shown}, {row.get('images_per_second', 0)} images/s"


def table(done: dict[str, Any]) -> str:
    """Markdown tables: accuracy by sites, way and length, then the cost of each wiring."""
    lines = [
        "| skips removed | how | lr | 1 epoch | 5 epochs | 20 epochs | 8 bits, 20 epochs | seeds |",
        "|---" * 8 + "|",
    ]
    first = done.get("original | all images", {})
    if "test_accuracy" in first:
        score, rounded = (f"{100 * each:.2f}" for each in (first["test_accuracy"], first["quantised"][ROUNDED]))
        lines.append(f"| none | the original | {ORIGINAL['lr']:g} | {score} | | | {rounded} | 1 |")
        for name, score in first["cut, not trained"].items():
            lines.append(f"| {name} | not trained | | {100 * score:.2f} | | | | 1 |")
    for pair in PAIRS:
        found = {
            epochs: [
                row
                for name, row in done.items()
                if name.startswith(f"final | {' | '.join(pair)} | {epochs} epochs |") and "test_accuracy" in row
            ]
            for epochs in EPOCHS
        }
        if not any(found.values()):
            continue
        rate = next(rows[0]["config"]["lr"] for rows in found.values() if rows)
        cells = [spread([row["test_accuracy"] for row in rows]) for rows in found.values()]
        cells.append(spread([row["quantised"][ROUNDED] for row in found[EPOCHS[-1]]]))
        lines.append(f"| {' | '.join([*pair, f'{rate:g}', *cells])} | {max(map(len, found.values()))} |")
    if "cost" in done:
        lines += ["", "| | skips removed | ms | over the original | MiB |", "|---" * 5 + "|"]
        for key, entry in costs_in(done["cost"]).items():
            for name, row in entry.items():
                memory = f"{row['peak_mib']:.1f}" if row.get("peak_mib") else ""
                lines.append(f"| {key} | {name} | {row['median_ms']:.3f} | {row['ratio']:.3f} | {memory} |")
    return "\n".join(lines)


def costs_in(row: dict[str, Any]) -> dict[str, Any]:
    return {key: entry for key, entry in row.items() if "batch" in key}


def spread(values: list[float]) -> str:
    """The mean, and the standard deviation if there are several values."""
    if not values:
        return ""
    deviation = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.2f}{deviation}"


def main() -> None:
    parser = arguments(__doc__, "convert-cifar.json, or build/convert-digits.json")
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    preset = "digits" if options.data is None else "cifar"
    options.out = options.out or results(options.data) / f"convert-{preset}.json"
    runs = options.runs.absolute()
    settings = {"preset": preset, "epochs": [*EPOCHS], **SHARED}
    data = opened(options.out, settings)
    done = data["runs"]
    if not options.show:
        data |= about(__file__, options.device, settings, original=ORIGINAL)
        fields: Config = {"preset": preset, "device": options.device}
        if options.data is not None:
            fields["data"] = options.data

        def task_of(name: str, config: Config) -> Config:
            task = {**config, **fields, "name": name, "folder": str(place(runs, preset, name, config))}
            if name.startswith(("search", "final")):
                task["weights"] = str(place(runs, preset, *original_of(preset, config["validate"])))
            return task

        study(__file__, data, lambda: [*waiting(preset, runs, done)], task_of, options, tell)
    print(table(done))


if __name__ == "__main__":
    main()
