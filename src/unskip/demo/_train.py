"""The runs of the demo: masked autoencoders, plain and decayed, and classifiers with and without skips."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unskip._table import table
from unskip.demo._compare import at_chance, beside, compared, ranked
from unskip.errors import BadInput, TrainingError
from unskip.recipes import Opener, evaluate_run, mae, open_split, supervised, train

Write = Callable[[str], object]
Numbers = dict[str, dict[int, float]]  # of a name, by block
PROTOCOLS = ("knn-dino-v1", "probe-lbfgs-v1", "rank-v1")

_PAIR = {"plain": {"shortcut": "keep"}, "decayed": {"shortcut": "decay:0.6"}}
# The classifiers, each with its fields and the folder it goes into.
_CLASSIFIERS: dict[str, tuple[dict[str, str], str]] = {
    "with skips": ({}, "skips-kept"),
    "skips cut": ({"shortcut": "cut"}, "skips-cut"),
    "skips cut, initialised": ({"shortcut": "cut", "init": "skipless"}, "skips-cut-initialised"),
}


def _folder(name: str) -> str:
    return "mae-" + re.sub(r"[^\w.=]+", "-", name)


@dataclass(frozen=True)
class Scale:
    """How much of everything: fields of the two recipes, and encoders, the last of which is held against the rest."""

    preset: str
    mae: Mapping[str, Any]
    supervised: Mapping[str, Any]
    encoders: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _PAIR)

    def __post_init__(self) -> None:
        if len({_folder(name) for name in self.encoders}) < max(1, len(self.encoders)):
            raise BadInput(f"encoders are {[*self.encoders]}; give one or more, whose names differ as folders")

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return len(self.encoders) + len(_CLASSIFIERS)


SMALL = Scale(
    "digits",
    {"steps": 600, "evaluate_every": 200, "device": "cpu"},
    {"steps": 220, "evaluate_every": 110, "device": "cpu"},
)
QUICK = Scale("digits", {"steps": 150, "device": "cpu"}, {"steps": 100, "device": "cpu"})
# CIFAR-10, 12 blocks, the decay that the study of docs/mae.md chose, SOAP at the rate of that of docs/skipless.md. A
# CUDA graph spares the host as it does there; compiling six models would take longer than it saves in so few steps.
_GRAPH: dict[str, Any] = {"graph": True, "compile": False, "device": "cuda"}
LARGE = Scale(
    "cifar",
    {"steps": 5000, "evaluate_every": 1000, "checkpoint_every": 2500, **_GRAPH},
    {"steps": 1940, "evaluate_every": 485, "checkpoint_every": 1940, "optimizer": "soap", "lr": 3e-3, **_GRAPH},
    {
        "no long skips": {"shortcut": "keep", "long_skips": False, "init": "default"},
        "plain": {"shortcut": "keep"},
        "decayed": {"shortcut": "decay:0.8"},
    },
)


class Interrupted(Exception):
    """A run was stopped by a signal."""


def pretrain(scale: Scale, out: Path, write: Write, quiet: bool, opener: Opener) -> list[Path]:
    """Masked autoencoders that differ by their shortcuts, evaluated block by block."""
    numbers: dict[str, Numbers] = {}
    folders = {name: out / _folder(name) for name in scale.encoders}
    for name, fields in scale.encoders.items():
        config, folder = mae(scale.preset, **{**scale.mae, **fields}), folders[name]
        write(f"  {name}: --shortcut {config.shortcut}, into {folder}")
        if _trained(config, folder, write, quiet, opener) is None:
            continue
        write("    evaluated: kNN, linear probe and rank of every block")
        numbers[name] = by_block(evaluate_run(folder, PROTOCOLS, opener=opener)[1])
    images = len(open_split(config, "test", opener))
    if len(numbers) == len(folders):
        for line in describe_features(numbers, config.shortcut, images):
            write(line)
    else:
        gone = " and ".join(name for name in folders if name not in numbers)
        write(f"\nNothing to compare: the training of {gone} failed.\n")
    return list(folders.values())


def by_block(results: Any) -> Numbers:
    """Results of protocols by name and block."""
    numbers: Numbers = {}
    for result in results:
        for key, value in result.values.items():
            numbers.setdefault(key, {})[int(result.block or 0)] = value
    return numbers


def describe_features(by_encoder: Mapping[str, Numbers], shortcut: str, images: int) -> list[str]:
    """What the numbers of some encoders show, whatever it is: the last, with this shortcut, against each other."""
    shown = {"knn20": "kNN", "probe_lbfgs": "probe", "rank": "rank"}
    *others, held = by_encoder.values()
    *_, against = by_encoder
    blocks = [*held["knn20"]]
    header = ["block", *(f"{word} {each}" for word in shown.values() for each in by_encoder)]
    rows = [[block, *(numbers[key][block] for key in shown for numbers in by_encoder.values())] for block in blocks]
    last = blocks[-1]
    lines = ["\nAccuracy of kNN (k = 20) and of a linear probe, and effective rank, by block:"]
    lines.append(f"\n{table(header, rows)}\n")
    for name, other in zip(by_encoder, others, strict=False):
        named = (name, against)
        lines.append(f"Features of the last block, {name} and {against} ({shortcut}):")
        for key, word in (("knn20", "kNN (k = 20)"), ("probe_lbfgs", "Linear probe")):
            lines.append(f"  {compared(word, other[key][last], held[key][last], images, named)}")
        lines.append(f"  {ranked(other['rank'][last], held['rank'][last], named)}")
    best = [f"{max(blocks, key=each['probe_lbfgs'].__getitem__)} ({word})" for word, each in by_encoder.items()]
    lines.append(f"The linear probe is best at block {', '.join(best)}.")
    lines.append("One seed and a model of minutes: a look, not a study. The studies are in docs/results.\n")
    return lines


def classify(scale: Scale, out: Path, write: Write, quiet: bool, opener: Opener) -> list[Path]:
    """A ViT with its skips, without them, and without them but with the initialisation made for that."""
    accuracy: dict[str, float | None] = {}
    folders = [out / folder for _, folder in _CLASSIFIERS.values()]
    for (name, (fields, _)), folder in zip(_CLASSIFIERS.items(), folders, strict=True):
        config = supervised(scale.preset, **{**scale.supervised, **fields})
        write(f"  {name}: into {folder}")
        outcome = _trained(config, folder, write, quiet, opener)
        accuracy[name] = None if outcome is None else outcome["test_accuracy"]
    images = open_split(config, "test", opener)
    rows = [[name, "failed" if value is None else value] for name, value in accuracy.items()]
    write(f"\n{table(['model', 'test accuracy'], rows)}\n")
    kept, cut, initialised = accuracy.values()
    for line in describe_skips(kept, cut, initialised, len(images.classes), len(images)):
        write(line)
    return folders


def describe_skips(
    kept: float | None, cut: float | None, initialised: float | None, classes: int, images: int
) -> list[str]:
    """What three accuracies show: with skips, cut, and cut from the initialisation; None where training has failed."""
    lines = []
    if cut is not None and initialised is not None:
        lines.append("Without skips, without and with the initialisation:")
        lines.append(f"  {compared('Test accuracy', cut, initialised, images)}")
    for value, name in (
        (kept, "With its skips"),
        (cut, "Cut and started as usual"),
        (initialised, "Cut and initialised for it"),
    ):
        if value is None:
            lines.append(f"  {name}, training failed.")
        elif at_chance(value, classes, images):
            lines.append(f"  {name}, the model is at chance ({1 / classes:.2f}).")
    if kept is not None and initialised is not None:
        lines.append(f"  {beside(kept, initialised, images)}")
    return [*lines[:-1], lines[-1] + "\n"]


def _trained(config: Any, folder: Path, write: Write, quiet: bool, opener: Opener) -> dict[str, float] | None:
    """The numbers of a run; None, and the reason in words, where its loss was not finite."""
    try:
        outcome = train(config, folder, quiet, opener)
    except TrainingError as error:
        write(f"    failed: {error}")
        return None
    if not outcome.finished:
        raise Interrupted
    return outcome.evaluations
