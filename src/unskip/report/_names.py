"""The metrics of evaluations: their names, titles and units, and newest values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from unskip.report._read import Group, Run
from unskip.report._rows import LABELS, number

NAMES = {  # title and unit
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
_REDUNDANT = ("rank_entropy",)  # the logarithm of a metric that is shown
# The fields of metrics.jsonl that the training loop logs. The rest is returned by the objective's `loss`.
_OF_LOOP = (
    *("step", "loss", "lr", "gradient_norm", "effective_decay"),
    *("seconds", "samples_per_second", "peak_memory_gib"),
)


def title_and_unit(name: str) -> tuple[str, str]:
    """The title and the unit of a metric."""
    if name in NAMES:
        return NAMES[name]
    knn = _KNN.match(name)
    if knn:
        return f"kNN accuracy, k = {knn[1]}{name[knn.end() :]}", "accuracy (fraction)"
    word = name.split(" ")[0]  # the rest says how it was computed
    return (f"{NAMES[word][0]}{name[len(word) :]}", NAMES[word][1]) if word in NAMES else (name, name)


def of_loss(groups: Sequence[Group]) -> list[str]:
    """The names of the metrics that an objective logs in addition to its loss."""
    rows = (row for group in groups for run in group.runs for row in run.metrics)
    return [name for name in dict.fromkeys(name for row in rows for name in row) if name not in _OF_LOOP]


def evaluations(groups: Sequence[Group], by_block: bool) -> list[str]:
    """The names of the metrics of evaluations, with one k for kNN."""
    names: dict[str, None] = {}
    for run in (run for group in groups for run in group.runs):
        for row in run.evals:
            if (row.get("block") is not None) == by_block:
                names |= dict.fromkeys(name for name in row if name not in LABELS and number(row[name]) is not None)
    # One value of k is shown: 20, or else the first.
    shown: dict[str, str] = {}
    for name in names:
        knn = _KNN.match(name)
        if knn and (name[knn.end() :] not in shown or knn[1] == "20"):
            shown[name[knn.end() :]] = name
    one_k = shown.values()
    return [n for n in names if n.split(" ")[0] not in _REDUNDANT and (not _KNN.match(n) or n in one_k)]


def newest_rows(run: Run) -> dict[str, dict[str, Any]]:
    """The newest row with each metric: of the whole model, or of the last block that has it."""
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
