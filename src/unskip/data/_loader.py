"""Images from disk: a DataLoader whose workers decode, crop, resize, flip and, if asked, RandAugment.

A sample is asked for by (step, position, index). What happens to it is drawn from (seed, step, position), so neither
the number of workers nor that of processes matters. RandAugment is torchvision's (arXiv 1909.13719); it draws from
torch's generator, which is seeded for every sample and put back after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from unskip.data._augment import Augment, geometry, randaugment
from unskip.data._decode import decoded
from unskip.data._images import Reader
from unskip.data._order import GEOMETRY, PIXELS, stream
from unskip.errors import BadInput

Key = tuple[int, int, int]  # step, position in the global batch, index in the set


def loader(
    reader: Reader,
    batches: Iterable[list[Key]],
    augment: Augment | None,
    size: int,
    *,
    seed: int,
    workers: int,
    pinned: bool,
) -> Iterator[Tensor]:
    """Bytes (n, 3, size, size) for each batch of keys, in order. BadInput names a file that cannot be read."""
    batches_ahead: Any = {"prefetch_factor": 4} if workers else {}
    made: DataLoader[Tensor | str] = DataLoader(
        Decoded(reader, augment, size, seed),
        batch_sampler=batches,
        num_workers=workers,
        pin_memory=pinned,
        collate_fn=stacked,
        generator=torch.Generator(),  # its own, or it would draw from torch's
        **batches_ahead,
    )
    for got in made:
        if isinstance(got, str):
            raise BadInput(got)
        yield got


@dataclass(frozen=True)
class Decoded(Dataset[Tensor | str]):
    """One image by its key; a message instead of the pixels where it cannot be read."""

    reader: Reader
    augment: Augment | None
    size: int
    seed: int

    def __getitem__(self, key: Key) -> Tensor | str:
        step, position, index = key
        try:
            image = decoded(self.reader, index).convert("RGB")
        except BadInput as error:  # as text: an exception from a worker comes wrapped in its traceback
            return str(error)
        return self.changed(image, step, position)

    def changed(self, image: Any, step: int, position: int) -> Tensor:
        from torchvision.transforms import v2
        from torchvision.transforms.v2 import functional

        random = stream(GEOMETRY, self.seed, step, position)
        *box, flip = geometry(self.augment, random, 1, image.height, image.width)[0]
        top, left, tall, wide = (int(edge) for edge in box)
        way = v2.InterpolationMode(self.augment.interpolation if self.augment else "bilinear")
        image = functional.resized_crop(image, top, left, tall, wide, [self.size, self.size], way, antialias=True)
        if flip:
            image = functional.horizontal_flip(image)
        if self.augment is not None and self.augment.randaugment:
            operations, magnitude = randaugment(self.augment.randaugment)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(stream(PIXELS, self.seed, step, position).integers(2**62)))
                image = v2.RandAugment(operations, magnitude)(image)
        pixels: Tensor = functional.pil_to_tensor(image)
        return pixels


def stacked(samples: list[Tensor | str]) -> Tensor | str:
    """The batch, or the first message."""
    pixels = [sample for sample in samples if isinstance(sample, Tensor)]
    return next((sample for sample in samples if isinstance(sample, str)), None) or torch.stack(pixels)
