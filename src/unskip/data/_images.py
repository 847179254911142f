"""A labelled set of images: in memory as bytes, or read from disk on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy
import torch
from torch import Tensor

from unskip.data._augment import central
from unskip.data._decode import fitted, pixels
from unskip.data._device import crop_resize
from unskip.data._order import Groups, Rows
from unskip.errors import BadInput

_CHUNK = 1024


class Reader(Protocol):
    """Reads the encoded images of a set on disk. It is pickled for the workers."""

    def __len__(self) -> int: ...
    def encoded(self, index: int) -> bytes:
        """The bytes of one image as stored."""
        ...

    def place(self, index: int) -> str:
        """The file, or the file and the position in it, for messages."""
        ...

    def select(self, rows: Rows) -> Reader: ...

    def identity(self) -> Iterator[bytes]:
        """Bytes to hash for a fingerprint, cheap to read: names, sizes, and a sample of the content."""
        ...

    @property
    def groups(self) -> Groups | None:
        """The rows that are read together; None if each is read alone."""
        return None

    def divided(self, processes: int) -> Reader:
        """The reader for one of several processes, each of which reads a part of every batch."""
        return self


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with labels. `images` is (N, channels, H, W) in bytes, or None for a set on disk."""

    name: str
    split: str
    classes: tuple[str, ...]
    labels: Tensor  # (N,) int64, on the CPU
    images: Tensor | None = None
    report: tuple[str, ...] = ()  # what was skipped or assumed on opening
    reader: Reader | None = None

    def __post_init__(self) -> None:
        if (self.images is None) == (self.reader is None):
            raise BadInput(f"{self.name}: an image set has either images in memory or a reader")
        source = self.images if self.images is not None else self.reader
        assert source is not None
        if len(source) != len(self.labels):
            raise BadInput(f"{self.name}: {len(source)} images and {len(self.labels)} labels; pass one label per image")
        if self.images is not None and (self.images.ndim != 4 or self.images.dtype != torch.uint8):
            raise BadInput(
                f"{self.name}: images are {self.images.dtype} of shape {tuple(self.images.shape)}; "
                "pass bytes (uint8) of shape (N, channels, height, width)"
            )
        wrong = (self.labels < 0) | (self.labels >= len(self.classes))
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise BadInput(
                f"{self.place(row)}: label {int(self.labels[row])} is out of range; "
                f"{self.name} has {len(self.classes)} classes, 0 to {len(self.classes) - 1}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.size)) if self.size else "any size, from disk"
        return f"ImageSet({self.name}, {self.split}: {len(self)} images, {len(self.classes)} classes, {shape})"

    @property
    def channels(self) -> int:
        """1 for gray images, 3 for colour; images on disk are always read in colour."""
        return 3 if self.images is None else self.images.shape[1]

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width of all images; None for a set on disk."""
        return None if self.images is None else (self.images.shape[2], self.images.shape[3])

    def place(self, index: int) -> str:
        """The location of an image, for messages."""
        return self.reader.place(index) if self.reader else f"{self.name} ({self.split}), image {index}"

    def select(self, indices: Sequence[int] | Tensor, split: str | None = None) -> ImageSet:
        """The subset of these images, in this order."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return replace(
            self,
            split=split or self.split,
            labels=self.labels[rows],
            images=None if self.images is None else self.images[rows],
            reader=self.reader and self.reader.select(rows.numpy()),
        )

    def load(self, indices: Sequence[int] | Tensor, size: int | tuple[int, int] | None = None) -> Tensor:
        """Images as bytes (n, channels, height, width), center-cropped and resized. None keeps the set's size."""
        rows = torch.as_tensor(indices, dtype=torch.int64).tolist()
        out = self.size if size is None else (size, size) if isinstance(size, int) else size
        if out is None:
            raise BadInput(f"{self.name}: images differ in size; pass the size to load them at")
        if self.images is not None:
            return resized(self.images[rows], out)
        assert self.reader is not None
        return torch.stack([fitted(pixels(self.reader, row), out).expand(3, *out) for row in rows])


def subset(images: ImageSet, count: int) -> ImageSet:
    """At most `count` images, as evenly spread over the classes as possible, drawn with a fixed seed."""
    if len(images) <= count:
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    labels = images.labels[order]
    by_class = labels.argsort(stable=True)
    sizes = labels.bincount()
    rank = torch.empty_like(labels)  # the number of earlier images of the same class
    rank[by_class] = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels[by_class]]
    chosen = (rank * len(sizes) + labels).argsort()[:count]
    return images.select(order[chosen].sort().values)


def resized(images: Tensor, out: tuple[int, int]) -> Tensor:
    """Bytes (n, channels, H, W) to bytes (n, channels, *out): the largest central crop of that shape, resized."""
    if tuple(images.shape[-2:]) == tuple(out):
        return images
    box = torch.tensor([*central(images.shape[-2], images.shape[-1], out), 0])
    parts = [crop_resize(chunk, box.expand(len(chunk), 5), out).round().byte() for chunk in images.split(_CHUNK)]
    return torch.cat(parts)


def fingerprint(images: ImageSet) -> str:
    """A hash of the labels and bytes of a set; for a set on disk, of file names, sizes and a sample of the bytes."""
    digest = hashlib.sha256(f"{len(images)} {images.classes}".encode())
    digest.update(images.labels.numpy().tobytes())
    if images.images is not None:
        digest.update(images.images.contiguous().numpy().data)
    else:
        assert images.reader is not None
        for part in images.reader.identity():
            digest.update(part)
    return digest.hexdigest()[:16]


def samples(files: Sequence[str]) -> Iterator[bytes]:
    """Names and sizes of files, and 4096 bytes at each of about 64 evenly spaced positions in them."""
    sizes = [Path(file).stat().st_size for file in files]
    yield repr([(Path(file).name, size) for file, size in zip(files, sizes, strict=True)]).encode()
    ends = numpy.cumsum(sizes)
    for position in range(0, int(ends[-1]), max(1, int(ends[-1]) // 64)):
        file = int(numpy.searchsorted(ends, position, side="right"))
        with Path(files[file]).open("rb") as opened:
            opened.seek(position - int(ends[file]) + sizes[file])
            yield opened.read(4096)
