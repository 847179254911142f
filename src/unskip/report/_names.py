"""The metrics of evaluations: their names, titles and units, and newest values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from unskip.report._read import Group, Run
from unskip.report._rows import LABELS, ON_SPLIT, number

NAMES = {  # title and unit
    "loss": ("Loss in training", "loss"),
    "train_accuracy": ("Accuracy in training", "accuracy (fraction)"),
    "rank": ("Effective rank of the features", "effective rank (directions)"),
    "patchrank": ("Effective rank of the patches of an image", "effective rank (directions)"),
    "probe_mae": ("Linear probe (probe-mae-v1)", "accuracy (fraction)"),
    "probe_decayed": ("Linear probe (probe-decayed-v1)", "accuracy (fraction)"),
    "probe_lbfgs": ("Linear probe (probe-lbfgs-v1)", "accuracy (fraction)"),
    "finetune": ("Fine-tuned", "accuracy (fraction)"),
}
for _split, _on in ON_SPLIT.items():
    for _name, _title, _unit in (
        ("loss", "Loss", "loss"),
        ("accuracy", "Accuracy", "accuracy (fraction)"),
        ("bits_per_byte", "Bits per byte", "bits per byte"),
        ("perplexity", "Perplexity", "perplexity"),
        ("next_token_accuracy", "Next-token accuracy", "accuracy (fraction)"),
    ):
        NAMES[f"{_split}_{_name}"] = (f"{_title}{_on}", _unit)
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
    if word not in NAMES:
        return name, name
    title, rest = NAMES[word][0], name[len(word) :]
    for split in ON_SPLIT.values():
        rest = rest.replace(split, "") if title.endswith(split) else rest
    return f"{title}{rest}", NAMES[word][1]


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


def by_samples(groups: Sequence[Group], name: str) -> dict[float | None, list[list[dict[str, Any]]]]:
    """The newest rows with a metric, for every group the rows of its runs; by n where the newest rows differ in n.

    Evaluations during training use fewer samples than `unskip eval`, and only those of equal n are compared.
    """
    newest = [[rows[name] for rows in map(newest_rows, group.runs) if name in rows] for group in groups]
    counts = {number(row.get("n")) for rows in newest for row in rows}
    if len(counts - {None}) < 2:
        return {counts.pop() if len(counts) == 1 else None: newest}

    def of(run: Run, n: float | None) -> dict[str, dict[str, Any]]:
        return newest_rows(replace(run, evals=tuple(row for row in run.evals if number(row.get("n")) == n)))

    ordered = sorted(counts, key=lambda n: -1.0 if n is None else n)
    return {n: [[r[name] for run in group.runs if name in (r := of(run, n))] for group in groups] for n in ordered}


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
