"""Assigns files to splits by words in their names, and divides the training split if others are missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from unskip.data._images import ImageSet
from unskip.data._order import HOLD_OUT, stream
from unskip.errors import BadInput

WORDS = {"train": ("train", "training"), "val": ("val", "validation", "valid", "dev"), "test": ("test", "testing")}
HELD_OUT = 10  # a tenth of each class
Parts = Mapping[str, Callable[[], ImageSet]]  # split -> a function that opens it


def split_of(name: str) -> str | None:
    """The split in a name such as cifar10-train.parquet or validation-00000-of-00002.parquet."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    splits = [split for split, known in WORDS.items() if set(known) & set(words)]
    return splits[0] if len(splits) == 1 else None


def files_by_split(pattern: str) -> dict[str, list[str]]:
    """The files of a pattern by split: by {split} in it, else by a word in their names, else all for training."""
    by_split: dict[str, list[str]] = {}
    if "{split}" in pattern:
        for split, words in WORDS.items():
            if files := {file for word in words for file in matches(pattern.replace("{split}", word))}:
                by_split[split] = sorted(files)
        return by_split
    files_and_splits = [(file, split_of(Path(file).name)) for file in matches(pattern)]
    if not any(split for _, split in files_and_splits):
        return {"train": [file for file, _ in files_and_splits]} if files_and_splits else {}
    for file, own in files_and_splits:
        if own is None:
            raise BadInput(
                f"{file}: other files of {pattern} are named after a split and this one is not; "
                "write {split} in place of the word, as in 'name-{split}.parquet'"
            )
        by_split.setdefault(own, []).append(file)
    return {split: by_split[split] for split in WORDS if split in by_split}


def pattern_parts(opener: Callable[..., ImageSet], pattern: str, size: int | None) -> Parts:
    """The splits of a pattern of parquet files or tar shards."""
    splits = files_by_split(pattern)
    if not splits:
        raise BadInput(f"{pattern}: no such files; a pattern is a path with * or {{split}} in it")
    return {split: partial(opener, pattern, split, splits, size) for split in splits}


def matches(pattern: str) -> list[str]:
    """The files of a pattern, in order."""
    path = Path(pattern)
    if path.is_file():  # its name may contain wildcard characters
        return [pattern]
    return sorted(str(file) for file in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if file.is_file())


def open_split(name: str, parts: Parts, split: str, hold_out: bool) -> ImageSet:
    """Opens a split of a set. Without a validation split, a tenth of each class of the training split serves as one."""
    if split in parts and not (split == "train" and hold_out and "val" not in parts):
        images = parts[split]()
        if split == "val" and "test" not in parts:
            note = "no test split: --validate and the test use the same images; choose settings on others"
            images = replace(images, report=(*images.report, note))
        return replace(images, split=split)
    if split == "test" and "val" in parts:
        images = parts["val"]()
        return replace(images, split=split, report=(*images.report, "no test split: this is the validation split"))
    if split == "test" or "train" not in parts:
        has = ", ".join(parts) or "none"
        advice = "hold out a tenth of train with train --validate and eval --split val; or make a test split: "
        raise BadInput(
            f"{name}: no {'test' if split == 'test' else 'train'} split (it has: {has}); "
            f"{advice if 'train' in parts else ''}name folders train, val and test, or put {{split}} in the path of "
            "parquet files, as in 'name-{split}.parquet'"
        )
    images = parts["train"]()
    counts = images.labels.bincount(minlength=len(images.classes))
    if (counts == 1).any():
        label = int((counts == 1).nonzero()[0])
        place = images.place(int((images.labels == label).nonzero()[0]))
        raise BadInput(f"{place}: the only image of class {images.classes[label]!r}; validation needs a second one")
    rest, held_out = divided(images.labels, HELD_OUT)
    return images.select(held_out if split == "val" else rest, split)


def divided(labels: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """(the rest, one part in `parts` of each class), as sorted indices; a function of the labels alone."""
    chosen = []
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero()[:, 0]
        order = torch.from_numpy(stream(HOLD_OUT, parts, label).permutation(len(rows)))
        chosen.append(rows[order[: max(1, round(len(rows) / parts))]])
    held_out = torch.cat(chosen).sort().values
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[held_out] = False
    return rest.nonzero()[:, 0], held_out
