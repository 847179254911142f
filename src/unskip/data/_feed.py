"""Batches of images on the device, for training and evaluation.

A set in memory is copied to the device once, as bytes, and augmented there. A set on disk goes through a DataLoader:
workers decode, crop and flip; the device normalises, erases and mixes. In both cases a batch depends on (seed, step)
alone, and no global generator is used. Images on disk that cannot be read are replaced and listed in `broken`; more
than 1 + n / 100 of n are an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from unskip._checks import whole
from unskip._warn import warn
from unskip.data import _device
from unskip.data._assemble import allowed
from unskip.data._augment import Augment, Table, geometry, mixing, partners
from unskip.data._images import ImageSet
from unskip.data._loader import Key, Loaded, Make, Transform, ViewDecoder, cores, loader
from unskip.data._order import GEOMETRY, MIXING, Order, Rows, check_world, evaluation_batches, share, stream
from unskip.errors import BadInput

Batch = tuple[Tensor, Tensor]


class Feed:
    """Batches of `batch` images over all processes, (n, channels, size, size), normalised, float32.

    Without `augment` the images are only center-cropped and resized. Labels are int64 (n,), or weights (n, classes) if
    images are mixed. `workers` processes decode sets on disk; the default is one per core of this process. A
    `transform` replaces the crop and flip of `augment`: it maps a Pillow image to bytes (3, size, size) or to a Pillow
    image of that size, may draw from torch's generator, and is pickled for the workers.
    """

    def __init__(
        self,
        images: ImageSet,
        batch: int,
        size: int | None = None,
        *,
        seed: int = 0,
        augment: Augment | None = None,
        device: str | torch.device = "cpu",
        workers: int | None = None,
        drop_last: bool = True,
        transform: Transform | None = None,
    ) -> None:
        if size is None and (images.size is None or images.size[0] != images.size[1]):
            raise BadInput(f"{images.name}: images are not squares of one size; give size=, or --size")
        if images.images is not None and (transform or (augment and augment.randaugment)):
            raise BadInput(
                f"{images.name}: randaugment and transforms need images read from disk, but these are in memory; leave "
                "them out, or open a folder without a size"
            )
        if size is not None:
            whole("feed", "size", size, low=1)
        if workers is not None:
            whole("feed", "workers", workers, low=0)
        self.images, self.batch, self.seed, self.augment, self.transform = images, batch, seed, augment, transform
        self.workers = usual_workers(len(images)) if workers is None else workers
        self.broken: dict[int, str] = {}  # messages by row; the training loop adds those of other processes
        self.size = size if size is not None else images.size[0] if images.size else 0
        self.device = torch.device(device)
        self.order = Order(len(images), batch, seed, drop_last, None if images.reader is None else images.reader.groups)
        self.mean, self.std = _device.mean_and_std(images.channels, augment, self.device)
        self._pixels = None if images.images is None else images.images.to(self.device)
        self._labels = images.labels.to(self.device)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the set."""
        return self.order.steps_per_epoch

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label."""
        return self.images.classes

    def iterate(
        self, start_step: int, stop_step: int, rank: int = 0, world: int = 1, parts: int = 1
    ) -> Iterator[Batch]:
        """This process's share of each batch of steps `start_step` to `stop_step` (exclusive), in `parts` pieces."""
        self._check(start_step, stop_step, rank, world, parts)
        return self._training(start_step, stop_step, rank, world, parts)

    def evaluate(self, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Every image once, in order, not augmented; each process gets a consecutive share."""
        batches = evaluation_batches(len(self.images), self.batch, rank, world)
        return self._evaluation([numpy.arange(part.start, part.stop) for part in batches], world)

    def unchanged(self, batches: Iterable[Rows], world: int = 1) -> Iterator[Batch]:
        """Images by row, not augmented, from 0 to 255, and the rows that were read: broken images are replaced."""
        still = self.augment and self.augment.still()
        if self._pixels is None:
            yield from self._read(([(0, 0, row) for row in rows.tolist()] for rows in batches), still, world)
            return
        for rows in batches:
            indices = _device.put(rows, self.device)
            boxes = geometry(still, stream(GEOMETRY, self.seed), len(rows), *self._pixels.shape[2:])
            yield self._cropped(self._pixels.index_select(0, indices), boxes, still), indices

    def loaded(
        self, make: Make, start_step: int, stop_step: int, rank: int = 0, world: int = 1, parts: int = 1
    ) -> Iterator[tuple[list[Tensor], Tensor]]:
        """The output of `make` for the images of these batches of a set on disk, and their labels; on the device."""
        self._check(start_step, stop_step, rank, world, parts)
        plans = self._plans(range(start_step, stop_step), rank, world, parts)
        for batch in self._load((plan.keys(step) for step, plan in plans), make, world):
            yield batch.tensors, self._labels[batch.rows.to(self.device)]

    def _check(self, start_step: int, stop_step: int, rank: int, world: int, parts: int) -> None:
        check_world(self.batch, rank * parts, world * parts)
        if not 0 <= start_step <= stop_step:
            raise BadInput(
                f"steps from {start_step} to {stop_step}; the first must be 0 or more, and at most the second"
            )
        assert self.steps_per_epoch  # if there are too few images, raises now rather than at the first batch

    def _training(self, start_step: int, stop_step: int, rank: int, world: int, parts: int) -> Iterator[Batch]:
        steps = range(start_step, stop_step)
        keys = (plan.keys(step) for step, plan in self._plans(steps, rank, world, parts))
        read = self._read(keys, self.augment, world)
        for step, plan in self._plans(steps, rank, world, parts):
            if self._pixels is not None:
                rows = _device.put(plan.rows[plan.loaded], self.device)
                random = stream(GEOMETRY, self.seed, step)
                boxes = geometry(self.augment, random, len(plan.rows), *self._pixels.shape[2:])[plan.loaded]
                pixels = self._cropped(self._pixels.index_select(0, rows), boxes, self.augment)
            else:
                pixels, rows = next(read)
            yield self._mixed(_device.normalised(pixels, self.mean, self.std), self._labels[rows], plan, step)

    def _evaluation(self, batches: list[Rows], world: int) -> Iterator[Batch]:
        for pixels, rows in self.unchanged(batches, world):
            yield _device.normalised(pixels, self.mean, self.std), self._labels[rows]
        if self.broken:
            first, count = next(iter(self.broken.values())), len(self.broken)
            warn(f"{first}; {count} of {len(self.images)} images could not be read and were replaced by others")

    def _plans(self, steps: range, rank: int, world: int, parts: int) -> Iterator[tuple[int, _Plan]]:
        """The steps and this process's positions in them, part by part."""
        mixes = self.augment is not None and self.augment.mixes
        for step in steps:
            rows = self.order.rows(step)
            for part in range(parts):
                yield step, _plan(rows, rank * parts + part, world * parts, mixes)

    def _cropped(self, pixels: Tensor, boxes: Table, augment: Augment | None) -> Tensor:
        out = (self.size, self.size)
        if tuple(pixels.shape[2:]) == out and (boxes[:, :4] == (0, 0, *out)).all():  # nothing to crop or resize
            flip = boxes[:, 4] > 0
            if not flip.any():
                return pixels
            return torch.where(_device.put(flip, self.device)[:, None, None, None], pixels.flip(3), pixels)
        pad = augment.pad if augment is not None and augment.crop == "pad" else 0
        interpolation = "bilinear" if augment is None else augment.interpolation
        table = _device.put(boxes.astype(numpy.float32), self.device)
        return _device.crop_resize(pixels, table, out, pad, interpolation)

    def _mixed(self, images: Tensor, labels: Tensor, plan: _Plan, step: int) -> Batch:
        """Erases boxes and mixes images in pairs."""
        if self.augment is None or not (self.augment.erase or self.augment.mixes):
            return images, labels
        numbers = mixing(self.augment, stream(MIXING, self.seed, step), len(plan.rows), self.size)
        table = _device.put(numbers[plan.loaded].astype(numpy.float32), self.device)
        if self.augment.erase:
            images = _device.erased(images, table[:, 6:])
        if not self.augment.mixes:
            return images, labels
        own, other = len(plan.partner), _device.put(plan.partner, self.device)
        weights = _device.mixed_labels(labels[:own], labels[other], table[:own], len(self.classes))
        return _device.mixed(images[:own], images[other], table[:own]), weights

    def _read(self, keys: Iterable[list[Key]], augment: Augment | None, world: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The pixels of a set on disk, and their rows. Lazy: reading starts with the first batch."""
        make = ViewDecoder(augment, self.size, self.seed, self.transform)
        for loaded in self._load(keys, make, world):
            yield loaded.tensors[0], _device.put(loaded.rows.numpy(), self.device)

    def _load(self, keys: Iterable[list[Key]], make: Make, world: int) -> Iterator[Loaded]:
        """The output of `make` for images of a set on disk, on the device."""
        assert self.images.reader is not None
        options: dict[str, Any] = {"batch": -(-self.batch // world), "seed": self.seed, "workers": self.workers}
        for loaded in loader(self.images.reader, keys, make, processes=world, device=self.device, **options):
            self.broken |= loaded.broken
            if len(self.broken) > allowed(len(self.images)):
                raise BadInput(
                    f"{[*self.broken.values()][-1]}; {len(self.broken)} of {len(self.images)} images could not "
                    f"be read so far, and at most {allowed(len(self.images))} may be broken"
                )
            yield loaded


def usual_workers(images: int) -> int:
    """Decoding processes for one training process: one per core, up to 16; none for a small set."""
    return min(16, cores()) if images >= 1000 else 0


@dataclass(frozen=True)
class _Plan:
    """The samples that one process loads for a step."""

    rows: Rows  # the samples of the global batch
    loaded: Rows  # positions in it: the process's own, then partners from other processes
    partner: Rows  # for each own position, the index of its partner in `loaded`

    def keys(self, step: int) -> list[Key]:
        return [(step, position, int(self.rows[position])) for position in self.loaded.tolist()]


def _plan(rows: Rows, rank: int, world: int, mixes: bool) -> _Plan:
    part = share(len(rows), rank, world)
    own = numpy.arange(part.start, part.stop)
    partner = partners(len(rows))[own] if mixes else own
    outside = (partner < part.start) | (partner >= part.stop)
    others = numpy.unique(partner[outside])
    index = numpy.where(outside, len(own) + numpy.searchsorted(others, partner), partner - part.start)
    return _Plan(rows, numpy.concatenate([own, others]), index)
