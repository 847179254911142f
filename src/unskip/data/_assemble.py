"""From a reader and labels to a set: held in memory where it is small, read as needed where it is not.

Up to 1 + n / 100 of n images may be broken or without a label: they are left out, counted and named in the set's
report. More than that is an error.
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
MOST_CLASSES = 2**20  # a name is held for each
SMALL = 2**30  # bytes of encoded images: smaller shards are decoded once, on opening
_CHUNK = 1024  # images that are decoded at a time
_NAMED = 3  # of what is left out, in a report


class MixedSizes(BadInput):
    """The images of a set differ in size, and no common one was asked for."""


def allowed(images: int) -> int:
    """How many images of a set may be broken."""
    return 1 + images // 100


def numbered(name: str, most: int) -> tuple[str, ...]:
    """Names of classes that have only numbers, up to `most`."""
    if most >= MOST_CLASSES:
        raise BadInput(f"{name}: a label of {most}; at most {MOST_CLASSES:,} classes are known by their numbers")
    return tuple(map(str, range(most + 1)))


def assembled(
    name: str,
    split: str,
    classes: tuple[str, ...],
    labels: Rows,
    reader: Reader,
    *,
    size: int | None,
    hold: bool,
    report: Sequence[str] = (),
) -> ImageSet:
    """The set of a reader's images with a label, -1 standing for none.

    With `hold` they are decoded into memory, at `size` or at their own common size, if the pixels fit there.
    """
    if not len(reader):
        raise BadInput(f"{name}: no images in its {split} split")
    lines = list(report)
    wrong = (labels < 0) | (labels >= len(classes))
    if wrong.any():
        messages = [
            f"{reader.place(row)}: {'no label' if labels[row] == -1 else f'label {labels[row]} out of range'}, "
            f"and labels go from 0 to {len(classes) - 1}"
            for row in numpy.flatnonzero(wrong)[: max(_NAMED, 1)].tolist()
        ]
        lines.append(_left_out(messages, int(wrong.sum()), len(labels)))
        reader, labels = reader.select(numpy.flatnonzero(~wrong)), labels[~wrong]
    images = None
    if hold:
        images, kept, broken = _held(reader, size)
        if broken:
            lines.append(_left_out(broken, len(broken), len(reader)))
            labels = labels[kept]
        if images is None:
            lines.append(f"{len(reader)} images do not fit in memory: they are read from disk")
    counts = numpy.bincount(labels, minlength=len(classes))
    missing = [name for name, count in zip(classes, counts, strict=True) if not count]
    if missing:
        lines.append(f"{len(missing)} of {len(classes)} classes have no image: {', '.join(missing[:_NAMED])}")
    found = torch.from_numpy(labels.astype(numpy.int64))
    return ImageSet(name, split, classes, found, images, tuple(lines), reader if images is None else None)


def _held(reader: Reader, size: int | None) -> tuple[Tensor | None, list[int], list[str]]:
    """All images as bytes (n, channels, H, W), or None where they are too many; which are kept; what is broken.

    One channel where all images are gray, else three.
    """
    kept, broken = list[int](), list[str]()
    out = None if size is None else (size, size)
    images, gray = torch.empty(0), True
    for index, image in enumerate(_decoded(reader, size)):
        if isinstance(image, str):
            broken.append(image)
            continue
        found = (image.shape[1], image.shape[2])
        out = out or found
        if found != out:
            raise MixedSizes(
                f"{reader.place(index)}: {found[1]}x{found[0]} pixels, and {out[1]}x{out[0]} before it; "
                "say which size to hold all of them at"
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
    whole = not gray and len(kept) == len(reader)
    return images if whole else images[: len(kept), : 1 if gray else 3].clone(), kept, broken


def _decoded(reader: Reader, size: int | None) -> Iterator[Tensor | str]:
    """The images in order, decoded by threads, which Pillow lets run side by side; a message for a broken one."""
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
    """A line that counts what is left out and names some of it."""
    if count > allowed(total) or count == total:
        raise BadInput(f"{messages[0]}; {count} of {total} images are like that, and {allowed(total)} may be")
    more = f"; and {count - _NAMED} more" if count > _NAMED else ""
    return f"left out {count} of {total}: " + "; ".join(messages[:_NAMED]) + more
