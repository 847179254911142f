"""Builds an image set from a reader and labels: small sets are decoded into memory, large ones read from disk.

Up to 1 + n / 100 of n images may be broken or unlabelled: they are left out, counted and named in the set's report.
More is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy
import torch
from torch import Tensor

from unskip.data._decode import fitted, pixels
from unskip.data._images import ImageSet, Reader
from unskip.data._order import Rows
from unskip.errors import BadInput

MEMORY_LIMIT = 8 * 2**30  # bytes of pixels; larger sets are read from disk
MOST_CLASSES = 2**20  # each has a name in memory
SMALL = 2**30  # bytes of encoded images; smaller shards are decoded once, on opening
_CHUNK = 1024  # images decoded at a time
_NAMED = 3  # examples in a line of the report


class MixedSizes(BadInput):
    """The images of a set differ in size, and no size was passed."""


def allowed(images: int) -> int:
    """How many images of a set may be broken."""
    return 1 + images // 100


def numbered(name: str, most: int) -> tuple[str, ...]:
    """Class names "0" to `most`, for labels without names."""
    if most >= MOST_CLASSES:
        raise BadInput(f"{name}: a label of {most}; at most {MOST_CLASSES:,} classes can go without names")
    return tuple(map(str, range(most + 1)))


def assembled(
    name: str,
    split: str,
    classes: tuple[str, ...],
    labels: Rows,
    reader: Reader,
    *,
    size: int | None,
    in_memory: bool,
    report: Sequence[str] = (),
) -> ImageSet:
    """The labelled images of a reader as a set; a label of -1 means none.

    With `in_memory` they are decoded into memory, at `size` or at their common size, if the pixels fit.
    """
    if not len(reader):
        raise BadInput(f"{name}: no images in its {split} split")
    lines = list(report)
    wrong = (labels < 0) | (labels >= len(classes))
    if wrong.any():
        messages = [
            f"{reader.place(row)}: {'no label' if labels[row] == -1 else f'label {labels[row]} out of range'} "
            f"(labels go from 0 to {len(classes) - 1})"
            for row in numpy.flatnonzero(wrong)[:_NAMED].tolist()
        ]
        lines.append(_left_out(messages, int(wrong.sum()), len(labels)))
        reader, labels = reader.select(numpy.flatnonzero(~wrong)), labels[~wrong]
    images = None
    if in_memory:
        images, kept, broken = _decode_all(reader, size)
        if broken:
            lines.append(_left_out(broken, len(broken), len(reader)))
            labels = labels[kept]
        if images is None:
            lines.append(f"{len(reader)} images do not fit in memory: they are read from disk")
    counts = numpy.bincount(labels, minlength=len(classes))
    missing = [name for name, count in zip(classes, counts, strict=True) if not count]
    if missing:
        lines.append(f"{len(missing)} of {len(classes)} classes have no image: {', '.join(missing[:_NAMED])}")
    targets = torch.from_numpy(labels.astype(numpy.int64))
    return ImageSet(name, split, classes, targets, images, tuple(lines), reader if images is None else None)


def _decode_all(reader: Reader, size: int | None) -> tuple[Tensor | None, list[int], list[str]]:
    """Images as bytes (n, channels, H, W), or None if they exceed MEMORY_LIMIT; their indices; messages on broken ones.

    One channel if all images are gray, else three.
    """
    kept, broken = list[int](), list[str]()
    out = None if size is None else (size, size)
    images, gray = torch.empty(0), True
    for index, image in enumerate(_decoded(reader, size)):
        if isinstance(image, str):
            broken.append(image)
            continue
        shape = (image.shape[1], image.shape[2])
        out = out or shape
        if shape != out:
            raise MixedSizes(
                f"{reader.place(index)}: {shape[1]}x{shape[0]} pixels, but earlier images have {out[1]}x{out[0]}; "
                "give size=, or --size"
            )
        if not kept:
            if 3 * len(reader) * out[0] * out[1] > MEMORY_LIMIT:
                return None, [], []
            images = torch.empty(len(reader), 3, *out, dtype=torch.uint8)
        gray = gray and len(image) == 1
        images[len(kept)] = image
        kept.append(index)
    if not kept:
        raise BadInput(f"{broken[0]}; none of the {len(reader)} images can be read")
    full = not gray and len(kept) == len(reader)
    return images if full else images[: len(kept), : 1 if gray else 3].clone(), kept, broken


def _decoded(reader: Reader, size: int | None) -> Iterator[Tensor | str]:
    """The images in order, decoded by threads (Pillow releases the GIL); for a broken one, a message."""
    with ThreadPoolExecutor() as threads:
        for start in range(0, len(reader), _CHUNK):
            yield from threads.map(partial(_one, reader, size), range(start, min(start + _CHUNK, len(reader))))


def _one(reader: Reader, size: int | None, index: int) -> Tensor | str:
    try:
        image = pixels(reader, index)
    except BadInput as error:
        return str(error)
    return image if size is None else fitted(image, (size, size))


def _left_out(messages: Sequence[str], count: int, total: int) -> str:
    """The line of the report that counts and names what is left out. Raises if it is too much."""
    if count > allowed(total) or count == total:
        raise BadInput(f"{messages[0]}; {count} of {total} images are unusable, and at most {allowed(total)} may be")
    more = f"; and {count - _NAMED} more" if count > _NAMED else ""
    return f"left out {count} of {total}: " + "; ".join(messages[:_NAMED]) + more
