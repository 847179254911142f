"""Which part of a set is which split: by the words in file and folder names, or made from the training part."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from unskip.data._images import ImageSet
from unskip.data._order import HOLD_OUT, stream
from unskip.errors import BadInput

WORDS = {"train": ("train", "training"), "val": ("val", "validation", "valid", "dev"), "test": ("test", "testing")}
HELD_OUT = 10  # one part in ten
Parts = Mapping[str, Callable[[], ImageSet]]  # split -> what opens it


def split_of(name: str) -> str | None:
    """The split that a name such as cifar10-train.parquet or validation-00000-of-00002.parquet speaks of."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    found = {split for split, known in WORDS.items() if set(known) & set(words)}
    return found.pop() if len(found) == 1 else None


def files_by_split(pattern: str) -> dict[str, list[str]]:
    """The files of a pattern by split: by {split} in it, or by a word in their names, or all of them for training."""
    if "{split}" in pattern:
        found = {
            split: sorted({file for word in words for file in matches(pattern.replace("{split}", word))})
            for split, words in WORDS.items()
        }
        return {split: files for split, files in found.items() if files}
    files = matches(pattern)
    named = {file: split_of(Path(file).name) for file in files}
    if not any(named.values()):
        return {"train": files} if files else {}
    if None in named.values():
        lone = next(file for file, split in named.items() if split is None)
        raise BadInput(
            f"{lone}: other files of {pattern} are named after a split and this one is not; "
            "write {split} where the word stands, as in 'name-{split}.parquet'"
        )
    return {split: own for split in WORDS if (own := [file for file, found in named.items() if found == split])}


def matches(pattern: str) -> list[str]:
    """The files of a pattern, in order."""
    path = Path(pattern)
    if path.is_file():  # its name may hold what a pattern would read as a wildcard
        return [pattern]
    return sorted(str(file) for file in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if file.is_file())


def taken(name: str, parts: Parts, split: str, hold_out: bool) -> ImageSet:
    """The split of a set. Without a validation split a tenth of each class of the training split is one."""
    if split in parts and not (split == "train" and hold_out and "val" not in parts):
        found = parts[split]()
        if split == "val" and "test" not in parts:
            same = "no test split: --validate and the test use the same images; choose settings on others"
            return replace(found, split=split, report=(*found.report, same))
        return replace(found, split=split)
    if split == "test" and "val" in parts:
        found = parts["val"]()
        return replace(found, split=split, report=(*found.report, "no test split: this is the validation split"))
    if split == "test" or "train" not in parts:
        has = ", ".join(parts) or "none"
        held = "a tenth of train is held out by --validate of train and --split val of eval; or make one: "
        raise BadInput(
            f"{name}: no {'test' if split == 'test' else 'train'} split (it has: {has}); {held * ('train' in parts)}"
            "folders are told apart by their names, train, val and test, and parquet files by {split} in the path, as "
            "in 'name-{split}.parquet'"
        )
    found = parts["train"]()
    counts = found.labels.bincount(minlength=len(found.classes))
    if (counts == 1).any():
        lone = int((counts == 1).nonzero()[0])
        place = found.place(int((found.labels == lone).nonzero()[0]))
        raise BadInput(f"{place}: the only image of class {found.classes[lone]!r}; validation needs a second one")
    kept, part = divided(found.labels, HELD_OUT)
    return found.select(part if split == "val" else kept, split)


def divided(labels: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """(the rest, one part in `parts` of each class), as sorted indices; which ones depends on the labels alone."""
    held = []
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero()[:, 0]
        order = torch.from_numpy(stream(HOLD_OUT, parts, label).permutation(len(rows)))
        held.append(rows[order[: max(1, round(len(rows) / parts))]])
    part = torch.cat(held).sort().values
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[part] = False
    return rest.nonzero()[:, 0], part
