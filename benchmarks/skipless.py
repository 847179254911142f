"""Compares supervised training of ViTs with and without skips, with three optimizers.

python benchmarks/skipless.py --data "DATA/cifar10-{split}.parquet" --device cuda --workers 3 --limit 540
python benchmarks/skipless.py                                             # digits on the CPU, a few epochs

sweep    learning rates a factor of three apart, one seed, evaluated on a held-out tenth of the training set; rates are
         added until the best lies between two others
final    at the best rate of each, three seeds evaluated on the test set; also with only the skips of one kind cut
time     after `--pace` has timed the optimizers, the same at the wall time of SOAP
try      possible remedies without skips, and decayed shortcuts, one seed, held out; with statistics by block for SOAP
longer   three times the epochs, one seed: residual, skipless + init, and the best tries with and without skips
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from _study import Job, about, arguments, opened, results, serve, study, write

WIRINGS: dict[str, dict[str, str]] = {
    "residual": {},
    "skipless": {"shortcut": "cut"},
    "skipless + init": {"shortcut": "cut", "init": "skipless"},
}
GRID = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
RATES = {"adamw": (3e-4, 1e-3, 3e-3), "muon": (1e-3, 3e-3, 1e-2), "soap": (1e-3, 3e-3, 1e-2)}  # the initial rates
SEEDS = (0, 1, 2)
# References and possible remedies, with statistics by block; trained with SOAP.
TRIES: dict[str, dict[str, Any]] = {
    "residual": {},
    "skipless": {"shortcut": "cut"},
    "skipless + init": {"shortcut": "cut", "init": "skipless"},
    "centred": {"shortcut": "cut", "init": "skipless:centre"},
    "other constants": {"shortcut": "cut", "init": "skipless:vit-small"},
    "beta 1.5": {"shortcut": "cut", "init": "skipless:beta=1.5"},
    "beta 2": {"shortcut": "cut", "init": "skipless:beta=2"},
    "beta 3": {"shortcut": "cut", "init": "skipless:beta=3"},
    "beta 1.5, alpha 1": {"shortcut": "cut", "init": "skipless:alpha=1,beta=1.5"},
    "centred, sharper attention": {"shortcut": "cut", "init": "skipless:centre,beta=2"},
    "centred, smaller steps": {"shortcut": "cut", "init": "skipless:centre", "lr": 1 / 3},
    "annealed away": {"shortcut": "anneal:keep>cut@{half}"},
    "annealed away, centred": {"shortcut": "anneal:keep>cut@{half}", "init": "skipless:centre"},
    "decayed": {"shortcut": "decay:product=0.001"},
}
KNOWN = ("residual", "skipless", "skipless + init")
# Trained with every optimizer, at its best rate for the residual model.
DECAYS = {"residual": "keep", "decayed to 0.1": "decay:product=0.1", "decayed to 0.01": "decay:product=0.01"}
DECAYS |= {"decayed": "decay:product=0.001"}


def jobs(done: dict[str, Any], fields: dict[str, Any], epochs: tuple[float, float]) -> list[Job]:
    """The runs that are not done, by priority, without those whose settings depend on missing results."""
    sweep: list[Job] = []
    final: list[Job] = []
    longer: list[Job] = []
    for (wiring, changes), optimizer in itertools.product(WIRINGS.items(), RATES):
        config = {**fields, **changes, "optimizer": optimizer}
        rates, best = sweep_of(done, wiring, optimizer)
        for rate in rates:
            trial = {**config, "lr": rate, "validate": True, "epochs": epochs[0]}
            sweep.append((f"sweep | {wiring} | {optimizer} | {rate:g}", trial))
        if best is None:
            continue
        config |= {"lr": best, "epochs": epochs[1]}
        for seed in SEEDS:
            name = f"{optimizer} | {best:g} | seed {seed}"
            final.append((f"final | {wiring} | {name}", {**config, "seed": seed}))
            if wiring == "skipless + init" and optimizer == "soap":
                for where in ("attention", "mlp"):
                    final.append((f"final | {where} cut + init | {name}", {**config, "where": where, "seed": seed}))
            if "pace" in done and optimizer != "soap" and wiring != "skipless":
                pace = done["pace"]["residual" if wiring == "residual" else "skipless"]
                more = round(epochs[1] * pace["soap"] / pace[optimizer], 1)
                longer.append((f"time | {wiring} | {name}", {**config, "seed": seed, "epochs": more}))
    final.sort(key=lambda job: job[1]["seed"])
    tries = [*tries_of(done, fields, epochs[1])]
    return [(name, config) for name, config in sweep + final + longer + tries if name not in done]


def tries_of(done: dict[str, Any], fields: dict[str, Any], epochs: float) -> Iterator[Job]:
    """Yields each remedy at the best rate of skipless + init, and the residual model at its own best rate."""
    skipless_rate, base = (sweep_of(done, wiring, "soap")[1] for wiring in ("skipless + init", "residual"))
    if skipless_rate is None or base is None:
        return
    names = {}
    for name, changes in TRIES.items():
        config = {**fields, **changes, "optimizer": "soap", "epochs": epochs}
        config["lr"] = (base if name == "residual" else skipless_rate) * changes.get("lr", 1)
        names[name] = f"try | {name} | soap | {config['lr']:g}"
        yield names[name], {**config, "validate": True, "watch": True}
        if name in ("residual", "skipless + init"):
            yield f"longer | {name} | soap | {config['lr']:g} | seed 0", {**config, "epochs": 3 * epochs}
    if all(name in done for name in names.values()):
        for best in remedies(done, names):
            changes = TRIES[best]
            for seed in SEEDS:
                config = {
                    **fields,
                    **changes,
                    "optimizer": "soap",
                    "epochs": epochs,
                    "lr": skipless_rate * changes.get("lr", 1),
                }
                yield f"final | {best} | soap | {config['lr']:g} | seed {seed}", {**config, "seed": seed}
                if seed == 0:
                    yield f"longer | {best} | soap | {config['lr']:g} | seed 0", {**config, "epochs": 3 * epochs}
    for optimizer, (name, shortcut) in itertools.product(RATES, DECAYS.items()):
        rate = sweep_of(done, "residual", optimizer)[1]
        if rate is not None and not (optimizer == "soap" and name in TRIES):
            config = {**fields, "optimizer": optimizer, "epochs": epochs, "lr": rate, "validate": True}
            yield f"try | {name} | {optimizer} | {rate:g}", {**config, "shortcut": shortcut}


def remedies(done: dict[str, Any], names: dict[str, str]) -> list[str]:
    """The best try without skips, and the best with skips."""
    accuracy = {name: done[run].get("val_accuracy", 0.0) for name, run in names.items() if name not in KNOWN}
    cut = {name for name in accuracy if TRIES[name]["shortcut"] == "cut"}
    return [max(group, key=accuracy.__getitem__) for group in (cut, accuracy.keys() - cut)]


def sweep_of(done: dict[str, Any], wiring: str, optimizer: str) -> tuple[list[float], float | None]:
    """The rates of the sweep, and the best one; None until it is known and not at the edge."""
    first, last = GRID.index(RATES[optimizer][0]), GRID.index(RATES[optimizer][-1])
    while True:
        rates = GRID[first : last + 1]
        rows = [done.get(f"sweep | {wiring} | {optimizer} | {rate:g}") for rate in rates]
        if None in rows:
            return [*rates], None
        values = [row.get("val_accuracy", 0.0) for row in rows if row is not None]
        best = values.index(max(values))
        if best == 0 and first > 0:
            first -= 1
        elif best == len(rates) - 1 and last < len(GRID) - 1:
            last += 1
        else:
            return [*rates], rates[best]


def pace(fields: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds per step of every optimizer, with and without skips; nothing else should run."""
    import unskip

    result: dict[str, dict[str, float]] = {}
    for wiring, optimizer in itertools.product(("residual", "skipless"), RATES):
        config = {**fields, **WIRINGS[wiring], "optimizer": optimizer, "lr": 1e-4, "steps": 120, "log_every": 20}
        with tempfile.TemporaryDirectory() as folder:
            unskip.train(unskip.recipes.supervised(config.pop("preset"), **config), f"{folder}/run", quiet=True)
            rows = unskip.training.RunFolder(f"{folder}/run").read("metrics.jsonl")
        result.setdefault(wiring, {})[optimizer] = statistics.median(row["seconds"] / 20 for row in rows[2:])
    return result


