"""A folder of images, a folder a class: root/class/*.jpg, or root/train/class/*.jpg with val and test beside it.

It is read from disk as it is needed, or held in memory at one size where a size is given. Images that lie in no folder
of a class are one class.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from unskip.data._decode import held, readable
from unskip.data._images import ImageSet
from unskip.data._splits import WORDS, Parts
from unskip.errors import BadInput

SUFFIXES = frozenset(".bmp .gif .jpeg .jpg .png .ppm .pgm .tif .tiff .webp".split())


@dataclass(frozen=True, eq=False)
class FolderReader:
    """Files under one folder. Their names are bytes in one array, which workers share without copying it."""

    folder: str
    names: Any  # (N,) of bytes, relative to the folder

    def __len__(self) -> int:
        return len(self.names)

    def place(self, index: int) -> str:
        return str(Path(self.folder, os.fsdecode(bytes(self.names[index]))))

    def encoded(self, index: int) -> bytes:
        return Path(self.place(index)).read_bytes()

    def select(self, indices: Sequence[int]) -> FolderReader:
        return replace(self, names=self.names[list(indices)])


def folder_parts(folder: Path, size: int | None, skip_broken: bool) -> Parts:
    """The splits of a folder: its subfolders of those names, or all of it for training."""
    inner = _subfolders(folder)
    named = {split: path for path in inner for split, words in WORDS.items() if path.name.lower() in words}
    # A class may be called "train" too: it has images in it where a split has folders.
    if named and (len(named) == len(inner) or any(_subfolders(path) for path in named.values())):
        places = {split: named[split] for split in WORDS if split in named}
    else:
        places = {"train": folder}
    return {split: partial(_open, folder, split, places, size, skip_broken) for split in places}


def _open(root: Path, split: str, places: dict[str, Path], size: int | None, skip_broken: bool) -> ImageSet:
    classes = tuple(sorted({path.name for place in places.values() for path in _subfolders(place)}))
    folder, report = places[split], list[str]()
    loose = sorted(os.fsencode(path.name) for path in folder.iterdir() if path.is_file() and _is_image(path.name))
    if loose and classes:
        raise BadInput(
            f"{folder / os.fsdecode(loose[0])}: an image outside the folders of the classes; move it into one"
        )
    names, labels = loose, [0] * len(loose)
    for label, name in enumerate(classes):
        files = _files(folder, name)
        if not files and not skip_broken:
            raise BadInput(
                f"{folder / name}: no images of this class in the {split} split (looked for "
                f"{', '.join(sorted(SUFFIXES))}); add some, remove the class, or leave it out with skip_broken=True"
            )
        names += files
        labels += [label] * len(files)
    if not names:
        raise BadInput(f"{folder}: no images in it (looked for {', '.join(sorted(SUFFIXES))})")
    if not classes:
        classes = ("images",)
        report.append("no folders of classes: every image has label 0")
    reader = FolderReader(str(folder), numpy.array(names))
    images, kept, skipped = held(reader, size, skip_broken) if size else (None, *readable(reader, skip_broken))
    if size and images is None:
        report.append(f"{len(names)} images of {size}x{size} do not fit in memory: they are read from disk")
    found = torch.tensor(labels)[kept]
    rest = reader.select(kept) if images is None else None
    return ImageSet(str(root), split, classes, found, images, (*report, *skipped), rest)


def tiny_imagenet_parts(root: Path, size: int | None, skip_broken: bool) -> Parts:
    """Tiny-ImageNet as it unpacks: train/CLASS/images/*.JPEG, and val/images with the classes in a file beside it."""
    folder = next((place for place in (root / "tiny-imagenet-200", root) if (place / "wnids.txt").is_file()), None)
    if folder is None:
        raise BadInput(f"tiny-imagenet: no wnids.txt in {root / 'tiny-imagenet-200'} or {root}; unpack the set there")
    train = partial(_open, folder, "train", {"train": folder / "train"}, size or 64, skip_broken)
    return {"train": train, "val": partial(_tiny_validation, folder, size or 64, skip_broken)}


def _tiny_validation(folder: Path, size: int, skip_broken: bool) -> ImageSet:
    listed = folder / "val" / "val_annotations.txt"
    classes = tuple(path.name for path in _subfolders(folder / "train"))
    try:
        lines = [line.split("\t") for line in listed.read_text().splitlines()]
        labels = [classes.index(line[1]) for line in lines]
    except (OSError, ValueError, IndexError) as error:
        raise BadInput(f"{listed}: cannot be read as a list of images and classes ({error})") from error
    reader = FolderReader(str(listed.parent / "images"), numpy.array([os.fsencode(line[0]) for line in lines]))
    images, kept, skipped = held(reader, size, skip_broken)
    rest = reader.select(kept) if images is None else None
    return ImageSet(str(folder), "val", classes, torch.tensor(labels)[kept], images, skipped, rest)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _files(folder: Path, name: str) -> list[bytes]:
    """The images below one class, sorted, relative to `folder`."""
    found = [
        os.fsencode(os.path.relpath(Path(here, file), folder))
        for here, _, files in os.walk(folder / name, followlinks=True)
        for file in files
        if _is_image(file)
    ]
    return sorted(found)


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")
