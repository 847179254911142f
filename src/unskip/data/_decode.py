"""One encoded image to pixels, within bounds: sizes are checked before anything is decoded."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, BinaryIO

import numpy
import torch
from torch import Tensor

from unskip._extras import need
from unskip.data._augment import central
from unskip.errors import BadInput

if TYPE_CHECKING:
    from PIL.Image import Image

    from unskip.data._images import Reader

MOST_PIXELS = 2**26  # of one image, 200 MB in colour; the largest of ImageNet has 61 million
MOST_BYTES = 2**28  # of one encoded image
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # of others, EPS would start Ghostscript
_GRAY = frozenset({"1", "L"})
_TURNED = frozenset({"exif", "xmp"})  # where a JPEG says that it is not upright


def decoded(reader: Reader, index: int) -> Image:
    """One image of a set, upright, of eight bits and of one channel or three."""
    return opened(lambda: BytesIO(reader.encoded(index)), lambda: reader.place(index))


def opened(source: Callable[[], BinaryIO], place: Callable[[], str]) -> Image:
    """An encoded image, upright, of eight bits and of one channel or three. BadInput names its place."""
    need("PIL")
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with source() as file, Image.open(file, formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:  # only the header has been read
                raise ValueError(f"{image.width}x{image.height} pixels; at most {MOST_PIXELS} are decoded")
            if image.format != "JPEG" or not image.info.keys().isdisjoint(_TURNED):
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I;16"):  # which convert() would clip at 255
                return Image.fromarray((numpy.asarray(image) // 257).astype(numpy.uint8))
            mode = "L" if image.mode in _GRAY else "RGB"
            image.load()
            return image.convert(mode) if image.mode != mode else image
    except Exception as error:  # a damaged file can make a decoder fail in any way
        why = "of no format that is known" if isinstance(error, UnidentifiedImageError) else error
        raise BadInput(f"{place()}: not an image that can be read ({why})") from error


def pixels(reader: Reader, index: int) -> Tensor:
    """One image of a set as bytes (1 or 3, height, width)."""
    values = torch.from_numpy(numpy.array(decoded(reader, index)))
    return values[None] if values.ndim == 2 else values.movedim(-1, 0)


def fitted(image: Tensor, out: tuple[int, int]) -> Tensor:
    """The largest central part with the aspect of `out` (height, width), resized to it."""
    height, width = image.shape[-2:]
    if (height, width) == out:
        return image
    functional = need("torchvision.transforms.v2.functional")
    top, left, tall, wide = (int(edge) for edge in central(height, width, out))
    resized: Tensor = functional.resized_crop(image, top, left, tall, wide, list(out), antialias=True)
    return resized
