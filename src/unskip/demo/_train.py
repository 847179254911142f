"""The runs of the demo: classifiers with and without skips, and at a larger scale masked autoencoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unskip._table import table
from unskip.demo._compare import Seeds, at_chance, compared, ranked, shown
from unskip.errors import TrainingError
from unskip.recipes import Opener, evaluate_run, mae, open_split, supervised, train

Write = Callable[[str], object]
Numbers = dict[str, dict[int, float]]  # of a name, by block
_NAMED = ("with skips", "without, initialised")
PROTOCOLS = ("knn-dino-v1", "probe-lbfgs-v1", "rank-v1")

# The classifiers, each with its fields and the folder it goes into.
_CLASSIFIERS: dict[str, tuple[dict[str, str], str]] = {
    "with skips": ({}, "skips-kept"),
    "skips cut": ({"shortcut": "cut"}, "skips-cut"),
    "skips cut, initialised": ({"shortcut": "cut", "init": "skipless"}, "skips-cut-initialised"),
}


@dataclass(frozen=True)
class Scale:
    """How much of everything: fields of the recipes, seeds of the classifiers, and encoders of masked autoencoders.

    The last encoder is held against the rest. There are none on digits: what masked autoencoders show there does not
    hold at other scales.
    """

    preset: str
    supervised: Mapping[str, Any]
    seeds: tuple[int, ...] = (0,)
    mae: Mapping[str, Any] = field(default_factory=dict)
    encoders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return len(self.encoders) + len(_CLASSIFIERS) * len(self.seeds)


SMALL = Scale("digits", {"steps": 220, "evaluate_every": 110, "device": "cpu"}, (0, 1, 2))
QUICK = Scale("digits", {"steps": 100, "device": "cpu"}, (0, 1))
# CIFAR-10, 12 blocks, the decay that the study of docs/mae.md chose, SOAP at the rate of docs/skipless-results.md. A
# CUDA graph spares the host as it does there; compiling six models would take longer than it saves in so few steps.
_GRAPH: dict[str, Any] = {"graph": True, "compile": False, "device": "cuda"}
LARGE = Scale(
    "cifar",
    {"steps": 1940, "evaluate_every": 485, "checkpoint_every": 1940, "optimizer": "soap", "lr": 3e-3, **_GRAPH},
    (0,),
    {"steps": 5000, "evaluate_every": 1000, "checkpoint_every": 2500, **_GRAPH},
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
    folders = {name: out / f"mae-{name.replace(' ', '-')}" for name in scale.encoders}
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
    columns = {"knn20": "kNN", "probe_lbfgs": "probe", "rank": "rank"}
    *others, held = by_encoder.values()
    *_, against = by_encoder
    blocks = [*held["knn20"]]
    header = ["block", *(f"{word} {each}" for word in columns.values() for each in by_encoder)]
    rows = [[block, *(numbers[key][block] for key in columns for numbers in by_encoder.values())] for block in blocks]
    last = blocks[-1]
    lines = ["\nAccuracy of kNN (k = 20) and of a linear probe, and effective rank, by block:"]
    lines.append(f"\n{table(header, rows)}\n")
    for name, other in zip(by_encoder, others, strict=False):
        named = (name, against)
        lines.append(f"Features of the last block, {name} and {against} ({shortcut}):")
        for key, word in (("knn20", "kNN (k = 20)"), ("probe_lbfgs", "Linear probe")):
            lines.append(f"  {compared(word, [other[key][last]], [held[key][last]], images, named)}")
        lines.append(f"  {ranked(other['rank'][last], held['rank'][last], named)}")
    best = [f"{max(blocks, key=each['probe_lbfgs'].__getitem__)} ({word})" for word, each in by_encoder.items()]
    lines.append(f"The linear probe is best at block {', '.join(best)}.")
    lines.append("One seed and a model of minutes: a look, not a study. The studies are in docs/results.\n")
    return lines


def classify(scale: Scale, out: Path, write: Write, quiet: bool, opener: Opener) -> list[Path]:
    """A ViT with its skips, without them, and without them but with the initialisation made for that."""
    accuracy: dict[str, list[float]] = {}
    folders: list[Path] = []
    for name, (fields, folder) in _CLASSIFIERS.items():
        accuracy[name] = []
        write(f"  {name}: into {out / folder}")
        for seed in scale.seeds:
            config = supervised(scale.preset, seed=seed, **{**scale.supervised, **fields})
            folders.append(out / folder / f"seed-{seed}" if len(scale.seeds) > 1 else out / folder)
            outcome = _trained(config, folders[-1], write, quiet, opener)
            accuracy[name] += [] if outcome is None else [outcome["test_accuracy"]]
    images = open_split(config, "test", opener)
    rows = [[name, shown(values) if values else "failed", len(values)] for name, values in accuracy.items()]
    write(f"\n{table(['model', 'test accuracy', 'seeds'], rows)}\n")
    kept, cut, initialised = accuracy.values()
    for line in describe_skips(kept, cut, initialised, len(images.classes), len(images)):
        write(line)
    return folders


def describe_skips(kept: Seeds, cut: Seeds, initialised: Seeds, classes: int, images: int) -> list[str]:
    """What the accuracies show, one a seed: with skips, cut, and cut from the initialisation; none: training failed."""
    lines = []
    if cut and initialised:
        lines.append("Without skips, without and with the initialisation:")
        lines.append(f"  {compared('Test accuracy', cut, initialised, images)}")
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
        lines.append(f"  {compared('With and without skips', kept, initialised, images, _NAMED)}")
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
