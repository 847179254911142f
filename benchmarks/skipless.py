"""Does a ViT without skips keep up? Supervised training, with and without skips, under three optimizers.

python benchmarks/skipless.py --data "DATA/cifar10-{split}.parquet" --device cuda --workers 3 --limit 540
python benchmarks/skipless.py                                             # digits on the CPU, a few epochs

sweep    learning rates a factor of three apart, one seed, judged on a tenth of the training set that is held out;
         rates are added until the best lies between two others
final    at the best rate of each, three seeds judged on the test set, and with the skips of one kind alone cut
time     once `--pace` has timed the optimizers, the same at the wall time of SOAP
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
import warnings
from typing import Any

from _study import ROOT, Job, about, arguments, opened, serve, study, write

WIRINGS: dict[str, dict[str, str]] = {
    "residual": {},
    "skipless": {"shortcut": "cut"},
    "skipless + init": {"shortcut": "cut", "init": "skipless"},
}
GRID = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
RATES = {"adamw": (3e-4, 1e-3, 3e-3), "muon": (1e-3, 3e-3, 1e-2), "soap": (1e-3, 3e-3, 1e-2)}  # to begin with
SEEDS = (0, 1, 2)


def jobs(done: dict[str, Any], fields: dict[str, Any], epochs: tuple[float, float]) -> list[Job]:
    """What is still to be run, what matters most first; what a missing result decides is not there yet."""
    sweep: list[Job] = []
    final: list[Job] = []
    longer: list[Job] = []
    for (wiring, changes), optimizer in itertools.product(WIRINGS.items(), RATES):
        config = {**fields, **changes, "optimizer": optimizer}
        rates, best = swept(done, wiring, optimizer)
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
    return [(name, config) for name, config in sweep + final + longer if name not in done]


def swept(done: dict[str, Any], wiring: str, optimizer: str) -> tuple[list[float], float | None]:
    """The rates to be tried, and the best once it is known not to lie at their edge."""
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
    """Seconds a step of every optimizer, with and without skips, measured with nothing beside it."""
    import unskip

    found: dict[str, dict[str, float]] = {}
    for wiring, optimizer in itertools.product(("residual", "skipless"), RATES):
        config = {**fields, **WIRINGS[wiring], "optimizer": optimizer, "lr": 1e-4, "steps": 120, "log_every": 20}
        with tempfile.TemporaryDirectory() as folder:
            unskip.train(unskip.recipes.supervised(config.pop("preset"), **config), f"{folder}/run", quiet=True)
            rows = unskip.training.RunFolder(f"{folder}/run").read("metrics.jsonl")
        found.setdefault(wiring, {})[optimizer] = statistics.median(row["seconds"] / 20 for row in rows[2:])
    return found


def work(config: dict[str, Any]) -> dict[str, Any] | None:
    """One run, in this process; None where it was told to stop."""
    import unskip

    warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
    preset = config.pop("preset")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = unskip.train(unskip.recipes.supervised(preset, **config), f"{folder}/run", quiet=True)
            if not outcome.finished:
                return None
            found: dict[str, Any] = dict(outcome.evaluations)
        except unskip.errors.TrainingError as error:
            found = {"diverged": str(error).partition(": ")[2]}
        rows = unskip.training.RunFolder(f"{folder}/run").read("metrics.jsonl")
        raised = unskip.training.RunFolder(f"{folder}/run").read("warnings.jsonl")
    curve = [[row["step"], row["loss"]] for row in rows[:: max(1, len(rows) // 25)]]
    told = {key: value for key, value in config.items() if key not in ("data", "device")}
    found |= {"seconds": time.perf_counter() - start, "loss": curve, "config": told}
    if rows:
        found["images_per_second"] = statistics.median(row["samples_per_second"] for row in rows)
    return found | {"warnings": sorted({row["warning"] for row in raised})}


def table(done: dict[str, Any]) -> str:
    """Mean and spread over the seeds of each final run."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for name, row in done.items():
        if name.startswith(("final", "time")):
            groups.setdefault(tuple(name.split(" | ")[:4]), []).append(row)
    lines = [f"{'':6s} {'':22s} {'optimizer':9s} {'lr':>7s} {'epochs':>7s}  accuracy over seeds"]
    for (kind, wiring, optimizer, rate), rows in groups.items():
        values = [row.get("test_accuracy", 0.0) for row in rows]
        spread = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        lines.append(
            f"{kind:6s} {wiring:22s} {optimizer:9s} {rate:>7s} {rows[0]['config']['epochs']:7.1f}  "
            f"{statistics.mean(values):.3f}{spread} ({len(values)})"
        )
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, "skipless-cifar.json, or -digits")
    parser.add_argument("--pace", action="store_true", help="time the optimizers, with nothing beside them, and end")
    parser.add_argument("--compile", action="store_true", help="compile each model too: pays off in long runs")
    parser.add_argument("--epochs", type=float, nargs=2, default=(5, 20), help="of the sweep, and of the final runs")
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    fields = {"preset": "digits", "device": options.device}
    epochs = (3, 10)
    if options.data is not None:
        fields = {"preset": "cifar", "data": options.data, "device": options.device, "log_every": 50}
        fields["compile"] = options.compile
        epochs = tuple(options.epochs)
    options.out = options.out or ROOT / "docs" / "results" / f"skipless-{fields['preset']}.json"
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
