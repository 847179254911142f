"""Images from disk: a DataLoader whose workers decode, crop, resize, flip and optionally RandAugment.

The key of a sample is (step, position, index). Its augmentation is drawn from (seed, step, position), so it does not
depend on the number of workers or processes. Every batch is divided among all workers, in parts small enough to keep
the prefetched samples within AHEAD bytes. RandAugment (arXiv 1909.13719, torchvision's) and transforms of the user draw
from torch's generator, which is seeded for every sample and restored afterwards.

If an image cannot be read, it is tried again and then replaced by another one, drawn from (seed, step, position).
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
Transform = Callable[[Any], Any]  # a Pillow image to a Pillow image, or to bytes (3, size, size)
Pixels = NDArray[numpy.uint8]
AHEAD = 2**29  # bytes of prefetched samples, per process
_MOST_AHEAD, _TRIES, _OTHERS = 8, 2, 8  # prefetched parts per worker; attempts per image; attempts to replace it


class Make(Protocol):
    """Maps a decoded RGB image to one or several arrays of bytes, each of a fixed shape."""

    @property
    def bytes(self) -> int:
        """The size of all arrays of a sample."""
        ...

    def __call__(self, image: Any, step: int, position: int) -> tuple[Pixels, ...]: ...


@dataclass(frozen=True)
class Loaded:
    """A batch: its tensors, their rows in the set, and messages on unreadable images, by row."""

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
    """Loads the batches of keys in order, each of at most `batch` samples, to the device."""
    # The number of parts is a multiple of the workers, so that each worker gets the same part of every batch.
    parts = max(1, workers) * max(1, -(-2 * batch * make.bytes // AHEAD))
    ahead: Any = {}
    if workers:
        bytes_ahead = workers * max(1, -(-batch // parts) * make.bytes)
        ahead = {"prefetch_factor": max(1, min(_MOST_AHEAD, AHEAD // bytes_ahead))}
    loading: DataLoader[Any] = DataLoader(
        _Decoded(reader.divided(processes * max(1, workers)), make, seed),
        batch_size=None,
        sampler=(_part(keys, part, parts) for keys in batches for part in range(parts)),
        num_workers=workers,
        pin_memory=device.type == "cuda",
        collate_fn=same,
        generator=torch.Generator(),  # by default it draws a seed from torch's global generator
        **ahead,
    )
    iterator = iter(loading)
    for loaded in zip(*[iterator] * parts, strict=True):  # the parts of one batch
        if failed := next((part for part in loaded if isinstance(part, str)), None):
            raise BadInput(failed)
        tensors, rows, broken = zip(*loaded, strict=True)
        views = ([value.to(device, non_blocking=True) for value in view] for view in zip(*tensors, strict=True))
        yield Loaded(
            [view[0] if len(view) == 1 else torch.cat(view) for view in views],
            torch.cat(rows),
            {row: message for part in broken for row, message in part},
        )


def cores() -> int:
    """The cores of this process: an equal share of the machine's, among the processes of one launcher."""
    total = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, total // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _part(keys: list[Key], part: int, parts: int) -> list[Key]:
    positions = share(len(keys), part, parts)
    return keys[positions.start : positions.stop]


def same(sample: Any) -> Any:
    """The identity, in place of torch's default collation to tensors."""
    return sample


@dataclass(frozen=True)
class _Decoded(Dataset[Any]):
    """Samples by their keys: tensors, rows, and (row, message) for each unreadable image.

    An error is returned as its message, because DataLoader wraps a worker's exception in its traceback.
    """

    reader: Reader
    make: Make
    seed: int

    def __getitem__(self, keys: Sequence[Key]) -> tuple[list[Tensor], Tensor, list[tuple[int, str]]] | str:
        rows, broken, samples = list[int](), list[tuple[int, str]](), list[tuple[Pixels, ...]]()
        for key in keys:
            image, row = self._read(key, broken)
            if image is None:
                return f"{broken[0][1]}; {_OTHERS} images drawn to replace it cannot be read either"
            try:
                samples.append(self.make(image, *key[:2]))
            except BadInput as error:
                return str(error)
            rows.append(row)
        views = [torch.from_numpy(numpy.stack(view)) for view in zip(*samples, strict=True)]
        return views, torch.tensor(rows, dtype=torch.int64), broken

    def _read(self, key: Key, broken: list[tuple[int, str]]) -> tuple[Any, int]:
        """The image of a key, or of a row drawn to replace it; None if all fail."""
        row = key[2]
        for turn in range(_OTHERS + 1):
            if turn:
                row = int(stream(REPLACED, self.seed, *key).integers(len(self.reader), size=_OTHERS + 1)[turn - 1])
            for attempt in range(_TRIES):
                try:
                    image = decoded(self.reader, row)
                    return image if image.mode == "RGB" else image.convert("RGB"), row
                except BadInput as error:
                    if attempt == _TRIES - 1:
                        broken.append((row, str(error)))
        return None, row


@dataclass(frozen=True)
class ViewDecoder:
    """One view of an image: cropped, resized, flipped and RandAugmented, or transformed by the user's transform."""

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
                transform = need("torchvision.transforms.v2").RandAugment(*randaugment(augment.randaugment))
                image = self._seeded(transform, image, step, position)
        pixels = image.numpy() if isinstance(image, Tensor) else as_bytes(image)
        if pixels.shape != (3, self.size, self.size) or pixels.dtype != numpy.uint8:
            raise BadInput(
                f"the transform makes {pixels.dtype} of shape {pixels.shape}; it must make bytes (uint8) of shape "
                f"(3, {self.size}, {self.size})"
            )
        return (pixels,)

    def _seeded(self, transform: Transform, image: Any, step: int, position: int) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(stream(PIXELS, self.seed, step, position).integers(2**62)))
            return transform(image)


def cropped(image: Any, box: Sequence[float], size: int, interpolation: str) -> Any:
    """A box (top, left, height, width, 1 if flipped) of a Pillow image, resized to a square."""
    v2 = need("torchvision.transforms.v2")
    top, left, tall, wide, flip = (int(number) for number in box)
    if (top, left, tall, wide) != (0, 0, image.height, image.width) or (tall, wide) != (size, size):
        mode = v2.InterpolationMode(interpolation)
        image = v2.functional.resized_crop(image, top, left, tall, wide, [size, size], mode, antialias=True)
    return v2.functional.horizontal_flip(image) if flip else image


def as_bytes(image: Any) -> Pixels:
    """An RGB Pillow image as (3, height, width); other shapes are returned unchanged, for the caller to check."""
    pixels = numpy.asarray(image)
    return pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels
