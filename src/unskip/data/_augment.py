"""What happens to training images: the settings, and the numbers drawn for one batch.

All numbers of a step are drawn for the global batch, from (seed, step), before any pixel is touched; `_device` then
turns them into pixels on any device. So a sample looks the same whichever process makes it.

    crop      "pad": a square of the shorter side, moved by up to `pad` pixels with black beyond the edge; "resized": a
              random area and aspect (Inception's crop); "center": the central square; "none": the whole image
    mixup     x = s x_i + (1 - s) x_j,  y = s y_i + (1 - s) y_j,  s ~ Beta(a, a) for every sample (arXiv 1710.09412)
    cutmix    a box of x_j in x_i, its area 1 - s before it is clipped; y follows the area (arXiv 1905.04899)
    erase     with this probability a box becomes the mean colour (arXiv 1708.04896, there with noise)

Where mixup and cutmix are both asked for, every sample takes one of them, each with probability 1/2. The partner of
position i is i ^ 1, its neighbour in the (already random) order: it lies in the same process for any even share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy
from numpy.typing import NDArray

from unskip.data._order import Rows
from unskip.errors import BadInput

Crop = Literal["pad", "resized", "center", "none"]
Interpolation = Literal["bilinear", "bicubic"]
Table = NDArray[numpy.float64]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_TRIES = 10  # boxes drawn before the central one is taken
_ERASED, _ERASED_RATIO = (0.02, 1 / 3), (0.3, 3.3)


@dataclass(frozen=True)
class Augment:
    """How training images are changed; every field goes through JSON. Evaluation uses center, mean and std alone."""

    crop: Crop = "pad"
    pad: int = 4  # pixels of the source, for crop="pad"
    scale: tuple[float, float] = (0.08, 1.0)  # share of the area, for crop="resized"
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width over height, for crop="resized"
    center: float = 1.0  # share of the shorter side that crop="center" and evaluation keep
    flip: bool = True
    mixup: float = 0.0
    cutmix: float = 0.0
    erase: float = 0.0
    randaugment: str | None = None  # "operations,magnitude" such as "2,9"; only where images are read from disk
    mean: tuple[float, ...] | None = None  # by channel, of values from 0 to 1; None: ImageNet's, or 0.5 for gray images
    std: tuple[float, ...] | None = None
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        for field in fields(self):  # JSON has no tuples
            if isinstance(value := getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(value))
        if self.crop not in get_args(Crop):
            raise BadInput(f"crop is {self.crop!r}; it can be {', '.join(get_args(Crop))}")
        if self.interpolation not in get_args(Interpolation):
            raise BadInput(f"interpolation is {self.interpolation!r}; it can be {', '.join(get_args(Interpolation))}")
        for name in ("pad", "mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name} is {getattr(self, name)!r}; it cannot be negative")
        for name, high, usual in (("scale", 1.0, "0.08, 1"), ("ratio", math.inf, "0.75, 1.33")):
            low_high: Any = getattr(self, name)
            if len(low_high) != 2 or not 0 < low_high[0] <= low_high[1] <= high:
                raise BadInput(f"{name} is {low_high!r}; it is two numbers, the lower first, as in {usual}")
        if not 0 <= self.erase <= 1:
            raise BadInput(f"erase is {self.erase!r}; it is a probability")
        if not 0 < self.center <= 1:
            raise BadInput(f"center is {self.center!r}; it is a share of the shorter side, above 0 and up to 1")
        if self.randaugment is not None:
            randaugment(self.randaugment)

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with others, which makes labels weights."""
        return self.mixup > 0 or self.cutmix > 0

    def still(self) -> Augment:
        """What is left of it at evaluation."""
        return replace(self, crop="center", flip=False, mixup=0.0, cutmix=0.0, erase=0.0, randaugment=None)


def randaugment(text: str) -> tuple[int, int]:
    """Operations and magnitude of a text such as "2,9"."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts) or int(parts[1]) > 30:
        raise BadInput(f"randaugment is {text!r}; write operations,magnitude as in '2,9' (magnitude up to 30)")
    return int(parts[0]), int(parts[1])


def normalisation(augment: Augment | None, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation by channel."""
    usual = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,) * channels, (0.5,) * channels)
    mean, std = (augment.mean or usual[0], augment.std or usual[1]) if augment else usual
    if len(mean) != channels or len(std) != channels:
        raise BadInput(f"images of {channels} channels, with a mean of {len(mean)} and a std of {len(std)}")
    if min(std) <= 0:
        raise BadInput(f"std is {std}; every channel's is above 0")
    return mean, std


