"""Encoded images to bytes: one at a time, or a whole set into memory, with what cannot be read named or counted."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from unskip.data._augment import central
from unskip.data._order import Rows
from unskip.errors import BadInput

if TYPE_CHECKING:
    from PIL.Image import Image

    from unskip.data._images import Reader

MEMORY_LIMIT = 8 * 2**30  # bytes of pixels; larger sets are read from disk
_GRAY = frozenset({"1", "L"})
_NAMED = 3  # of the images that are skipped, in a report


class MixedSizes(BadInput):
    """The images of a set differ in size, and no common one was asked for."""


def decoded(data: bytes | str | None, place: str) -> Image:
    """An image of one channel or three, from its encoded bytes or its file."""
    from PIL import Image

    if not data:
        raise BadInput(f"{place}: holds no image")
    try:
        with Image.open(BytesIO(data) if isinstance(data, bytes) else Path(data)) as opened:
            return opened.convert("L" if opened.mode in _GRAY else "RGB")
    except Exception as error:  # a damaged file can make a decoder fail in any way
        raise BadInput(f"{place}: not an image that can be read ({error})") from error


def fitted(image: Image, out: tuple[int, int]) -> Image:
    """The largest central part with the aspect of `out` (height, width), resized to it."""
    from torchvision.transforms.v2 import functional

    if (image.height, image.width) == out:
        return image
    top, left, tall, wide = (int(edge) for edge in central(image.height, image.width, out))
    resized: Image = functional.resized_crop(image, top, left, tall, wide, list(out), antialias=True)
    return resized


def held(reader: Reader, size: int | None, skip_broken: bool) -> tuple[Tensor | None, list[int], tuple[str, ...]]:
    """All images as bytes (n, channels, H, W), or None where they are too many; which are kept; what was skipped.

    One channel where all images are gray, else three.
    """
    kept, broken = list[int](), list[str]()
    out = None if size is None else (size, size)
    pixels, gray = None, True
    for index in range(len(reader)):
        try:
            image = reader.image(index)
        except BadInput as error:
            if not skip_broken:
                raise
            broken.append(str(error))
            continue
        if out is None:
            out = image.height, image.width
        elif size is None and (image.height, image.width) != out:
            raise MixedSizes(
                f"{reader.place(index)}: {image.width}x{image.height} pixels, and {out[1]}x{out[0]} before it; "
                "say which size to hold all of them at"
            )
        if pixels is None:
            if 3 * len(reader) * out[0] * out[1] > MEMORY_LIMIT:
                return None, *readable(reader, skip_broken)
            pixels = numpy.empty((len(reader), *out, 3), numpy.uint8)
        gray = gray and image.mode == "L"
        values = numpy.asarray(fitted(image, out))
        pixels[len(kept)] = values[..., None] if values.ndim == 2 else values
        kept.append(index)
    if pixels is None:
        raise BadInput(f"{reader.place(0)}: none of the {len(reader)} images can be read")
    channels_last = torch.from_numpy(pixels[: len(kept), ..., : 1 if gray else 3])
    return channels_last.movedim(-1, 1).contiguous(), kept, skipped(broken)


def readable(reader: Reader, skip_broken: bool) -> tuple[list[int], tuple[str, ...]]:
    """The images of a set on disk that are kept: all, or with skip_broken those that decode, which costs a pass."""
    if not skip_broken:
        return list(range(len(reader))), ()
    kept, broken = [], []
    for index in range(len(reader)):
        try:
            reader.image(index)
            kept.append(index)
        except BadInput as error:
            broken.append(str(error))
    if not kept:
        raise BadInput(f"{reader.place(0)}: none of the {len(reader)} images can be read")
    return kept, skipped(broken)


def in_range(reader: Reader, labels: Rows, classes: int, skip_broken: bool) -> tuple[list[int], tuple[str, ...]]:
    """The rows whose label names a class, and what was skipped; -1 stands for no label."""
    right = (labels >= 0) & (labels < classes)
    messages = [
        f"{reader.place(row)}: {'no label' if labels[row] == -1 else f'label {labels[row]} out of range'}, "
        f"and labels go from 0 to {classes - 1}"
        for row in numpy.flatnonzero(~right).tolist()
    ]
    if messages and not skip_broken:
        raise BadInput(messages[0] + "; put it right, or leave such rows out with skip_broken=True")
    return numpy.flatnonzero(right).tolist(), skipped(messages)


def skipped(messages: list[str]) -> tuple[str, ...]:
    """A line that counts what was skipped and names some of it."""
    if not messages:
        return ()
    more = f"; and {len(messages) - _NAMED} more" if len(messages) > _NAMED else ""
    return (f"skipped {len(messages)}: " + "; ".join(messages[:_NAMED]) + more,)
