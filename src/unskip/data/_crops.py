"""Global and local crops of each image, with color jitter, blur and solarization.

What DINO (arXiv 2104.14294) and SimCLR (arXiv 2002.05709) train on. A crop of a sample is a function of (seed, step,
position, crop): all numbers are drawn for the global batch before any pixel is touched, so a resumed run and any number
of processes see the same crops. Making crops from these numbers needs no host synchronisation and no copy, so that a
training step can do it itself, also inside a CUDA graph. Images that are read from disk are cropped by the workers, out
of the whole image in its own aspect and resolution, as published; their colours change on the device.

    crop      a random area and aspect, resized, flipped half the time
    colour    x <- clamp(C x + c),  C of brightness, saturation and a turn of the hue in YIQ, c of contrast; or gray
    blur      a Gaussian of random width, as a product with a band matrix for rows and one for columns
    solarize  x <- 1 - x where x > 1/2
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from unskip.data import _device
from unskip.data._augment import Augment, Interpolation, Table, geometry
from unskip.data._feed import Feed
from unskip.data._images import ImageSet
from unskip.data._loader import Pixels, as_bytes, cropped
from unskip.data._order import VIEWS, share, stream
from unskip.errors import BadInput

_YIQ = numpy.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
_RGB = numpy.linalg.inv(_YIQ)
# What becomes of channels is gray + vivid (cos colour + sin turned): the rows of brightness, and of both colours.
_MIXING = numpy.stack(
    [
        numpy.outer(_RGB[:, 0], _YIQ[0]),
        numpy.outer(_RGB[:, 1], _YIQ[1]) + numpy.outer(_RGB[:, 2], _YIQ[2]),
        numpy.outer(_RGB[:, 2], _YIQ[1]) - numpy.outer(_RGB[:, 1], _YIQ[2]),
    ]
)
_BOX, _COLOURS = 5, 7  # numbers that are drawn for a crop: those of its box, and those of its colours
Drawn = tuple[Tensor, Tensor, Tensor, Tensor]  # images, numbers of the global and of the local crops, labels


@dataclass(frozen=True)
class Crops:
    """Which crops are made. `blur`: probabilities of the first global crop, other global ones, local ones."""

    global_crops: int = 2
    local_crops: int = 8
    size: int = 224  # of global crops
    local_size: int = 96
    scale: tuple[float, float] = (0.4, 1.0)  # fraction of the area, of global crops
    local_scale: tuple[float, float] = (0.05, 0.4)
    jitter: float = 0.8  # probability of color jitter
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    gray: float = 0.2
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)
    sigma: tuple[float, float] = (0.1, 2.0)  # of the blur, in pixels at 224; in proportion for other sizes
    solarize: float = 0.2  # of the second global crop
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(value))
        if self.global_crops < 1 or self.local_crops < 0 or self.size < 1 or (self.local_crops and self.local_size < 1):
            raise BadInput(
                f"{self.global_crops} global crops of {self.size} pixels and {self.local_crops} local ones of "
                f"{self.local_size}; take at least one global crop, and sizes of at least one pixel"
            )
        for name in ("scale", "local_scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise BadInput(f"{name} is {(low, high)}; it is two fractions of the area, the lower one first")

    def of(self, local: bool) -> tuple[int, int, tuple[float, float]]:
        """How many crops of a kind there are, their size, and their fraction of the area."""
        if local:
            return self.local_crops, self.local_size, self.local_scale
        return self.global_crops, self.size, self.scale


class CropFeed:
    """Batches of global crops (n, crops, channels, size, size), local crops (n, crops, ...) and labels (n,)."""

    def __init__(
        self,
        images: ImageSet,
        batch: int,
        crops: Crops,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        workers: int | None = None,
    ) -> None:
        whole, size = Augment(crop="none", flip=False), None if images.images is not None else crops.size
        self.base = Feed(images, batch, size, seed=seed, augment=whole, device=device, workers=workers)
        self.crops, self.seed, self.device = crops, seed, self.base.device
        self._mixing = mixing_basis(self.device)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the set."""
        return self.base.steps_per_epoch

    @property
    def broken(self) -> dict[int, str]:
        """Images that could not be read so far."""
        return self.base.broken

    def iterate(
        self, start_step: int, stop_step: int, rank: int = 0, world: int = 1, parts: int = 1
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The batches of the steps from `start_step` up to but without `stop_step`: this process's part of each, in so
        many `parts` one after the other."""
        for images, wide, local, labels in self.drawn(start_step, stop_step, rank, world, parts):
            yield (*self.made(images, wide, local), labels)

    def drawn(self, start_step: int, stop_step: int, rank: int = 0, world: int = 1, parts: int = 1) -> Iterator[Drawn]:
        """The same batches before their crops are made: images, the random numbers (n, crops, 12) of the global and of
        the local crops, and labels. Of images on disk the crops are cut already, and lie side by side as bytes."""
        count, where = self.crops.global_crops, (start_step, stop_step, rank, world, parts)
        base: Iterator[tuple[Tensor, Tensor]]
        if self.base.images.images is not None:
            base = self.base.iterate(*where)
        else:
            cut = self.base.loaded(CropDecoder(self.crops, self.seed), *where)
            base = ((torch.cat([each.flatten(1) for each in tensors], 1), labels) for tensors, labels in cut)
        for place, (images, labels) in enumerate(base, start_step * parts):
            step, turn = divmod(place, parts)
            part = share(self.base.batch, rank * parts + turn, world * parts)
            height, width = images.shape[2:] if images.ndim == 4 else (1, 1)
            tables = [self._draw(step, kind, height, width) for kind in ("global", "local")]
            # One copy to the device for all of them.
            both = _device.put(numpy.concatenate(tables, 1)[part.start : part.stop].astype(numpy.float32), self.device)
            yield images, both[:, :count], both[:, count:], labels

    def made(self, images: Tensor, wide: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
        """The global and the local crops of a batch of `drawn`."""
        crops = self.crops
        with torch.autocast(images.device.type, enabled=False):
            if images.ndim == 4:
                pixels = (images * self.base.std + self.base.mean) * 255
                return self._made(pixels, wide, crops.size), self._made(pixels, local, crops.local_size)
            first = crops.global_crops * 3 * crops.size**2
            return (
                self._coloured(images[:, :first].reshape(-1, 3, crops.size, crops.size), wide),
                self._coloured(images[:, first:].reshape(-1, 3, crops.local_size, crops.local_size), local),
            )

    def _made(self, pixels: Tensor, table: Tensor, size: int) -> Tensor:
        count, crops = table.shape[:2]
        if not crops:
            return pixels.new_empty(count, 0, pixels.shape[1], size, size)
        each = pixels[:, None].expand(-1, crops, -1, -1, -1).flatten(0, 1)
        boxes = table.flatten(0, 1)[:, :_BOX]
        return self._coloured(_device.shown(each, boxes, (size, size), interpolation=self.crops.interpolation), table)

    def _coloured(self, pixels: Tensor, table: Tensor) -> Tensor:
        """Bytes, or floats from 0 to 255, (n crops, channels, H, W), to normalised crops (n, crops, ...)."""
        if not table.shape[1]:
            return pixels.new_empty(len(table), 0, *pixels.shape[1:], dtype=torch.float32)
        changed = coloured(pixels.float() / 255, table.flatten(0, 1)[:, _BOX:], self._mixing)
        made: Tensor = ((changed - self.base.mean) / self.base.std).unflatten(0, tuple(table.shape[:2]))
        return made

    def _draw(self, step: int, kind: Literal["global", "local"], height: int, width: int) -> Table:
        """(batch, crops of the kind, 12): top, left, height, width, flipped, and the numbers of colours."""
        crops, count, wide = self.crops, self.base.batch, kind == "global"
        number, size, scale = crops.of(local=not wide)
        random = stream(VIEWS, self.seed, step, 0 if wide else 1)
        crop = Augment(crop="resized", scale=scale, flip=True)
        boxes = geometry(crop, random, count * number, height, width).reshape(count, number, _BOX)
        blur = [crops.blur[min(index, 1)] if wide else crops.blur[2] for index in range(number)]
        solarize = [crops.solarize if wide and index == 1 else 0.0 for index in range(number)]
        return numpy.concatenate([boxes, self._colours(random, count, blur, solarize, size)], 2)

    def _colours(
        self, random: numpy.random.Generator, count: int, blur: list[float], solarize: list[float], size: int
    ) -> Table:
        """(count, crops, 7): factors of brightness, contrast, saturation, turn of the hue, gray, width of blur,
        solarize. The last two have a probability for each crop."""
        crops, shape = self.crops, (count, len(blur))
        table = numpy.zeros((*shape, _COLOURS))
        changed = random.random(shape) < crops.jitter
        for column, strength in enumerate((crops.brightness, crops.contrast, crops.saturation)):
            factor = random.uniform(max(0.0, 1 - strength), 1 + strength, shape)
            table[..., column] = numpy.where(changed, factor, 1.0)
        turn = random.uniform(-crops.hue, crops.hue, shape) * 2 * math.pi
        table[..., 3] = numpy.where(changed, turn, 0.0)
        table[..., 4] = random.random(shape) < crops.gray
        wide = random.uniform(*crops.sigma, shape) * size / 224
        table[..., 5] = numpy.where(random.random(shape) < blur, wide, 0.0)
        table[..., 6] = random.random(shape) < solarize
        return table


@dataclass(frozen=True)
class CropDecoder:
    """The crops of an image of Pillow's in its own aspect and resolution, (crops, 3, size, size) of either kind."""

    crops: Crops
    seed: int

    @property
    def bytes(self) -> int:
        crops = self.crops
        return 3 * (crops.global_crops * crops.size**2 + crops.local_crops * crops.local_size**2)

    def __call__(self, image: Any, step: int, position: int) -> tuple[Pixels, ...]:
        crops = self.crops
        kinds = (
            (crops.global_crops, crops.size, crops.scale),
            (crops.local_crops, crops.local_size, crops.local_scale),
        )
        found = []
        for kind, (number, size, scale) in enumerate(kinds):
            random = stream(VIEWS, self.seed, step, kind, position)
            boxes = geometry(Augment(crop="resized", scale=scale), random, number, image.height, image.width)
            made = [as_bytes(cropped(image, box, size, crops.interpolation)) for box in boxes]
            if made:
                found.append(numpy.stack(made))
        return tuple(found)


@dataclass(frozen=True)
class DrawnFeed:
    """The batches of a CropFeed before their crops are made, for a training step that makes them itself."""

    feed: CropFeed

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the set."""
        return self.feed.steps_per_epoch

    @property
    def broken(self) -> dict[int, str]:
        """Images that could not be read so far."""
        return self.feed.broken

    def iterate(
        self, start_step: int, stop_step: int, rank: int = 0, world: int = 1, parts: int = 1
    ) -> Iterator[Drawn]:
        """See `CropFeed.drawn`."""
        return self.feed.drawn(start_step, stop_step, rank, world, parts)


def coloured(images: Tensor, table: Tensor, mixing: Tensor | None = None) -> Tensor:
    """Images from 0 to 1, (n, channels, H, W), with color jitter, blur and solarization by a table (n, 7).

    `mixing` is that of `mixing_basis`, where it lies on the device already.
    """
    bright, contrast, saturation, turn, gray, sigma, solar = table.unbind(1)
    if images.shape[1] == 3:
        mixing = mixing_basis(images.device) if mixing is None else mixing
        vivid = saturation.masked_fill(gray > 0.5, 0.0)
        parts = torch.stack([torch.ones_like(vivid), vivid * turn.cos(), vivid * turn.sin()], 1)
        matrix = bright[:, None, None] * torch.einsum("nk,kij->nij", parts, mixing)
        images = torch.einsum("nij,njhw->nihw", matrix, images)
        middle = torch.einsum("j,njhw->n", mixing[0, 0], images) / images[0, 0].numel()  # of the brightness
    else:
        images = images * bright[:, None, None, None]
        middle = images.mean((1, 2, 3))
    factor = contrast[:, None, None, None]
    images = (factor * images + (1 - factor) * middle[:, None, None, None]).clamp(0, 1)
    rows, columns = (_band(sigma, side) for side in images.shape[2:])
    images = rows[:, None] @ images @ columns[:, None].mT
    return torch.where((solar[:, None, None, None] > 0.5) & (images > 0.5), 1 - images, images)


def mixing_basis(device: torch.device) -> Tensor:
    """(3, 3, 3): what is left of channels as gray, as colour, and as colour turned by a right angle, in YIQ."""
    return torch.tensor(_MIXING, dtype=torch.float32, device=device)


def _band(sigma: Tensor, size: int) -> Tensor:
    """(n, size, size): a Gaussian of each width over the pixels, every row's sum 1; the identity for a width of 0."""
    places = torch.arange(size, device=sigma.device, dtype=sigma.dtype)
    far = (places[:, None] - places).square()[None] / (2 * sigma.clamp_min(1e-3).square())[:, None, None]
    weights = torch.exp(-far)
    band: Tensor = weights / weights.sum(2, keepdim=True)
    return band