def central(height: int, width: int, out: tuple[int, int], share: float = 1.0) -> tuple[float, float, float, float]:
    """The central box (top, left, height, width) with the aspect of `out`: `share` of the largest that fits."""
    side = share * min(height / out[0], width / out[1])
    tall, wide = max(1, round(side * out[0])), max(1, round(side * out[1]))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def geometry(augment: Augment | None, random: numpy.random.Generator, count: int, height: int, width: int) -> Table:
    """(count, 5): the box of the source that each image shows as top, left, height, width, and 1 where flipped."""
    table = numpy.zeros((count, 5))
    if augment is None or augment.crop == "center":
        table[:, :4] = central(height, width, (1, 1), augment.center if augment else 1.0)
    elif augment.crop == "none":
        table[:, :4] = (0, 0, height, width)
    elif augment.crop == "pad":
        side = min(height, width)
        table[:, 0] = random.integers(-augment.pad, height - side + augment.pad, count, endpoint=True)
        table[:, 1] = random.integers(-augment.pad, width - side + augment.pad, count, endpoint=True)
        table[:, 2:4] = side
    else:
        table[:, :4] = _resized(augment, random, count, height, width)
    if augment is not None and augment.flip:
        table[:, 4] = random.random(count) < 0.5
    return table


def _resized(augment: Augment, random: numpy.random.Generator, count: int, height: int, width: int) -> Table:
    area = height * width * random.uniform(*augment.scale, (count, _TRIES))
    low, high = augment.ratio
    ratio = numpy.exp(random.uniform(math.log(low), math.log(high), (count, _TRIES)))
    wide, tall = numpy.round(numpy.sqrt(area * ratio)), numpy.round(numpy.sqrt(area / ratio))
    fits = (wide >= 1) & (wide <= width) & (tall >= 1) & (tall <= height)
    rows, first = numpy.arange(count), fits.argmax(axis=1)  # the first that fits
    tall, wide, found = tall[rows, first], wide[rows, first], fits[rows, first]
    where = random.random((count, 2))
    top, left = numpy.floor(where[:, 0] * (height - tall + 1)), numpy.floor(where[:, 1] * (width - wide + 1))
    # Where none fits: the largest central box whose aspect is allowed.
    most_wide, most_tall = min(width, max(1, round(height * high))), min(height, max(1, round(width / low)))
    rest = ((height - most_tall) // 2, (width - most_wide) // 2, most_tall, most_wide)
    return numpy.where(found[:, None], numpy.stack([top, left, tall, wide], axis=1), rest)


def mixing(augment: Augment, random: numpy.random.Generator, count: int, size: int) -> Table:
    """(count, 10): share s outside the pasted box, weight of the own label, pasted box, erased box.

    Boxes are top, left, bottom, right in pixels of the output, end exclusive, and empty where there is none.
    """
    table = numpy.zeros((count, 10))
    table[:, :2] = 1.0
    if augment.mixes:
        chance = 0.5 if augment.mixup and augment.cutmix else float(augment.cutmix > 0)
        cut = random.random(count) < chance
        mixed = random.beta(augment.mixup, augment.mixup, count) if augment.mixup else numpy.ones(count)
        table[:, 0] = table[:, 1] = numpy.where(cut, 1.0, mixed)
        left_over = random.beta(augment.cutmix, augment.cutmix, count) if augment.cutmix else numpy.ones(count)
        side = size * numpy.sqrt(1 - left_over)
        boxes = _squares(random.random((count, 2)), side, size)
        table[cut, 2:6] = boxes[cut]
        table[cut, 1] = 1 - _areas(boxes[cut]) / size**2
    if augment.erase:
        erased = random.random(count) < augment.erase
        area = size**2 * random.uniform(*_ERASED, count)
        ratio = numpy.exp(random.uniform(math.log(_ERASED_RATIO[0]), math.log(_ERASED_RATIO[1]), count))
        tall = numpy.minimum(numpy.round(numpy.sqrt(area * ratio)), size)
        wide = numpy.minimum(numpy.round(numpy.sqrt(area / ratio)), size)
        where = random.random((count, 2))
        top, left = numpy.floor(where[:, 0] * (size - tall + 1)), numpy.floor(where[:, 1] * (size - wide + 1))
        table[erased, 6:] = numpy.stack([top, left, top + tall, left + wide], axis=1)[erased]
    return table


def partners(count: int) -> Rows:
    """The position that each position is mixed with; the last of an odd number takes the one before."""
    positions = numpy.arange(count) ^ 1
    if count % 2:
        positions[-1] = max(0, count - 2)
    return positions


def _squares(center: Table, side: Table, size: int) -> Table:
    middle = numpy.floor(center * size)
    half = side[:, None] // 2
    return numpy.concatenate([middle - half, middle + half], axis=1).clip(0, size)


def _areas(boxes: Table) -> Table:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
