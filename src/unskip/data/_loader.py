"""Images from disk: a DataLoader whose workers decode, crop, resize, flip and, if asked, RandAugment.

A sample is asked for by (step, position, index). What happens to it is drawn from (seed, step, position), so neither
the number of workers nor that of processes matters. Every batch is divided among all workers, in parts that are small
enough for what lies ready to stay within AHEAD bytes. RandAugment is torchvision's (arXiv 1909.13719); it and a
transform of the user's draw from torch's generator, which is seeded for every sample and put back after it.

An image that cannot be read is tried again and then replaced by another one, drawn from (seed, step, position).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from unskip._extras import need
from unskip.data._augment import Augment, geometry, randaugment
from unskip.data._decode import decoded
from unskip.data._images import Reader
from unskip.data._order import GEOMETRY, PIXELS, REPLACED, share, stream
from unskip.errors import BadInput

Key = tuple[int, int, int]  # step, position in the global batch, index in the set
Transform = Callable[[Any], Any]  # an image of Pillow's to one of its, or to bytes (3, size, size)
Pixels = NDArray[numpy.uint8]
AHEAD = 2**29  # bytes of samples that lie ready, for one process
_MOST_AHEAD, _TRIES, _OTHERS = 8, 2, 8  # parts ahead of each worker; tries to read an image; others that may replace it


class Make(Protocol):
    """What becomes of a decoded image in colour: one or several arrays of bytes, each of a fixed shape."""

    @property
    def bytes(self) -> int:
        """Of all arrays of a sample."""
        ...

    def __call__(self, image: Any, step: int, position: int) -> tuple[Pixels, ...]: ...


@dataclass(frozen=True)
class Loaded:
    """A batch: its tensors, the rows that they are of, and what could not be read, by row."""

    tensors: list[Tensor]
    rows: Tensor
    broken: dict[int, str]


def loader(
    reader: Reader,
    batches: Iterable[list[Key]],
    make: Make,
    *,
    batch: int,
    seed: int,
    workers: int,
    processes: int,
    device: torch.device,
) -> Iterator[Loaded]:
    """The batches of keys in order, of `batch` samples at most, on the device."""
    # Parts of a batch: a multiple of the workers, so that each worker has the same part of every batch.
    parts = max(1, workers) * max(1, -(-2 * batch * make.bytes // AHEAD))
    ahead: Any = {}
    if workers:
        bytes_ahead = workers * max(1, -(-batch // parts) * make.bytes)
        ahead = {"prefetch_factor": max(1, min(_MOST_AHEAD, AHEAD // bytes_ahead))}
    made: DataLoader[Any] = DataLoader(
        _Decoded(reader.divided(processes * max(1, workers)), make, seed),
        batch_size=None,
        sampler=(_part(keys, part, parts) for keys in batches for part in range(parts)),
        num_workers=workers,
        pin_memory=device.type == "cuda",
        collate_fn=same,
        generator=torch.Generator(),  # its own, or it would draw from torch's
        **ahead,
    )
    each = iter(made)
    for found in zip(*[each] * parts, strict=True):
        if failed := next((part for part in found if isinstance(part, str)), None):
            raise BadInput(failed)
        tensors, rows, broken = zip(*found, strict=True)
        placed = ([value.to(device, non_blocking=True) for value in part] for part in zip(*tensors, strict=True))
        yield Loaded(
            [part[0] if len(part) == 1 else torch.cat(part) for part in placed],
            torch.cat(rows),
            {row: message for part in broken for row, message in part},
        )


def cores() -> int:
    """The cores of this process, which those of one launcher share."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, found // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _part(keys: list[Key], part: int, parts: int) -> list[Key]:
    places = share(len(keys), part, parts)
    return keys[places.start : places.stop]


def same(found: Any) -> Any:
    """Leaves what a dataset gives as it is; torch would make tensors of it."""
    return found


