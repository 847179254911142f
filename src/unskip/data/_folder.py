"""A folder of images with one subfolder per class: root/class/*.jpg, or root/train/class/*.jpg beside val and test.

With a size the images are decoded into memory, else they are read from disk on demand. A folder without class folders
is one class. The listing of a large folder is cached until one of the folders in it changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import numpy

from unskip.data._assemble import assembled
from unskip.data._decode import MOST_BYTES
from unskip.data._images import ImageSet, Reader
from unskip.data._index import Index, cached, stamp
from unskip.data._order import Rows
from unskip.data._splits import WORDS, Parts
from unskip.errors import BadInput

SUFFIXES = frozenset(".bmp .gif .jpeg .jpg .png .ppm .pgm .tif .tiff .webp".split())
_SAMPLED = 64  # images whose content goes into the fingerprint


@dataclass(frozen=True, eq=False)
class FolderReader(Reader):
    """Files under one folder. Their names are in one array, which forked workers share without a copy."""

    folder: str
    names: Any  # (N,) of bytes, relative to the folder

    def __len__(self) -> int:
        return len(self.names)

    def place(self, index: int) -> str:
        return f"{self.folder}/{os.fsdecode(bytes(self.names[index]))}"

    def encoded(self, index: int) -> bytes:
        with FileIO(self.place(index)) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > MOST_BYTES:
                raise OSError(f"{size} bytes; at most {MOST_BYTES} are read")
            return opened.readall()

    def select(self, rows: Rows) -> FolderReader:
        return replace(self, names=self.names[rows])

    def identity(self) -> Iterator[bytes]:
        yield self.names.tobytes()
        for index in range(0, len(self), max(1, len(self) // _SAMPLED)):
            try:
                yield self.encoded(index)
            except OSError:  # a broken image, such as a dangling link
                yield b""


def folder_parts(folder: Path, size: int | None) -> Parts:
    """The splits of a folder: its subfolders named after splits, or else the folder itself for training."""
    inner = _subfolders(folder)
    named = {split: path for path in inner for split, words in WORDS.items() if path.name.lower() in words}
    # A class can be called "train" too, but contains images rather than folders.
    if named and (len(named) == len(inner) or any(_subfolders(path) for path in named.values())):
        splits = {split: named[split] for split in WORDS if split in named}
    else:
        splits = {"train": folder}
    return {split: partial(_open, folder, split, splits, size) for split in splits}


def _open(root: Path, split: str, splits: dict[str, Path], size: int | None) -> ImageSet:
    classes = tuple(sorted({path.name for inner in splits.values() for path in _subfolders(inner)}))
    folder, report = splits[split].absolute(), list[str]()
    index = cached(str(folder), None, partial(_listed, folder), _stamp)
    names, labels = index.arrays["names"], index.arrays["labels"]
    if classes and (labels < 0).any():
        loose = os.fsdecode(bytes(names[0]))
        raise BadInput(f"{folder / loose}: an image outside the class folders; move it into one")
    if not len(labels):
        raise BadInput(f"{folder}: no images in it (looked for {', '.join(sorted(SUFFIXES))})")
    if classes:
        own = json.loads(index.texts["classes"])
        labels = numpy.array([classes.index(name) for name in own], numpy.int64)[labels]
    else:
        classes, labels = ("images",), numpy.zeros_like(labels)
        report.append("no class folders: every image has label 0")
    reader = FolderReader(str(folder), names.view(f"S{names.shape[1]}")[:, 0])
    in_memory = size is not None
    return assembled(str(root), split, classes, labels, reader, size=size, in_memory=in_memory, report=report)


def _listed(folder: Path) -> Index:
    """Names of the images outside the class folders (label -1), then of those below each class folder, sorted."""
    inner = _subfolders(folder)
    names = sorted(os.fsencode(path.name) for path in folder.iterdir() if path.is_file() and _is_image(path.name))
    labels, folders = [-1] * len(names), [str(folder)]
    for label, path in enumerate(inner):
        images = list[bytes]()
        for parent, subfolders, files in os.walk(path, onerror=_unreadable, followlinks=True):
            subfolders[:] = [name for name in subfolders if not _links_to_parent(parent, name)]
            folders.append(parent)
            relative = os.path.relpath(parent, folder)
            images += [os.fsencode(f"{relative}/{file}") for file in files if _is_image(file)]
        names += sorted(images)
        labels += [label] * len(images)
    width = max(map(len, names), default=1)
    packed = numpy.array(names, f"S{width}").view(numpy.uint8).reshape(len(names), width)
    texts = {"classes": json.dumps([path.name for path in inner]), "folders": json.dumps(folders)}
    return Index({"names": packed, "labels": numpy.array(labels, numpy.int64)}, texts)


def _stamp(index: Index) -> str:
    return stamp(json.loads(index.texts["folders"]))


def tiny_imagenet_parts(root: Path, size: int | None) -> Parts:
    """Tiny-ImageNet as unpacked: train/CLASS/images/*.JPEG, and val/images with the classes in a file beside it."""
    folder = next((path for path in (root / "tiny-imagenet-200", root) if (path / "wnids.txt").is_file()), None)
    if folder is None:
        raise BadInput(f"tiny-imagenet: no wnids.txt in {root / 'tiny-imagenet-200'} or {root}; unpack the set there")
    train = partial(_open, folder, "train", {"train": folder / "train"}, size or 64)
    return {"train": train, "val": partial(_tiny_validation, folder, size or 64)}


def _tiny_validation(folder: Path, size: int) -> ImageSet:
    annotations = folder / "val" / "val_annotations.txt"
    classes = tuple(path.name for path in _subfolders(folder / "train"))
    try:
        lines = [line.split("\t") for line in annotations.read_text().splitlines()]
        labels = [classes.index(line[1]) for line in lines]
    except (OSError, ValueError, IndexError) as error:
        raise BadInput(f"{annotations}: cannot be read as a list of images and classes ({error})") from error
    reader = FolderReader(str(annotations.parent / "images"), numpy.array([os.fsencode(line[0]) for line in lines]))
    return assembled(str(folder), "val", classes, numpy.array(labels), reader, size=size, in_memory=True)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _links_to_parent(folder: str, name: str) -> bool:
    """Whether it is a link to a folder above it, which os.walk would follow forever."""
    path = Path(folder, name)
    return path.is_symlink() and Path(folder).resolve().is_relative_to(path.resolve())


def _unreadable(error: OSError) -> None:
    raise BadInput(f"{error.filename}: cannot be read ({error.strerror}); repair or remove the folder") from error


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")
