"""The numbers that evaluations gave: their names, what a reader calls them, and the newest of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from unskip.report._read import Group, Run
from unskip.report._rows import LABELS, number

NAMES = {  # what a number is called, and its unit
    "loss": ("Loss in training", "loss"),
    "train_accuracy": ("Accuracy in training", "accuracy (fraction)"),
    "test_loss": ("Loss on test images", "loss"),
    "val_loss": ("Loss on held-out images", "loss"),
    "test_accuracy": ("Accuracy on test images", "accuracy (fraction)"),
    "val_accuracy": ("Accuracy on held-out images", "accuracy (fraction)"),
    "rank": ("Effective rank of the features", "effective rank (directions)"),
    "patchrank": ("Effective rank of the patches of an image", "effective rank (directions)"),
    "probe_mae": ("Linear probe (probe-mae-v1)", "accuracy (fraction)"),
    "probe_decayed": ("Linear probe (probe-decayed-v1)", "accuracy (fraction)"),
    "probe_lbfgs": ("Linear probe (probe-lbfgs-v1)", "accuracy (fraction)"),
    "finetune": ("Fine-tuned", "accuracy (fraction)"),
}
_KNN = re.compile(r"knn(\d+)(?= |$)")
_TAKEN = ("rank_entropy",)  # the logarithm of a number that is shown
# Of a line of metrics.jsonl, what the training loop logs. The rest is what the objective's `loss` returns.
_OF_LOOP = (
    *("step", "loss", "lr", "gradient_norm", "effective_decay"),
    *("seconds", "samples_per_second", "peak_memory_gib"),
)


def called(name: str) -> tuple[str, str]:
    """The title and the unit of a number."""
    if name in NAMES:
        return NAMES[name]
    near = _KNN.match(name)
    if near:
        return f"kNN accuracy, k = {near[1]}{name[near.end() :]}", "accuracy (fraction)"
    word = name.split(" ")[0]  # what follows says how it was taken
    return (f"{NAMES[word][0]}{name[len(word) :]}", NAMES[word][1]) if word in NAMES else (name, name)


def of_loss(groups: Sequence[Group]) -> list[str]:
    """The names of the numbers that an objective logs beside its loss."""
    rows = (row for group in groups for run in group.runs for row in run.metrics)
    return [name for name in dict.fromkeys(name for row in rows for name in row) if name not in _OF_LOOP]


def evaluations(groups: Sequence[Group], by_block: bool) -> list[str]:
    """The names of the numbers that evaluations gave, kNN with one k standing for all."""
    names: dict[str, None] = {}
    for run in (run for group in groups for run in group.runs):
        for row in run.evals:
            if (row.get("block") is not None) == by_block:
                names |= dict.fromkeys(name for name in row if name not in LABELS and number(row[name]) is not None)
    # Of the values of k one is shown: 20, or else the first.
    shown: dict[str, str] = {}
    for name in names:
        near = _KNN.match(name)
        if near and (name[near.end() :] not in shown or near[1] == "20"):
            shown[name[near.end() :]] = name
    return [
        name for name in names if name.split(" ")[0] not in _TAKEN and (not _KNN.match(name) or name in shown.values())
    ]


def newest_rows(run: Run) -> dict[str, dict[str, Any]]:
    """The newest line with a number of each name: of the model, or of the last block that was evaluated so."""
    newest: dict[str, dict[str, Any]] = {}
    for row in run.evals:
        for name in row:
            if name in LABELS or number(row[name]) is None:
                continue
            last = newest.get(name)
            whole = last is None or None in (row["block"], last["block"])
            if last is None or whole or row["step"] > last["step"] or row["block"] >= last["block"]:
                newest[name] = row
    return newest
