"""The runs of the demo: masked autoencoders, plain and decayed, and classifiers with and without skips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unskip._table import table
from unskip.data import open_images
from unskip.demo._compare import compared, ranked
from unskip.recipes import mae, supervised, train
from unskip.recipes._judge import judge_run

Write = Callable[[str], object]
PROTOCOLS = ("knn-dino-v1", "probe-lbfgs-v1", "rank-v1")


@dataclass(frozen=True)
class Scale:
    """How much of everything: the fields of the two recipes."""

    preset: str
    mae: Mapping[str, Any]
    supervised: Mapping[str, Any]


SMALL = Scale(
    "digits",
    {"steps": 600, "evaluate_every": 200, "device": "cpu"},
    {"steps": 220, "evaluate_every": 110, "device": "cpu"},
)
QUICK = Scale("digits", {"steps": 150, "device": "cpu"}, {"steps": 100, "device": "cpu"})
LARGE = Scale(
    "cifar",
    {"steps": 6000, "evaluate_every": 1000, "compile": False, "device": "cuda"},
    {"steps": 2400, "evaluate_every": 400, "device": "cuda"},
)


class Interrupted(Exception):
    """A run was stopped by a signal."""


def pretrain(scale: Scale, out: Path, write: Write, quiet: bool) -> list[Path]:
    """Two masked autoencoders that differ by their shortcuts alone, judged block by block."""
    runs = {"plain": ("keep", out / "mae-plain"), "decayed": ("decay:0.6", out / "mae-decayed")}
    found: dict[str, dict[str, dict[int, float]]] = {}
    for name, (shortcut, folder) in runs.items():
        config = mae(scale.preset, shortcut=shortcut, **scale.mae)
        write(f"  {name}: --shortcut {shortcut}, into {folder}")
        _trained(config, folder, quiet)
        _, results = judge_run(folder, PROTOCOLS)
        numbers: dict[str, dict[int, float]] = {}
        for result in results:
            for key, value in result.values.items():
                numbers.setdefault(key, {})[int(result.block or 0)] = value
        found[name] = numbers
    shown = {"knn20": "neighbours", "probe_lbfgs": "probe", "rank": "rank"}
    blocks = [*found["plain"]["knn20"]]
    header = ["block", *(f"{word} {name}" for word in shown.values() for name in runs)]
    rows = [[block, *(found[name][key][block] for key in shown for name in runs)] for block in blocks]
    write("\nAccuracy of 20 nearest neighbours and of a linear probe, and effective rank, by block:")
    write(f"\n{table(header, rows)}\n")
    images = len(open_images(config.data, "test", root=config.data_root))
    plain, decayed = found["plain"], found["decayed"]
    last = blocks[-1]
    write(f"Features of the last block, without and with decayed shortcuts ({shortcut}):")
    for key, word in (("knn20", "20 nearest neighbours"), ("probe_lbfgs", "Linear probe")):
        write(f"  {compared(word, plain[key][last], decayed[key][last], images)}")
    write(f"  {ranked(plain['rank'][last], decayed['rank'][last])}")
    best = {name: max(values["probe_lbfgs"], key=lambda b: values["probe_lbfgs"][b]) for name, values in found.items()}
    write(f"  The linear probe is best at block {best['plain']} without and at block {best['decayed']} with.")
    write("  One seed and a model of minutes: a look, not a study. The studies are in docs/results.\n")
    return [folder for _, folder in runs.values()]


def classify(scale: Scale, out: Path, write: Write, quiet: bool) -> list[Path]:
    """A ViT with its skips, without them, and without them but with the initialisation made for that."""
    kinds = {
        "with skips": ({}, out / "skips-kept"),
        "skips cut": ({"shortcut": "cut"}, out / "skips-cut"),
        "skips cut, initialised": ({"shortcut": "cut", "init": "skipless"}, out / "skips-cut-initialised"),
    }
    accuracy: dict[str, float] = {}
    for name, (fields, folder) in kinds.items():
        config = supervised(scale.preset, **{**scale.supervised, **fields})
        write(f"  {name}: into {folder}")
        accuracy[name] = _trained(config, folder, quiet)["test_accuracy"]
    images = open_images(config.data, "test", root=config.data_root)
    rows = [[name, value] for name, value in accuracy.items()]
    write(f"\n{table(['model', 'test accuracy'], rows)}\n")
    write("Without skips, without and with the initialisation:")
    cut, begun = accuracy["skips cut"], accuracy["skips cut, initialised"]
    write(f"  {compared('Test accuracy', cut, begun, len(images))}")
    chance = 1 / len(images.classes)
    if cut < 1.5 * chance:
        write(f"  Cut and started as usual, the model has learnt nothing: chance is {chance:.2f}.")
    gap = accuracy["with skips"] - begun
    write(f"  With all its skips it reaches {accuracy['with skips']:.3f} in as many steps; {_gap(gap)}.\n")
    return [folder for _, folder in kinds.values()]


def _gap(gap: float) -> str:
    return f"{gap:.3f} are missing to that" if gap > 0 else "the one without them does not fall behind"


def _trained(config: Any, folder: Path, quiet: bool) -> dict[str, float]:
    outcome = train(config, folder, quiet)
    if not outcome.finished:
        raise Interrupted
    return outcome.evaluations
