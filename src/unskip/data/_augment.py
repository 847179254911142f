"""Augmentation of training images: the settings, and the random numbers of one batch.

All numbers of a step are drawn for the global batch, from (seed, step), before any pixel is touched; `_device` applies
them on any device. So a sample does not depend on which process computes it.

    crop      "pad": a square of the shorter side, shifted by up to `pad` pixels with black beyond the edge; "resized":
              random area and aspect ratio (Inception's crop); "center": the central square; "none": the whole image
    mixup     x = s x_i + (1 - s) x_j,  y = s y_i + (1 - s) y_j,  s ~ Beta(a, a) for every sample (arXiv 1710.09412)
    cutmix    a box of x_j in x_i, its area 1 - s before it is clipped; y follows the area (arXiv 1905.04899)
    erase     with this probability a box becomes the mean colour (arXiv 1708.04896, there noise)

With both mixup and cutmix on, each sample gets one of them, with probability 1/2 each. The partner of position i is
i ^ 1, its neighbour in the (already random) order: it is in the same process if every share is even.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy
from numpy.typing import NDArray

from unskip._checks import choice, number
from unskip.data._order import Rows
from unskip.errors import BadInput

Crop = Literal["pad", "resized", "center", "none"]
Interpolation = Literal["bilinear", "bicubic"]
Table = NDArray[numpy.float64]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_TRIES = 10  # boxes drawn before falling back to the central one
_ERASED, _ERASED_RATIO = (0.02, 1 / 3), (0.3, 3.3)


@dataclass(frozen=True)
class Augment:
    """Augmentation of training images; serialisable to JSON. Evaluation uses only center, mean and std."""

    crop: Crop = "pad"
    pad: int = 4  # pixels of the source, for crop="pad"
    scale: tuple[float, float] = (0.08, 1.0)  # fraction of the area, for crop="resized"
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height, for crop="resized"
    center: float = 1.0  # fraction of the shorter side that crop="center" and evaluation keep
    flip: bool = True
    mixup: float = 0.0
    cutmix: float = 0.0
    erase: float = 0.0
    randaugment: str | None = None  # "operations,magnitude" such as "2,9"; only for images read from disk
    mean: tuple[float, ...] | None = None  # per channel, of values in [0, 1]; None: ImageNet's, or 0.5 for gray images
    std: tuple[float, ...] | None = None
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        for field in fields(self):  # JSON has no tuples
            if isinstance(value := getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(value))
        choice("augment", "crop", self.crop, get_args(Crop))
        choice("augment", "interpolation", self.interpolation, get_args(Interpolation))
        for name in ("pad", "mixup", "cutmix"):
            number("augment", name, getattr(self, name))
        number("augment", "erase", self.erase, high=1)
        number("augment", "center", self.center, high=1, zero=False)
        for name, high, usual in (("scale", 1.0, "0.08, 1"), ("ratio", math.inf, "0.75, 1.33")):
            low_high: Any = getattr(self, name)
            if len(low_high) != 2 or not 0 < low_high[0] <= low_high[1] <= high:
                raise BadInput(f"augment: {name} must be two numbers, the lower first, as in {usual}; got {low_high!r}")
        if self.randaugment is not None:
            randaugment(self.randaugment)

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs, so that labels become weights of the classes."""
        return self.mixup > 0 or self.cutmix > 0

    def still(self) -> Augment:
        """The settings for evaluation."""
        return replace(self, crop="center", flip=False, mixup=0.0, cutmix=0.0, erase=0.0, randaugment=None)


def randaugment(text: str) -> tuple[int, int]:
    """The number of operations and the magnitude from "2,9"."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() for part in parts) or int(parts[1]) > 30:
        raise BadInput(f"randaugment is {text!r}; write operations,magnitude as in '2,9' (magnitude up to 30)")
    return int(parts[0]), int(parts[1])


def normalisation(augment: Augment | None, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel."""
    usual = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,) * channels, (0.5,) * channels)
    mean, std = (augment.mean or usual[0], augment.std or usual[1]) if augment else usual
    if len(mean) != channels or len(std) != channels:
        raise BadInput(f"images of {channels} channels, but a mean of {len(mean)} and a std of {len(std)}")
    if min(std) <= 0:
        raise BadInput(f"std is {std}; every entry must be above 0")
    return mean, std


def central(height: int, width: int, out: tuple[int, int], share: float = 1.0) -> tuple[float, float, float, float]:
    """The central box (top, left, height, width) of the aspect ratio of `out`: `share` times the largest that fits."""
    side = share * min(height / out[0], width / out[1])
    tall, wide = max(1, round(side * out[0])), max(1, round(side * out[1]))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def geometry(augment: Augment | None, random: numpy.random.Generator, count: int, height: int, width: int) -> Table:
    """(count, 5): the crop of each image as top, left, height, width, and 1 if flipped."""
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
    tall, wide, any_fits = tall[rows, first], wide[rows, first], fits[rows, first]
    position = random.random((count, 2))
    top, left = numpy.floor(position[:, 0] * (height - tall + 1)), numpy.floor(position[:, 1] * (width - wide + 1))
    # If none fits: the largest central box of an allowed aspect ratio.
    most_wide, most_tall = min(width, max(1, round(height * high))), min(height, max(1, round(width / low)))
    fallback = ((height - most_tall) // 2, (width - most_wide) // 2, most_tall, most_wide)
    return numpy.where(any_fits[:, None], numpy.stack([top, left, tall, wide], axis=1), fallback)


def mixing(augment: Augment, random: numpy.random.Generator, count: int, size: int) -> Table:
    """(count, 10): share s outside the pasted box, weight of the image's own label, pasted box, erased box.

    Boxes are top, left, bottom, right in pixels of the output, end exclusive; an empty box means none.
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
        position = random.random((count, 2))
        top, left = numpy.floor(position[:, 0] * (size - tall + 1)), numpy.floor(position[:, 1] * (size - wide + 1))
        table[erased, 6:] = numpy.stack([top, left, top + tall, left + wide], axis=1)[erased]
    return table


def partners(count: int) -> Rows:
    """The partner of each position; the last of an odd number is paired with the one before it."""
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
