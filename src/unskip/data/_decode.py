"""Decodes an image with Pillow. Sizes are checked before anything is decoded."""

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

MOST_PIXELS = 2**26  # per image, 200 MB in colour; the largest of ImageNet has 61 million
MOST_BYTES = 2**28  # per encoded image
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # others are refused: EPS would start Ghostscript
_GRAY = frozenset({"1", "L"})
_ORIENTATION = frozenset({"exif", "xmp"})  # metadata in which a JPEG stores its orientation


def decoded(reader: Reader, index: int) -> Image:
    """One image of a set as 8-bit L or RGB, upright."""
    return opened(lambda: BytesIO(reader.encoded(index)), lambda: reader.place(index))


def opened(source: Callable[[], BinaryIO], place: Callable[[], str]) -> Image:
    """Decodes an image to 8-bit L or RGB, upright. Raises BadInput, which names `place()`."""
    need("PIL")
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with source() as file, Image.open(file, formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:  # only the header has been read
                raise ValueError(f"{image.width}x{image.height} pixels; at most {MOST_PIXELS} are decoded")
            if image.format != "JPEG" or not image.info.keys().isdisjoint(_ORIENTATION):
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
                # 16 bits, which convert() would clip at 255
                return Image.fromarray((numpy.asarray(image) // 257).astype(numpy.uint8))
            if image.mode in ("I", "F"):  # of unknown range, which convert() would clip at 255
                raise ValueError("32 bits a channel; 8 and 16 bits are read")
            mode = "L" if image.mode in _GRAY else "RGB"
            image.load()
            return image.convert(mode) if image.mode != mode else image
    except Exception as error:  # decoders raise anything on damaged files
        why = "unknown format" if isinstance(error, UnidentifiedImageError) else error
        raise BadInput(f"{place()}: cannot be read as an image ({why})") from error


def pixels(reader: Reader, index: int) -> Tensor:
    """One image of a set as uint8 (1 or 3, height, width)."""
    values = torch.from_numpy(numpy.array(decoded(reader, index)))
    return values[None] if values.ndim == 2 else values.movedim(-1, 0)


def fitted(image: Tensor, out: tuple[int, int]) -> Tensor:
    """The largest central crop with the aspect ratio of `out` (height, width), resized to it."""
    height, width = image.shape[-2:]
    if (height, width) == out:
        return image
    functional = need("torchvision.transforms.v2.functional")
    top, left, tall, wide = (int(edge) for edge in central(height, width, out))
    resized: Tensor = functional.resized_crop(image, top, left, tall, wide, list(out), antialias=True)
    return resized
