"""One batch from a source, for looking at a model: a folder of images, an .npy file, a set of images, or noise.

Which images are taken is a function of the source and n alone: evenly spread over the set or the sorted files, so that
a folder of classes gives some of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from unskip.data._augment import IMAGENET_MEAN, IMAGENET_STD
from unskip.data._decode import opened
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
    seed: int = 0,
) -> Tensor:
    """n samples from a source: images (n, channels, height, width), normalised, or what an array of numbers holds.

    A set that `open_images` knows by name, parquet files and hf:NAME give images of their training split, resized by
    their shorter side and cropped at the centre. A folder is searched for images, resized and cropped likewise. An
    .npy file holds images, (N, height, width[, channels]) or (N, channels, height, width), of bytes or of floats in
    [0, 1], which are stretched to that size; or token ids (N, tokens); arrays of other shapes are taken as they are.
    "random:N" is N images of noise, whatever n. `crop` is the share of the shorter side that the central crop keeps.
    """
    if not isinstance(n, int) or n < 1:
        raise BadInput(f"n is {n!r}; a batch holds at least one sample")
    sides = (size, size) if isinstance(size, int) else tuple(size) if isinstance(size, Sequence) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise BadInput(f"size is {size!r}; it is one whole number of pixels, or (height, width), of at least one each")
    height, width = sides
    text = str(source)
    if text.startswith("random:"):
        return _noise(text, len(mean), height, width, seed)
    path = Path(source)
    if path.is_dir():
        return _folder(path, n, height, width, mean, std, crop)
    if path.suffix == ".npy" and path.is_file():
        return _array(path, n, height, width, mean, std)
    if text in NAMES or text.startswith("hf:") or path.suffix == ".parquet":
        return _set(text, n, height, width, mean, std, crop)
    missing = "" if path.exists() else "no such file or folder; "
    raise BadInput(
        f"{text}: {missing}a source is a folder of images, an .npy file, random:N, a set such as digits, "
        "'path/*.parquet' or hf:NAME"
    )


def _noise(text: str, channels: int, height: int, width: int, seed: int) -> Tensor:
    count = text.partition(":")[2]
    if not (count.isascii() and count.isdigit()) or int(count) < 1:
        raise BadInput(f"{text}: write random:N with a number of images, as in random:8")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(count), channels, height, width, generator=generator)


def _set(
    source: str, n: int, height: int, width: int, mean: Sequence[float], std: Sequence[float], crop: float
) -> Tensor:
    found = open_images(source)
    tall, wide = round(height / crop), round(width / crop)
    top, left = (tall - height) // 2, (wide - width) // 2
    whole = found.load(_spread(len(found), n), (tall, wide))
    images = whole[:, :, top : top + height, left : left + width].float() / 255
    return _normalised(_as_channels(images, len(mean), source), mean, std)


def _as_channels(images: Tensor, channels: int, place: object) -> Tensor:
    if images.shape[1] == 1 and channels == 3:
        images = images.expand(-1, 3, -1, -1)
    if images.shape[1] != channels:
        raise BadInput(f"{place}: {images.shape[1]} channels, and a mean of {channels}")
    return images


def _folder(
    path: Path, n: int, height: int, width: int, mean: Sequence[float], std: Sequence[float], crop: float
) -> Tensor:
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise BadInput(f"{path}: no images in it (looked for {', '.join(sorted(SUFFIXES))})")
    chosen = [files[i] for i in _spread(len(files), n)]
    return _normalised(torch.stack([_image(file, height, width, len(mean), crop) for file in chosen]), mean, std)


def _image(file: Path, height: int, width: int, channels: int, crop: float) -> Tensor:
    from PIL import Image, ImageOps

    image = opened(lambda: file.open("rb"), lambda: str(file)).convert("L" if channels == 1 else "RGB")
    pixels = torch.from_numpy(
        numpy.array(ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC, (1 - crop) / 2))
    )
    return (pixels[None] if channels == 1 else pixels.movedim(-1, 0)) / 255


def _array(path: Path, n: int, height: int, width: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    try:
        values: Any = numpy.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BadInput(f"{path}: not an array of numbers that can be read ({error})") from error
    if not isinstance(values, numpy.ndarray):
        raise BadInput(f"{path}: not an array of numbers that can be read (several arrays in one file)")
    if values.ndim == 0 or len(values) == 0 or values.dtype.kind not in "biuf":
        raise BadInput(
            f"{path}: holds {values.dtype} of shape {values.shape}; samples of numbers lie along the first axis"
        )
    chosen = values[_spread(len(values), n)]
    data = torch.from_numpy(numpy.array(chosen, dtype=values.dtype.newbyteorder("=")))
    if not data.isfinite().all():
        raise BadInput(f"{path}: holds numbers that are not finite; leave those samples out")
    if data.ndim == 2 and not data.is_floating_point():
        return data.long()
    if data.ndim == 3 or (data.ndim == 4 and (data.shape[-1] in (1, 3) or data.shape[1] in (1, 3))):
        bytes_ = data.dtype == torch.uint8
        images = _channels_first(data if data.ndim == 4 else data[..., None]).float() / (255 if bytes_ else 1)
        if images.min() < 0 or images.max() > 1:
            raise BadInput(
                f"{path}: images hold bytes, or floats from 0 to 1; these go from {images.min()} to {images.max()}"
            )
        return _normalised(_resized(_as_channels(images, len(mean), path), height, width), mean, std)
    return data.float()


def _channels_first(images: Tensor) -> Tensor:
    """(n, height, width, 1 or 3) as (n, 1 or 3, height, width), where they are not so already."""
    return images.movedim(-1, 1) if images.shape[1] not in (1, 3) or images.shape[-1] in (1, 3) else images


def _resized(images: Tensor, height: int, width: int) -> Tensor:
    if images.shape[-2:] == (height, width):
        return images
    return torch.nn.functional.interpolate(images, (height, width), mode="bicubic", antialias=True).clamp(0, 1)


def _normalised(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    return (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def _spread(total: int, n: int) -> list[int]:
    """At most n indices, evenly spread."""
    n = min(n, total)
    return [i * total // n for i in range(n)]
