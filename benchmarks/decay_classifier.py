"""Compares classifiers with residual and decayed shortcuts (two effective decays), trained with SOAP and AdamW.

python benchmarks/decay_classifier.py --data "DATA/cifar10-{split}.parquet" --device cuda --workers 8 --limit 1600
python benchmarks/decay_classifier.py                                     # digits on the CPU, six steps per run

Every model has mean pooling and a strong position code, as in skipless_gap.py. For each wiring and optimizer, weight
decay is chosen at the middle learning rate, then the learning rate at the best weight decay, by accuracy on a held-out
tenth of the training set; if the best rate is at the edge of the grid, the grid is extended. The best setting is
trained on the whole training set. Since the best weight decay changes with length, long runs with SOAP are made at
each.

search   20 epochs, held-out accuracy
short    20 epochs, three seeds, test accuracy
long     100 epochs with mixup and cutmix, two seeds, test accuracy
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from typing import Any

from _skipless_run import BASE, EMA, Config, tell, value, work
from _study import Job, about, arguments, opened, results, search, serve, study

WIRINGS = {"residual": "keep", "decay to 1e-2": "decay:product=0.01", "decay to 1e-3": "decay:product=0.001"}
RATES = {"soap": 3e-3, "adamw": 1e-3}  # the middle of each grid, whose factor is 2
DECAYS = {"soap": (0.3, 1.0), "adamw": (0.05, 0.3)}
EDGES = 4  # most steps of the search from the middle rate
LONG: Config = {"epochs": 100, "mixup": 0.8, "cutmix": 1.0, "quantise": True}


def config_of(wiring: str, optimizer: str, lr: float, decay: float, **more: Any) -> Config:
    own = {"shortcut": WIRINGS[wiring], "start": False, "optimizer": optimizer, "lr": lr, "weight_decay": decay}
    return {**BASE, **own, **more}


def chosen_of(wiring: str, optimizer: str, done: dict[str, Any]) -> tuple[list[Job], Config | None]:
    """The runs that the search still needs, and the best config once it is complete."""

    def job(step: int, decay: float) -> Job:
        lr = RATES[optimizer] * 2.0**step
        return f"search | {wiring} | {optimizer} | {lr:g} | {decay:g}", config_of(wiring, optimizer, lr, decay)

    return search(job, DECAYS[optimizer], EDGES, value, done)


def waiting(done: dict[str, Any]) -> Iterator[Job]:
    """Yields the runs that can start now, searches first."""
    pairs = [*itertools.product(RATES, WIRINGS)]
    found = {(optimizer, wiring): chosen_of(wiring, optimizer, done) for optimizer, wiring in pairs}
    for jobs, _ in found.values():
        yield from jobs
    tuned = {pair: chosen for pair, (_, chosen) in found.items() if chosen is not None}
    for seed, ((optimizer, wiring), chosen) in itertools.product(range(3), tuned.items()):
        yield f"short | {wiring} | {optimizer} | seed {seed}", {**chosen, "seed": seed, "validate": False}
    for seed, ((optimizer, wiring), chosen) in itertools.product(range(2), tuned.items()):
        for decay in DECAYS[optimizer] if optimizer == "soap" else [chosen["weight_decay"]]:
            name = f"long | {wiring} | {optimizer} | {decay:g} | seed {seed}"
            yield name, {**chosen, **LONG, "weight_decay": decay, "seed": seed, "validate": False}


def table(done: dict[str, Any]) -> str:
    """Markdown table: test accuracy (mean and standard deviation over seeds) and the chosen settings by wiring."""
    lines = [
        "| length | optimizer | wiring | lr | weight decay | test accuracy | seeds | training loss |",
        "|---" * 8 + "|",
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, row in done.items():
        if "test_accuracy" in row:
            groups.setdefault(name.rpartition(" | ")[0], []).append(row)
    for group, rows in sorted(groups.items()):
        length, wiring, optimizer = group.split(" | ")[:3]
        tests = [100 * row["test_accuracy"] for row in rows]
        spread = f" ± {statistics.stdev(tests):.2f}" if len(tests) > 1 else ""
        config, loss = rows[0]["config"], statistics.mean(row["train_loss"] for row in rows)
        cells = [length, optimizer, wiring, f"{config['lr']:g}", f"{config['weight_decay']:g}"]
        cells += [f"{statistics.mean(tests):.2f}{spread}", str(len(tests)), f"{loss:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, "decay-classifier.json; of digits in build")
    options = parser.parse_args()
    if options.work:
        serve(work)
        return
    preset = "digits" if options.data is None else "cifar"
    fields: Config = {"preset": preset, "device": options.device}
    if options.data is not None:
        fields["data"] = options.data
    shrink: Config = {"steps": 6} if options.data is None else {}
    options.out = options.out or results(options.data) / "decay-classifier.json"
    settings = {"preset": preset, **shrink}
    data = opened(options.out, settings)
    done = data["runs"]
    if not options.show:
        data |= about(__file__, options.device, settings, base=BASE, ema=EMA)

        def jobs() -> list[Job]:
            return [(name, {**config, **shrink}) for name, config in waiting(done) if name not in done]

        study(__file__, data, jobs, lambda name, config: {**config, **fields}, options, tell)
    print(table(done))


if __name__ == "__main__":
    main()