@dataclass(frozen=True)
class _Decoded(Dataset[Any]):
    """Some samples by their keys: tensors, the rows they are of, and (row, message) for what could not be read.

    A message alone where nothing can be read: an exception from a worker comes wrapped in its traceback.
    """

    reader: Reader
    make: Make
    seed: int

    def __getitem__(self, keys: Sequence[Key]) -> tuple[list[Tensor], Tensor, list[tuple[int, str]]] | str:
        rows, broken, made = list[int](), list[tuple[int, str]](), list[tuple[Pixels, ...]]()
        for key in keys:
            image, row = self._read(key, broken)
            if image is None:
                return f"{broken[0][1]}; nor can {_OTHERS} images be read that were drawn in its place"
            try:
                made.append(self.make(image, *key[:2]))
            except BadInput as error:
                return str(error)
            rows.append(row)
        stacked = [torch.from_numpy(numpy.stack(each)) for each in zip(*made, strict=True)] if made else []
        return stacked, torch.tensor(rows, dtype=torch.int64), broken

    def _read(self, key: Key, broken: list[tuple[int, str]]) -> tuple[Any, int]:
        """The image of a key, or of a row that is drawn in its place."""
        others = None
        row = key[2]
        for turn in range(_OTHERS + 1):
            for attempt in range(_TRIES):
                try:
                    image = decoded(self.reader, row)
                    return image if image.mode == "RGB" else image.convert("RGB"), row
                except BadInput as error:
                    if attempt == _TRIES - 1:
                        broken.append((row, str(error)))
            if others is None:
                others = stream(REPLACED, self.seed, *key).integers(len(self.reader), size=_OTHERS + 1)
            row = int(others[turn])
        return None, row


@dataclass(frozen=True)
class Shown:
    """One view of an image: cropped, resized, flipped, RandAugmented; or what a transform of the user's makes of it."""

    augment: Augment | None
    size: int
    seed: int
    transform: Transform | None = None

    @property
    def bytes(self) -> int:
        return 3 * self.size**2

    def __call__(self, image: Any, step: int, position: int) -> tuple[Pixels, ...]:
        augment = self.augment
        if self.transform is not None:
            image = self._seeded(self.transform, image, step, position)
        elif augment is not None or (image.height, image.width) != (self.size, self.size):
            random = stream(GEOMETRY, self.seed, step, position)
            box = geometry(augment, random, 1, image.height, image.width)[0]
            image = cropped(image, box, self.size, augment.interpolation if augment else "bilinear")
            if augment is not None and augment.randaugment:
                change = need("torchvision.transforms.v2").RandAugment(*randaugment(augment.randaugment))
                image = self._seeded(change, image, step, position)
        pixels = image.numpy() if isinstance(image, Tensor) else as_bytes(image)
        if pixels.shape != (3, self.size, self.size) or pixels.dtype != numpy.uint8:
            raise BadInput(
                f"the transform makes {pixels.dtype} of shape {pixels.shape}; bytes (uint8) of shape "
                f"(3, {self.size}, {self.size}) are fed"
            )
        return (pixels,)

    def _seeded(self, transform: Transform, image: Any, step: int, position: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(stream(PIXELS, self.seed, step, position).integers(2**62)))
            return transform(image)


def cropped(image: Any, box: Sequence[float], size: int, interpolation: str) -> Any:
    """A box of an image of Pillow's, resized to a square: top, left, height, width, and 1 where it is flipped."""
    v2 = need("torchvision.transforms.v2")
    top, left, tall, wide, flip = (int(number) for number in box)
    if (top, left, tall, wide) != (0, 0, image.height, image.width) or (tall, wide) != (size, size):
        way = v2.InterpolationMode(interpolation)
        image = v2.functional.resized_crop(image, top, left, tall, wide, [size, size], way, antialias=True)
    return v2.functional.horizontal_flip(image) if flip else image


def as_bytes(image: Any) -> Pixels:
    """(3, height, width) of an image of Pillow's in colour; as it is of anything else, which has another shape."""
    pixels = numpy.asarray(image)
    return pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels
