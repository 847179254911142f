"""The lines of a run's logs as plain numbers; what cannot be read is left out and noted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unskip.report._text import clean

# Of a line of evals.jsonl, what says of what and how its numbers were taken, and is none of them.
LABELS = (
    *("step", "evaluation", "block", "path", "pool", "split", "seed", "precision", "changes", "time", "data", "size"),
    *("n", "intervals", "preprocess", "sampler", "steps", "cfg", "tolerance", "extractor"),
)
OF_CLASS_TOKENS = " of class tokens"
_OF_BLOCK = re.compile(r"([a-z]+)_block_(\d{1,4})")  # such as rank_block_3, which self-distillation logs


def number(value: object) -> float | None:
    """A float of what a log holds ("nan" and "inf" are written as text), or None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and value.lower() not in ("nan", "inf", "-inf", "infinity", "-infinity"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def read_text(file: Path, notes: list[str]) -> str | None:
    """A file as text; None where there is none, with a note where it cannot be read."""
    try:
        return file.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        notes.append(f"{file.name}: cannot be read ({error.strerror or type(error).__name__})")
        return None


def read_rows(file: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The lines of a log that are whole and have a step."""
    rows, damaged = [], []
    for place, line in enumerate((read_text(file, notes) or "").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        step = number(row.get("step")) if isinstance(row, dict) else None
        if step is None or not math.isfinite(step) or abs(step) > 2**53:
            damaged.append(place)
        else:
            rows.append({**row, "step": step})
    if damaged:
        lines = f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, the first is line {damaged[0]},"
        notes.append(f"{file.name}: {lines} could not be read and {'is' if len(damaged) == 1 else 'are'} left out")
    return rows


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl."""
    values = {clean(name): number(value) for name, value in row.items()}
    return {name: value for name, value in values.items() if value is not None}


def evaluations(row: dict[str, Any], own: str) -> list[dict[str, Any]]:
    """A line of evals.jsonl: numbers as floats, the block as a whole number or None, the rest as it is.

    What was taken of other tokens or images than those of the run's `own` split, at a noise level, or not quite by the
    protocol has another name than what was not. Numbers of several blocks in one row become a row each.
    """
    apart = _apart(row, own)
    labels: dict[str, Any] = {name: row[name] for name in LABELS if name in row}
    labels["block"] = _whole(row.get("block"))
    intervals = row.get("intervals")
    labels["intervals"] = (
        {_of_model(key, row) + apart: ends for key, ends in intervals.items()} if isinstance(intervals, dict) else {}
    )
    whole: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    for name, value in row.items():
        kept = value if number(value) is None else number(value)
        by_block = _OF_BLOCK.fullmatch(name)
        if by_block:
            blocks.setdefault(int(by_block[2]), {})[by_block[1] + apart] = kept
        elif name not in LABELS:
            whole[_of_model(name, row) + apart] = kept
    return [labels | whole, *(labels | {"block": block} | values for block, values in blocks.items())]


def interval_of(row: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """The 95% interval of a number, where its line has one."""
    ends = row.get("intervals", {}).get(name)
    bounds = [number(end) for end in ends] if isinstance(ends, list) else []
    low, high = bounds if len(bounds) == 2 else (None, None)
    return None if low is None or high is None else (low, high)


def _name(name: str) -> str:
    return clean(name[4:] + OF_CLASS_TOKENS) if name.startswith("cls_") else clean(name)


def _of_model(name: str, row: Mapping[str, Any]) -> str:
    """The name of a number; loss and accuracy of a classifier are named by their split, as training logs them."""
    split = row.get("split")
    return f"{split}_{name}" if name in ("loss", "accuracy") and split in ("val", "test") else _name(name)


def _whole(value: object) -> int | None:
    given = number(value)
    return int(given) if given is not None and math.isfinite(given) else None


def _apart(row: dict[str, Any], own: str) -> str:
    """What sets the numbers of a row apart from others of the same name."""
    time, count, cfg = (number(row.get(name)) for name in ("time", "n", "cfg"))
    split, precision = row.get("split"), row.get("precision")
    parts = [OF_CLASS_TOKENS if row.get("pool") == "cls" else ""]
    parts.append({"val": " on held-out images", "test": " on test images"}.get(str(split), "") if split != own else "")
    parts.append(f" at time {time:g}" if time is not None else "")
    parts.append(f" of {count:g} samples" if count is not None and "sampler" in row else "")
    parts.append(_drawn(row))
    parts.append(f" with cfg {cfg:g}" if cfg not in (None, 1.0) else "")
    parts.append(f" in {clean(precision, 12)}" if precision not in (None, "float32") else "")
    parts.append(" (changed)" if row.get("changes") else "")
    return "".join(parts)


def _drawn(row: dict[str, Any]) -> str:
    """How samples were drawn, where it was not by 50 steps of Heun's."""
    sampler, steps = row.get("sampler"), number(row.get("steps"))
    by = "" if sampler in (None, "heun") else f" by {clean(sampler, 20)}"
    of_default = steps is None or sampler == "dopri5" or (not by and steps == 50)
    return by if of_default else f"{by} in {steps:g} steps"
