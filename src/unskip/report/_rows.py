"""The rows of a run's logs as plain numbers; unreadable rows are skipped with a note."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unskip.report._text import clean

# Fields of evals.jsonl that describe an evaluation; all others are metrics.
LABELS = (
    *("step", "evaluation", "block", "path", "pool", "split", "seed", "precision", "changes", "time", "data", "size"),
    *("n", "intervals", "preprocess", "sampler", "steps", "cfg", "tolerance", "extractor"),
)
OF_CLASS_TOKENS = " of class tokens"
ON_CHANGED_DATA = " on changed data"
ON_SPLIT = {"val": " on the validation split", "test": " on the test split"}
_BY_SPLIT = ("loss", "accuracy", "bits_per_byte", "perplexity", "next_token_accuracy")  # training logs test_loss, ...
_OF_BLOCK = re.compile(r"([a-z]+)_block_(\d{1,4})")  # such as rank_block_3, which self-distillation logs


def number(value: object) -> float | None:
    """A logged value as a float ("nan" and "inf" are logged as text), or None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and value.lower() not in ("nan", "inf", "-inf", "infinity", "-infinity"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def read_text(file: Path, notes: list[str]) -> str | None:
    """A file as text, or None with a note if it cannot be read, or None if it is missing."""
    try:
        return file.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        notes.append(f"{file.name}: cannot be read ({error.strerror or type(error).__name__})")
        return None


def read_rows(file: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The valid rows of a log that have a step."""
    rows, damaged = [], []
    for index, line in enumerate((read_text(file, notes) or "").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        step = number(row.get("step")) if isinstance(row, dict) else None
        if step is None or not math.isfinite(step) or abs(step) > 2**53:
            damaged.append(index)
        else:
            rows.append({**row, "step": step})
    if damaged:
        lines = f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, from line {damaged[0]},"
        notes.append(f"{file.name}: {lines} skipped, not readable")
    return rows


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl."""
    values = {clean(name): number(value) for name, value in row.items()}
    return {name: value for name, value in values.items() if value is not None}


def evaluations(row: dict[str, Any], split: str) -> list[dict[str, Any]]:
    """A row of evals.jsonl: numbers as floats, the block as an integer or None, the rest unchanged.

    Metrics get a suffix if they were computed on class tokens, on another split than the run's `split`, on data that
    had changed since the run began, at a noise level, or with changes to the protocol. Metrics of several blocks in one
    row become a row each.
    """
    suffix = _suffix(row, split)
    labels: dict[str, Any] = {name: row[name] for name in LABELS if name in row}
    labels["block"] = _integer(row.get("block"))
    intervals = row["intervals"] if isinstance(row.get("intervals"), dict) else {}
    labels["intervals"] = {_model_metric(name, row) + suffix: ends for name, ends in intervals.items()}
    of_model: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    for name, value in row.items():
        kept = value if number(value) is None else number(value)
        by_block = _OF_BLOCK.fullmatch(name)
        if by_block:
            blocks.setdefault(int(by_block[2]), {})[by_block[1] + suffix] = kept
        elif name not in LABELS:
            of_model[_model_metric(name, row) + suffix] = kept
    return [labels | of_model, *(labels | {"block": block} | values for block, values in blocks.items())]


def interval_of(row: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """The 95% interval of a metric, if its row has one."""
    ends = row.get("intervals", {}).get(name)
    bounds = [number(end) for end in ends] if isinstance(ends, list) else []
    low, high = bounds if len(bounds) == 2 else (None, None)
    return None if low is None or high is None else (low, high)


def _name(name: str) -> str:
    return clean(name[4:] + OF_CLASS_TOKENS) if name.startswith("cls_") else clean(name)


def _model_metric(name: str, row: Mapping[str, Any]) -> str:
    """The name of a metric, with the prefix that training gives those of the whole model, such as test_loss."""
    split = row.get("split")
    return f"{split}_{name}" if name in _BY_SPLIT and split in ("val", "test") else _name(name)


def _integer(value: object) -> int | None:
    x = number(value)
    return int(x) if x is not None and math.isfinite(x) else None


def _suffix(row: dict[str, Any], own_split: str) -> str:
    """The suffix that tells the metrics of a row from others of the same name."""
    time, count, cfg = (number(row.get(name)) for name in ("time", "n", "cfg"))
    split, precision = row.get("split"), row.get("precision")
    parts = [OF_CLASS_TOKENS if row.get("pool") == "cls" else ""]
    parts.append(ON_SPLIT.get(str(split), "") if split != own_split else "")
    # In other rows "data" is the name of the files with masks and boxes.
    parts.append(ON_CHANGED_DATA if str(row.get("data")).startswith("changed since") else "")
    parts.append(f" at time {time:g}" if time is not None else "")
    parts.append(f" of {count:g} samples" if count is not None and "sampler" in row else "")
    parts.append(_drawn(row))
    parts.append(f" with cfg {cfg:g}" if cfg not in (None, 1.0) else "")
    parts.append(f" in {clean(precision, 12)}" if precision not in (None, "float32") else "")
    parts.append(" (changed)" if row.get("changes") else "")
    return "".join(parts)


def _drawn(row: dict[str, Any]) -> str:
    """The sampler and its steps, unless they are the default: Heun's method with 50 steps."""
    sampler, steps = row.get("sampler"), number(row.get("steps"))
    by = "" if sampler in (None, "heun") else f" by {clean(sampler, 20)}"
    is_default = steps is None or sampler == "dopri5" or (not by and steps == 50)
    return by if is_default else f"{by} in {steps:g} steps"
