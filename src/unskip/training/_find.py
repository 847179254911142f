"""Finds runs: a path is a run or a folder of runs, such as `unskip train --seeds 0,1,2` makes."""

from __future__ import annotations

import re
from pathlib import Path

from unskip.errors import BadInput


def find_runs(path: str | Path) -> list[Path]:
    """The run at a path, or the runs in it, two folders deep, in natural order. Raises BadInput if there is none."""
    folder = Path(path)
    if not folder.is_dir():
        raise BadInput(f"{path}: no such folder; name the folder of a run")
    runs = _runs(folder, depth=2)
    if not runs:
        raise BadInput(f"{path}: no run there (no config.json of a run or metrics.jsonl in it or in its folders)")
    return runs


def _runs(folder: Path, depth: int) -> list[Path]:
    if any((folder / name).is_file() for name in ("config.json", "metrics.jsonl")):
        saved = (folder / "model.safetensors").is_file()  # of unskip.save or transformers: a run has its weights deeper
        return [] if saved else [folder]
    children = sorted((path for path in folder.iterdir() if path.is_dir()), key=_natural) if depth else []
    return [run for child in children for run in _runs(child, depth - 1)]


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    """A sort key that puts seed-2 before seed-10."""
    parts = re.findall(r"\d{1,18}|\D+", path.name)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
