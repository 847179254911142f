"""Encoded images to bytes: one at a time, or a whole set into memory, with what cannot be read named or counted."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, BinaryIO

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
_NAMED = 3  # of what is skipped, in a report


class MixedSizes(BadInput):
    """The images of a set differ in size, and no common one was asked for."""


def decoded(reader: Reader, index: int) -> Image:
    """One image of a set, upright, of eight bits and of one channel or three."""
    return opened(lambda: BytesIO(reader.encoded(index)), reader.place(index))


def opened(source: Callable[[], BinaryIO], place: str) -> Image:
    """An encoded image, upright, of eight bits and of one channel or three. BadInput names its place."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with source() as file, Image.open(file) as image:
            ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I;16"):  # which convert() would clip at 255
                return Image.fromarray((numpy.asarray(image) // 257).astype(numpy.uint8))
            return image.convert("L" if image.mode in _GRAY else "RGB")
    except Exception as error:  # a damaged file can make a decoder fail in any way
        why = "of no format that is known" if isinstance(error, UnidentifiedImageError) else error
        raise BadInput(f"{place}: not an image that can be read ({why})") from error


def pixels(reader: Reader, index: int) -> Tensor:
    """One image of a set as bytes (1 or 3, height, width)."""
    values = torch.from_numpy(numpy.array(decoded(reader, index)))
    return values[None] if values.ndim == 2 else values.movedim(-1, 0)


def fitted(image: Tensor, out: tuple[int, int]) -> Tensor:
    """The largest central part with the aspect of `out` (height, width), resized to it."""
    height, width = image.shape[-2:]
    if (height, width) == out:
        return image
    from torchvision.transforms.v2.functional import resized_crop

    top, left, tall, wide = (int(edge) for edge in central(height, width, out))
    resized: Tensor = resized_crop(image, top, left, tall, wide, list(out), antialias=True)
    return resized


def held(reader: Reader, size: int | None, skip_broken: bool) -> tuple[Tensor | None, list[int], tuple[str, ...]]:
    """All images as bytes (n, channels, H, W), or None where they are too many; which are kept; what was skipped.

    One channel where all images are gray, else three.
    """
    kept, broken = list[int](), list[str]()
    out = None if size is None else (size, size)
    images, gray = torch.empty(0), True
    for index in range(len(reader)):
        try:
            image = pixels(reader, index)
        except BadInput as error:
            if not skip_broken:
                raise
            broken.append(str(error))
            continue
        found = (image.shape[1], image.shape[2])
        out = out or found
        if size is None and found != out:
            raise MixedSizes(
                f"{reader.place(index)}: {found[1]}x{found[0]} pixels, and {out[1]}x{out[0]} before it; "
                "say which size to hold all of them at"
            )
        if not kept:
            if 3 * len(reader) * out[0] * out[1] > MEMORY_LIMIT:
                return None, *readable(reader, skip_broken)
            images = torch.empty(len(reader), 3, *out, dtype=torch.uint8)
        gray = gray and len(image) == 1
        images[len(kept)] = fitted(image, out)
        kept.append(index)
    if not kept:
        raise BadInput(f"{reader.place(0)}: none of the {len(reader)} images can be read")
    whole = not gray and len(kept) == len(reader)
    return images if whole else images[: len(kept), : 1 if gray else 3].clone(), kept, skipped(broken)


def readable(reader: Reader, skip_broken: bool) -> tuple[list[int], tuple[str, ...]]:
    """The images of a set on disk that are kept: all, or with skip_broken those that decode, which costs a pass."""
    if not skip_broken:
        return list(range(len(reader))), ()
    kept, broken = list[int](), list[str]()
    for index in range(len(reader)):
        try:
            pixels(reader, index)
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
    if messages and not right.any():
        raise BadInput(messages[0] + "; no other row has a right one either")
    return numpy.flatnonzero(right).tolist(), skipped(messages)


def skipped(messages: list[str]) -> tuple[str, ...]:
    """A line that counts what was skipped and names some of it."""
    if not messages:
        return ()
    more = f"; and {len(messages) - _NAMED} more" if len(messages) > _NAMED else ""
    return (f"skipped {len(messages)}: " + "; ".join(messages[:_NAMED]) + more,)