def work(config: dict[str, Any]) -> dict[str, Any] | None:
    """Trains and evaluates one run in this process; None if it was stopped."""
    import unskip
    from unskip.recipes import build_task
    from unskip.training import RunFolder, run_task

    warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
    fields, start = dict(config), time.perf_counter()
    watch = fields.pop("watch", False)
    planned = unskip.recipes.supervised(fields.pop("preset"), **fields)
    with tempfile.TemporaryDirectory() as folder:
        if "{half}" in planned.shortcut:  # the number of steps depends on the data
            _, schedule = build_task(replace(planned, shortcut="keep"))
            planned = replace(planned, shortcut=planned.shortcut.format(half=schedule.steps // 2))
        task, schedule = build_task(planned)
        if watch:
            task = replace(task, evaluations={**task.evaluations, "watch": lambda model: watched(model, task.sample)})
            schedule = replace(schedule, evaluate_every=max(1, schedule.steps // 3))
        run = RunFolder.create(f"{folder}/run", {}, config["device"])
        result: dict[str, Any] = {}
        try:
            outcome = run_task(task, schedule, run, quiet=True)
            if not outcome.finished:
                return None
            result = {key: value for key, value in outcome.evaluations.items() if not key.endswith("]")}
        except unskip.errors.TrainingError as error:
            result["diverged"] = str(error).partition(": ")[2]
        rows, raised, evaluations = (run.read(f"{name}.jsonl") for name in ("metrics", "warnings", "evals"))
    recorded = {key: value for key, value in config.items() if key not in ("data", "device")}
    curve = [[row["step"], row["loss"]] for row in rows[:: max(1, len(rows) // 25)]]
    result |= {"seconds": time.perf_counter() - start, "loss": curve, "config": recorded}
    if rows:
        result["images_per_second"] = statistics.median(row["samples_per_second"] for row in rows)
    if watch:
        seen = [row for row in evaluations if row["evaluation"] == "watch"]
        names = dict.fromkeys(key.partition("[")[0] for row in seen for key in row if key.endswith("]"))
        result["watch"] = {"step": [row["step"] for row in seen]}
        result["watch"] |= {name: [[*values_of(row, name)] for row in seen] for name in names}
    return result | {"warnings": sorted({row["warning"] for row in raised})}


def watched(model: Any, sample: Any) -> dict[str, float]:
    """By block: token cosine and rank, self-attention, inverse condition numbers of attention and of W_V W_O."""
    import torch

    import unskip

    result: dict[str, float] = {}
    for index, tokens in unskip.features(model, sample, pool=None).items():
        unit = torch.nn.functional.normalize(tokens.double(), dim=-1)
        count = tokens.shape[1]
        others = (unit @ unit.mT).sum((1, 2)) - count  # without the cosine of a token with itself, 1
        result[f"cosine[{index}]"] = float(others.mean()) / (count * (count - 1))
    seen = unskip.measure(model, sample, jacobians="off").to_dict()
    for index, row in enumerate(seen["blocks"]):
        result[f"token_rank[{index}]"] = row["token_rank"]
    for index, row in enumerate(row for row in seen["sites"] if row["kind"] == "attention"):
        result[f"self_attention[{index}]"] = statistics.mean(row["self_attention"])
        inverses = [0.0 if each is None else 1 / each for each in row["attention_condition"]]  # None: singular
        result[f"attention_inverse_condition[{index}]"] = statistics.median(inverses)
        result[f"value_output_inverse_condition[{index}]"] = 1 / (row["value_output"] or math.inf)
    return result


def values_of(row: dict[str, Any], name: str) -> Iterator[float]:
    """Yields the values of a statistic by block."""
    index = 0
    while f"{name}[{index}]" in row:
        yield float(f"{row[f'{name}[{index}]']:.4g}")
        index += 1


def groups(done: dict[str, Any]) -> dict[tuple[str, str, str, str], list[dict[str, Any]]]:
    """Runs grouped by kind, wiring, optimizer and rate: those of a group differ only in their seed."""
    result: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for name, row in done.items():
        kind, *rest = name.split(" | ")
        if kind in ("final", "time", "longer", "try"):
            result.setdefault((kind, rest[0], rest[1], rest[2]), []).append(row)
    return result


def accuracies(rows: list[dict[str, Any]]) -> list[float]:
    """Accuracies in per cent of the runs that did not diverge."""
    return [100 * row.get("test_accuracy", row.get("val_accuracy")) for row in rows if "diverged" not in row]


def table(done: dict[str, Any]) -> str:
    """Markdown table with one row per configuration: mean and standard deviation over seeds."""
    lines = ["| | wiring | optimizer | lr | epochs | seeds | accuracy | |", "|---" * 8 + "|"]
    for (kind, wiring, optimizer, rate), rows in sorted(groups(done).items()):
        values = accuracies(rows)
        shown = [f"{statistics.mean(values):.1f}"] if values else []
        shown += [f"± {statistics.stdev(values):.1f}"] if len(values) > 1 else []
        shown += [f"({len(rows) - len(values)} diverged)"] if len(values) < len(rows) else []
        split = "held out" if kind == "try" else "test"
        cells = [kind, wiring, optimizer, rate, f"{rows[0]['config']['epochs']:g}", str(len(rows)), " ".join(shown)]
        lines.append(f"| {' | '.join(cells)} | {split} |")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, "skipless-cifar.json; of digits in build")
    parser.add_argument("--pace", action="store_true", help="only time the optimizers; nothing else should run")
    parser.add_argument(
        "--epochs", type=float, nargs=2, default=(5, 20), help="epochs of the sweep, and of the final runs"
    )
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    fields = {"preset": "digits", "device": options.device}
    epochs = (3, 10)
    if options.data is not None:
        fields = {"preset": "cifar", "data": options.data, "device": options.device, "log_every": 50}
        epochs = tuple(options.epochs)
    options.out = options.out or results(options.data) / f"skipless-{fields['preset']}.json"
    data = opened(options.out, {"preset": fields["preset"], "epochs": [*epochs]})
    done = data["runs"]
    if not options.show:
        data |= about(__file__, options.device, {"preset": fields["preset"], "epochs": [*epochs]})
        if options.pace:
            done["pace"] = pace(fields)
            write(data, options.out)
            print(json.dumps(done["pace"]))
            return
        study(__file__, data, lambda: jobs(done, fields, epochs), lambda name, config: config, options, tell)
    print(table(done))


def tell(name: str, row: dict[str, Any]) -> str:
    shown = {key: round(value, 3) for key, value in row.items() if key.endswith("accuracy")}
    return f"{shown or row.get('diverged')}, {row.get('images_per_second', 0):.0f} images/s"


if __name__ == "__main__":
    main()
