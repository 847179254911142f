"""Several views of each image, made on the device: large and small crops with colours changed.

What DINO (arXiv 2104.14294) and SimCLR (arXiv 2002.05709) train on. A view of a sample is a function of (seed, step,
position, view): all numbers are drawn for the global batch before any pixel is touched, so a resumed run and any number
of processes see the same views.

    crop      a random area and aspect, resized, flipped half the time
    colour    x <- clamp(C x + c),  C of brightness, saturation and a turn of the hue in YIQ, c of contrast; or gray
    blur      a Gaussian of random width, as a product with a band matrix for rows and one for columns
    solarize  x <- 1 - x where x > 1/2
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy
import torch
from torch import Tensor

from unskip.data import _device
from unskip.data._augment import Augment, Table, geometry
from unskip.data._feed import Feed
from unskip.data._images import ImageSet
from unskip.data._order import VIEWS, share, stream
from unskip.errors import BadInput

_LUMA = (0.299, 0.587, 0.114)
_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))
_RGB = numpy.linalg.inv(numpy.array(_YIQ)).tolist()


@dataclass(frozen=True)
class Views:
    """Which views are made. Blur, for the first large one, the others and the small ones, is a chance."""

    large: int = 2
    small: int = 8
    size: int = 224
    small_size: int = 96
    scale: tuple[float, float] = (0.4, 1.0)  # share of the area, of large crops
    small_scale: tuple[float, float] = (0.05, 0.4)
    jitter: float = 0.8  # the chance that colours are changed
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    gray: float = 0.2
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)
    sigma: tuple[float, float] = (0.1, 2.0)  # of the blur, in pixels at 224; in proportion for other sizes
    solarize: float = 0.2  # of the second large view

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(value))
        if self.large < 1 or self.small < 0 or self.size < 1 or (self.small and self.small_size < 1):
            raise BadInput(
                f"{self.large} large views of {self.size} pixels and {self.small} small ones of {self.small_size}; "
                "there is one large view at least, and none is empty"
            )
        for name in ("scale", "small_scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise BadInput(f"{name} is {(low, high)}; it is two shares of the area, the lower first")


class ViewFeed:
    """Batches of (large views (n, large, channels, size, size), small views (n, small, ...), labels (n,))."""

    def __init__(
        self,
        images: ImageSet,
        batch: int,
        views: Views,
        *,
        source: int | None = None,
        seed: int = 0,
        device: str | torch.device = "cpu",
        workers: int = 0,
    ) -> None:
        """Images are brought to `source` pixels first, whole; without one they stay as the set holds them."""
        whole = Augment(crop="none", flip=False)
        self.base = Feed(images, batch, source, seed=seed, augment=whole, device=device, workers=workers)
        self.views, self.seed, self.device = views, seed, self.base.device

    @property
    def steps_per_epoch(self) -> int:
        return self.base.steps_per_epoch

    def iterate(
        self, start_step: int, stop_step: int, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The batches of the steps from `start_step` up to but without `stop_step`: this process's part of each."""
        for step, (images, labels) in enumerate(self.base.iterate(start_step, stop_step, rank, world), start_step):
            pixels = images * self.base._std + self.base._mean  # from 0 to 1
            part = share(self.base.batch, rank, world)
            made = [self._view(pixels, step, index, part) for index in range(self.views.large + self.views.small)]
            large, small = made[: self.views.large], made[self.views.large :]
            side = self.views.small_size
            none = images.new_empty(len(images), 0, images.shape[1], side, side)
            yield torch.stack(large, 1), torch.stack(small, 1) if small else none, labels

    def _view(self, pixels: Tensor, step: int, index: int, part: range) -> Tensor:
        views = self.views
        is_large = index < views.large
        size = views.size if is_large else views.small_size
        count, (height, width) = self.base.batch, pixels.shape[2:]
        random = stream(VIEWS, self.seed, step, index)
        crop = Augment(crop="resized", scale=views.scale if is_large else views.small_scale, flip=True)
        boxes = geometry(crop, random, count, height, width)[part.start : part.stop]
        drawn = self._colours(random, count, index, size)[part.start : part.stop]
        shown = _device.shown(pixels * 255, self.base._put(boxes.astype(numpy.float32)), (size, size)) / 255
        changed = coloured(shown, self.base._put(drawn.astype(numpy.float32)))
        return (changed - self.base._mean) / self.base._std

    def _colours(self, random: numpy.random.Generator, count: int, index: int, size: int) -> Table:
        """(count, 7): factors of brightness, contrast, saturation, turn of the hue, gray, width of blur, solarize."""
        views, table = self.views, numpy.zeros((count, 7))
        table[:, :3] = 1.0
        changed = random.random(count) < views.jitter
        for column, strength in enumerate((views.brightness, views.contrast, views.saturation)):
            factor = random.uniform(max(0.0, 1 - strength), 1 + strength, count)
            table[changed, column] = factor[changed]
        turn = random.uniform(-views.hue, views.hue, count) * 2 * math.pi
        table[changed, 3] = turn[changed]
        table[:, 4] = random.random(count) < views.gray
        chance = views.blur[2] if index >= views.large else views.blur[min(index, 1)]
        wide = random.uniform(*views.sigma, count) * size / 224
        table[:, 5] = numpy.where(random.random(count) < chance, wide, 0.0)
        table[:, 6] = (random.random(count) < views.solarize) & (index == 1 < views.large)
        return table


def coloured(images: Tensor, table: Tensor) -> Tensor:
    """Images from 0 to 1, (n, channels, H, W), with colours, blur and inversion as a table (n, 7) says."""
    bright, contrast, saturation, turn, gray, sigma, solar = table.unbind(1)
    if images.shape[1] == 3:
        matrix = bright[:, None, None] * _mixing(saturation, turn, gray)
        images = torch.einsum("nij,njhw->nihw", matrix, images)
        weights = images.new_tensor(_LUMA)
        middle = torch.einsum("j,njhw->n", weights, images) / images[0, 0].numel()
    else:
        images = images * bright[:, None, None, None]
        middle = images.mean((1, 2, 3))
    factor = contrast[:, None, None, None]
    images = (factor * images + (1 - factor) * middle[:, None, None, None]).clamp(0, 1)
    rows, columns = (_band(sigma, side) for side in images.shape[2:])
    images = rows[:, None] @ images @ columns[:, None].mT
    return torch.where((solar[:, None, None, None] > 0.5) & (images > 0.5), 1 - images, images)


def _mixing(saturation: Tensor, turn: Tensor, gray: Tensor) -> Tensor:
    """(n, 3, 3): what becomes of the channels."""
    there, back = saturation.new_tensor(_YIQ), saturation.new_tensor(_RGB)
    cos, sin, zero, one = turn.cos(), turn.sin(), torch.zeros_like(turn), torch.ones_like(turn)
    vivid = torch.where(gray > 0.5, 0.0, saturation)
    turned = torch.stack([one, zero, zero, zero, vivid * cos, -vivid * sin, zero, vivid * sin, vivid * cos], 1)
    return back @ turned.view(-1, 3, 3) @ there


def _band(sigma: Tensor, size: int) -> Tensor:
    """(n, size, size): a Gaussian of each width over the pixels, every row's sum 1; the identity for a width of 0."""
    places = torch.arange(size, device=sigma.device, dtype=sigma.dtype)
    far = (places[:, None] - places).square()[None] / (2 * sigma.clamp_min(1e-3).square())[:, None, None]
    weights = torch.exp(-far)
    band: Tensor = weights / weights.sum(2, keepdim=True)
    return band
