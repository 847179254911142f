"""One batch to inspect a model with: from a folder of images, an .npy file, a data set, or noise.

The images depend on the source and n alone: they are evenly spread over the set or the sorted files, so a folder of
classes gives some of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from unskip._warn import warn
from unskip.data._augment import IMAGENET_MEAN, IMAGENET_STD, Interpolation, central
from unskip.data._decode import opened, pixels
from unskip.data._device import crop_resize
from unskip.data._folder import SUFFIXES
from unskip.data._sources import NAMES, open_images
from unskip.errors import BadInput


def batch(
    source: str | Path,
    n: int = 8,
    size: int | tuple[int, int] = 224,
    *,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    crop: float = 1.0,
    interpolation: Interpolation = "bilinear",
    seed: int = 0,
) -> Tensor:
    """n samples from a source: normalised images (n, channels, height, width), or entries of an array.

    A named set of `open_images`, parquet files, tar shards and hf:NAME give images of their training split; a folder is
    searched for images, then for shards. An .npy file contains images, (N, height, width[, channels]) or (N, channels,
    height, width), as bytes or floats in [0, 1]; or token ids (N, tokens); arrays of other shapes are returned
    unchanged, as float32. Images are cropped at the center, to `crop` times the largest box with the aspect ratio of
    `size`, and resized by `interpolation`. "random:N" is N images of noise, and ignores n.
    """
    if not isinstance(n, int) or n < 1:
        raise BadInput(f"n is {n!r}; a batch has at least one sample")
    sides = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, Sequence) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise BadInput(f"size is {size!r}; give one whole number of pixels, or (height, width), each 1 or more")
    text, path = str(source), Path(source)
    if text.startswith("random:"):
        return _noise(text, len(mean), *sides, seed)
    images: Tensor | list[Tensor]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        images = _read(lambda i: _image(files[i], len(mean)), len(files), n) if files else _set(text, n)
    elif path.suffix == ".npy" and path.is_file():
        images = _array(path, n)
        if images.ndim != 4 or images.shape[1] not in (1, 3):
            return images
    elif text in NAMES or text.startswith("hf:") or path.suffix in (".parquet", ".tar"):
        images = _set(text, n)
    else:
        missing = "" if path.exists() else "no such file or folder; "
        raise BadInput(
            f"{text}: {missing}a source is a folder of images, an .npy file, random:N, a set such as digits, "
            "'path/*.parquet', 'path/*.tar' or hf:NAME"
        )
    values = torch.stack([_fitted(image.float(), sides, crop, interpolation) for image in images]) / 255
    return (_as_channels(values, len(mean), source) - _by_channel(mean)) / _by_channel(std)


def _noise(text: str, channels: int, height: int, width: int, seed: int) -> Tensor:
    count = text.partition(":")[2]
    if not (count.isascii() and count.isdigit()) or int(count) < 1:
        raise BadInput(f"{text}: write random:N with a number of images, as in random:8")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(count), channels, height, width, generator=generator)


def _set(source: str, n: int) -> Tensor | list[Tensor]:
    """Images of a set as bytes, each (channels, height, width)."""
    images = open_images(source)
    reader = images.reader
    if reader is None:
        return images.load(_spread(len(images), n))
    return _read(lambda row: pixels(reader, row).expand(3, -1, -1), len(images), n)


def _read(image: Callable[[int], Tensor], total: int, n: int) -> list[Tensor]:
    """Images evenly spread over a set; the next one, with a warning, in place of one that cannot be read."""
    images = []
    for row in _spread(total, n):
        try:
            images.append(image(row))
        except BadInput as error:
            images.append(image((row + 1) % total))
            warn(f"{error}; the next image takes its place")
    return images


def _image(file: Path, channels: int) -> Tensor:
    image = opened(lambda: file.open("rb"), lambda: str(file)).convert("L" if channels == 1 else "RGB")
    values = torch.from_numpy(numpy.array(image))
    return values[None] if channels == 1 else values.movedim(-1, 0)


def _array(path: Path, n: int) -> Tensor:
    """Images (n, 1 or 3, height, width) from 0 to 255, token ids (n, tokens), or other numbers unchanged."""
    try:
        values: Any = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BadInput(f"{path}: cannot be read as an array of numbers ({error})") from error
    if not isinstance(values, numpy.ndarray):
        raise BadInput(f"{path}: contains several arrays; save one with numpy.save")
    if values.ndim == 0 or len(values) == 0 or values.dtype.kind not in "biuf":
        raise BadInput(f"{path}: {values.dtype} of shape {values.shape}; use numbers with samples along the first axis")
    chosen = values[_spread(len(values), n)]
    data = torch.from_numpy(numpy.array(chosen, dtype=values.dtype.newbyteorder("=")))
    if not data.isfinite().all():
        raise BadInput(f"{path}: some numbers are not finite; leave those samples out")
    if data.ndim == 2 and not data.is_floating_point():
        return data.long()
    if data.ndim == 3 or (data.ndim == 4 and (data.shape[-1] in (1, 3) or data.shape[1] in (1, 3))):
        bytes_ = data.dtype == torch.uint8
        images = _channels_first(data if data.ndim == 4 else data[..., None]).float() / (255 if bytes_ else 1)
        if images.min() < 0 or images.max() > 1:
            raise BadInput(
                f"{path}: images are bytes, or floats from 0 to 1; these go from {images.min()} to {images.max()}"
            )
        return 255 * images
    return data.float()


def _channels_first(images: Tensor) -> Tensor:
    """(n, height, width, 1 or 3) to (n, 1 or 3, height, width), unless channels are first already."""
    return images.movedim(-1, 1) if images.shape[1] not in (1, 3) or images.shape[-1] in (1, 3) else images


def _fitted(image: Tensor, out: tuple[int, int], crop: float, interpolation: Interpolation) -> Tensor:
    """The central part of an image (channels, height, width), resized."""
    height, width = image.shape[-2:]
    box = central(height, width, out, crop)
    if (height, width) == out and box == (0, 0, *out):
        return image
    return crop_resize(image[None], torch.tensor([[*box, 0]]), out, interpolation=interpolation)[0]


def _as_channels(images: Tensor, channels: int, source: object) -> Tensor:
    if images.shape[1] == 1 and channels == 3:
        images = images.expand(-1, 3, -1, -1)
    if images.shape[1] != channels:
        raise BadInput(f"{source}: {images.shape[1]} channels, but a mean of {channels}")
    return images


def _by_channel(values: Sequence[float]) -> Tensor:
    return torch.tensor(values)[:, None, None]


def _spread(total: int, n: int) -> list[int]:
    """At most n indices, evenly spaced."""
    n = min(n, total)
    return [i * total // n for i in range(n)]
