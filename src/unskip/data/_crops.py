"""Global and local crops of each image, with color jitter, blur and solarization.

The views that DINO (arXiv 2104.14294) and SimCLR (arXiv 2002.05709) train on. A crop is a function of (seed, step,
position, crop): all numbers are drawn for the global batch before any pixel is touched, so a resumed run and any number
of processes get the same crops. Computing crops from these numbers needs no host synchronisation and no copy, so a
training step can do it itself, even inside a CUDA graph. Images on disk are cropped by the workers, from the whole
image at its own aspect ratio and resolution, as published; their colours change on the device.

    crop      a random area and aspect ratio, resized, flipped half the time
    colour    x <- clamp(C x + c),  C: brightness, saturation and a hue rotation in YIQ, c: contrast; or gray
    blur      a Gaussian of random width, as a product with one band matrix for rows and one for columns
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
# RGB -> RGB is gray + saturation (cos(hue) chroma + sin(hue) chroma turned by a right angle), three matrices.
_MIXING = numpy.stack(
    [
        numpy.outer(_RGB[:, 0], _YIQ[0]),
        numpy.outer(_RGB[:, 1], _YIQ[1]) + numpy.outer(_RGB[:, 2], _YIQ[2]),
        numpy.outer(_RGB[:, 2], _YIQ[1]) - numpy.outer(_RGB[:, 1], _YIQ[2]),
    ]
)
_BOX, _COLOURS = 5, 7  # random numbers of a crop: for its box and for its colours
Drawn = tuple[Tensor, Tensor, Tensor, Tensor]  # images, random numbers of the global and of the local crops, labels


@dataclass(frozen=True)
class Crops:
    """The crops of each image. `blur`: probabilities for the first global crop, other global ones, local ones."""

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
    sigma: tuple[float, float] = (0.1, 2.0)  # of the blur, in pixels at size 224; scaled for other sizes
    solarize: float = 0.2  # of the second global crop
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(value))
        if self.global_crops < 1 or self.local_crops < 0 or self.size < 1 or (self.local_crops and self.local_size < 1):
            raise BadInput(
                f"{self.global_crops} global crops of {self.size} pixels and {self.local_crops} local ones of "
                f"{self.local_size}; use at least one global crop, and sizes of at least one pixel"
            )
        for name in ("scale", "local_scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise BadInput(f"{name} is {(low, high)}; give two fractions of the area, the lower one first")

    def of(self, local: bool) -> tuple[int, int, tuple[float, float]]:
        """The number of local or global crops, their size, and their range of area."""
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
        uncropped, size = Augment(crop="none", flip=False), None if images.images is not None else crops.size
        self.base = Feed(images, batch, size, seed=seed, augment=uncropped, device=device, workers=workers)
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
        """This process's share of each batch of steps `start_step` to `stop_step` (exclusive), in `parts` pieces."""
        for images, wide, local, labels in self.drawn(start_step, stop_step, rank, world, parts):
            yield (*self.made(images, wide, local), labels)

    def drawn(self, start_step: int, stop_step: int, rank: int = 0, world: int = 1, parts: int = 1) -> Iterator[Drawn]:
        """The same batches before cropping: images, the random numbers (n, crops, 12) of the global and of the local
        crops, and labels. For a set on disk the images are crops already, flattened and concatenated as bytes."""
        count, options = self.crops.global_crops, (start_step, stop_step, rank, world, parts)
        base: Iterator[tuple[Tensor, Tensor]]
        if self.base.images.images is not None:
            base = self.base.iterate(*options)
        else:
            loaded = self.base.loaded(CropDecoder(self.crops, self.seed), *options)
            base = ((torch.cat([crops.flatten(1) for crops in views], 1), labels) for views, labels in loaded)
        for index, (images, labels) in enumerate(base, start_step * parts):
            step, piece = divmod(index, parts)
            part = share(self.base.batch, rank * parts + piece, world * parts)
            height, width = images.shape[2:] if images.ndim == 4 else (1, 1)
            tables = [self._draw(step, kind, height, width) for kind in ("global", "local")]
            # One copy to the device for both tables.
            both = _device.put(numpy.concatenate(tables, 1)[part.start : part.stop].astype(numpy.float32), self.device)
            yield images, both[:, :count], both[:, count:], labels

    def made(self, images: Tensor, wide: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
        """The global and the local crops of a batch of `drawn`."""
        crops = self.crops
        with torch.autocast(images.device.type, enabled=False):
            if images.ndim == 4:
                pixels = (images * self.base.std + self.base.mean) * 255
                return self._cropped(pixels, wide, crops.size), self._cropped(pixels, local, crops.local_size)
            first = crops.global_crops * 3 * crops.size**2
            return (
                self._coloured(images[:, :first].reshape(-1, 3, crops.size, crops.size), wide),
                self._coloured(images[:, first:].reshape(-1, 3, crops.local_size, crops.local_size), local),
            )

    def _cropped(self, pixels: Tensor, table: Tensor, size: int) -> Tensor:
        count, crops = table.shape[:2]
        if not crops:
            return pixels.new_empty(count, 0, pixels.shape[1], size, size)
        pixels = pixels[:, None].expand(-1, crops, -1, -1, -1).flatten(0, 1)
        boxes, interpolation = table.flatten(0, 1)[:, :_BOX], self.crops.interpolation
        return self._coloured(_device.crop_resize(pixels, boxes, (size, size), interpolation=interpolation), table)

    def _coloured(self, pixels: Tensor, table: Tensor) -> Tensor:
        """Bytes, or floats from 0 to 255, (n crops, channels, H, W), to normalised crops (n, crops, ...)."""
        if not table.shape[1]:
            return pixels.new_empty(len(table), 0, *pixels.shape[1:], dtype=torch.float32)
        changed = coloured(pixels.float() / 255, table.flatten(0, 1)[:, _BOX:], self._mixing)
        normalised: Tensor = ((changed - self.base.mean) / self.base.std).unflatten(0, tuple(table.shape[:2]))
        return normalised

    def _draw(self, step: int, kind: Literal["global", "local"], height: int, width: int) -> Table:
        """(batch, crops of the kind, 12): top, left, height, width, flipped, and the numbers of `_colours`."""
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
        """(count, crops, 7): factors of brightness, contrast and saturation, hue rotation, gray, sigma of the blur,
        solarize. The last two have a probability per crop."""
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
    """Crops a Pillow image at its own aspect ratio and resolution: (crops, 3, size, size), global then local."""

    crops: Crops
    seed: int

    @property
    def bytes(self) -> int:
        crops = self.crops
        return 3 * (crops.global_crops * crops.size**2 + crops.local_crops * crops.local_size**2)

    def __call__(self, image: Any, step: int, position: int) -> tuple[Pixels, ...]:
        views = []
        for local in (False, True):
            number, size, scale = self.crops.of(local)
            random = stream(VIEWS, self.seed, step, int(local), position)
            boxes = geometry(Augment(crop="resized", scale=scale), random, number, image.height, image.width)
            if number:
                views.append(numpy.stack([as_bytes(cropped(image, b, size, self.crops.interpolation)) for b in boxes]))
        return tuple(views)


@dataclass(frozen=True)
class DrawnFeed:
    """The batches of a CropFeed before cropping, for a training step that crops on the device."""

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
    """Color jitter, blur and solarization of images in [0, 1], (n, channels, H, W), by a table (n, 7).

    `mixing` is `mixing_basis` if it is on the device already.
    """
    bright, contrast, saturation, turn, gray, sigma, solar = table.unbind(1)
    if images.shape[1] == 3:
        mixing = mixing_basis(images.device) if mixing is None else mixing
        vivid = saturation.masked_fill(gray > 0.5, 0.0)
        parts = torch.stack([torch.ones_like(vivid), vivid * turn.cos(), vivid * turn.sin()], 1)
        matrix = bright[:, None, None] * torch.einsum("nk,kij->nij", parts, mixing)
        images = torch.einsum("nij,njhw->nihw", matrix, images)
        middle = torch.einsum("j,njhw->n", mixing[0, 0], images) / images[0, 0].numel()  # mean luminance
    else:
        images = images * bright[:, None, None, None]
        middle = images.mean((1, 2, 3))
    factor = contrast[:, None, None, None]
    images = (factor * images + (1 - factor) * middle[:, None, None, None]).clamp(0, 1)
    rows, columns = (_band(sigma, side) for side in images.shape[2:])
    images = rows[:, None] @ images @ columns[:, None].mT
    return torch.where((solar[:, None, None, None] > 0.5) & (images > 0.5), 1 - images, images)


def mixing_basis(device: torch.device) -> Tensor:
    """(3, 3, 3): RGB to its gray part, its chroma, and its chroma turned by a right angle, in YIQ."""
    return torch.tensor(_MIXING, dtype=torch.float32, device=device)


def _band(sigma: Tensor, size: int) -> Tensor:
    """(n, size, size): a Gaussian blur of each sigma as a matrix with rows of sum 1; the identity for sigma 0."""
    pixels = torch.arange(size, device=sigma.device, dtype=sigma.dtype)
    exponents = (pixels[:, None] - pixels).square()[None] / (2 * sigma.clamp_min(1e-3).square())[:, None, None]
    weights = torch.exp(-exponents)
    band: Tensor = weights / weights.sum(2, keepdim=True)
    return band
