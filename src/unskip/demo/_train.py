"""The training runs of the demo: classifiers with skips, without skips, and without skips from `init.skipless_`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskip._table import table
from unskip.demo._compare import Seeds, at_chance, compare, mean_and_std
from unskip.errors import TrainingError, UnskipWarning
from unskip.recipes import Opener, open_split, supervised, train
from unskip.training import RunFolder

Write = Callable[[str], object]
_LABELS = ("with skips", "without, initialised")

# name: (fields of the config, folder)
_CLASSIFIERS: dict[str, tuple[dict[str, str], str]] = {
    "with skips": ({}, "skips-kept"),
    "skips cut": ({"shortcut": "cut"}, "skips-cut"),
    "skips cut, initialised": ({"shortcut": "cut", "init": "skipless"}, "skips-cut-initialised"),
}


@dataclass(frozen=True)
class Scale:
    """Fields of the supervised recipe, and the seeds of each classifier."""

    fields: Mapping[str, Any]
    seeds: tuple[int, ...]

    @property
    def runs(self) -> int:
        """The number of runs."""
        return len(_CLASSIFIERS) * len(self.seeds)


SMALL = Scale({"steps": 220, "evaluate_every": 110, "device": "cpu"}, (0, 1, 2))
QUICK = Scale({"steps": 120, "device": "cpu"}, (0, 1, 2))


class Interrupted(Exception):
    """A signal stopped a run."""


def classify(scale: Scale, out: Path, write: Write, quiet: bool, opener: Opener) -> list[Path]:
    """Trains all classifiers on digits, prints their accuracies and returns the folders of the runs."""
    images = open_split(supervised("digits", **scale.fields), "test", opener)
    accuracy: dict[str, list[float]] = {}
    folders: list[Path] = []
    for name, (fields, folder) in _CLASSIFIERS.items():
        accuracy[name] = []
        for seed in scale.seeds:
            folders.append(out / folder / f"seed-{seed}")
            config = supervised("digits", seed=seed, **{**scale.fields, **fields})
            label = f"  {name}, seed {seed}"
            try:
                outcome, raised = _train(config, folders[-1], quiet, opener)
            except TrainingError as error:  # its loss was not finite
                write(f"{label}: failed: {error}")
                continue
            accuracy[name].append(outcome["test_accuracy"])
            note = f", with warnings {', '.join(raised)}" if raised else ""
            write(f"{label}: accuracy {outcome['test_accuracy']:.3f}{note}; {folders[-1]}")
    rows = [[name, mean_and_std(values) if values else "failed", len(values)] for name, values in accuracy.items()]
    write(f"\n{table(['model', 'test accuracy', 'seeds'], rows)}\n")
    write(f"Mean and standard deviation over seeds; {len(images)} test images.\n")
    kept, cut, initialised = accuracy.values()
    for line in describe_skips(kept, cut, initialised, len(images.classes), len(images)):
        write(line)
    return folders


def describe_skips(kept: Seeds, cut: Seeds, initialised: Seeds, classes: int, images: int) -> list[str]:
    """Sentences that compare the three classifiers. Accuracies have one value per seed; empty: training failed."""
    lines = []
    if cut and initialised:
        lines.append("All skips cut, default and `skipless` initialisation:")
        lines.append(f"  {compare('Test accuracy', cut, initialised, images)}")
    for values, name in (
        (kept, "With its skips"),
        (cut, "Cut, default initialisation"),
        (initialised, "Cut, `skipless` initialisation"),
    ):
        if not values:
            lines.append(f"  {name}: training failed.")
        elif at_chance(values, classes, images):
            lines.append(f"  {name}: the model is at chance ({1 / classes:.2f}).")
    if kept and initialised:
        lines.append(f"  {compare('With and without skips', kept, initialised, images, _LABELS)}")
    return [*lines[:-1], lines[-1] + "\n"]


def _train(config: Any, folder: Path, quiet: bool, opener: Opener) -> tuple[dict[str, float], list[str]]:
    """The evaluations of a run, and the names of the warnings recorded in its folder."""
    with warnings.catch_warnings():
        if quiet:
            warnings.filterwarnings("ignore", r"[a-z-]+: ", UnskipWarning)  # listed by name below; others are shown
        outcome = train(config, folder, quiet, opener)
    if not outcome.finished:
        raise Interrupted
    rows = RunFolder.open(folder).read("warnings.jsonl")
    return outcome.evaluations, [name for name in dict.fromkeys(row["warning"] for row in rows) if name != "note"]
