"""Sets of labelled images by name: well-known ones, folders, parquet files, the Hugging Face hub.

A set without a validation split has one made: a fixed tenth of each class of its training split, the same on every
machine. `split="train"` is then the whole training split, or what is left of it with hold_out=True. A set whose only
other split is called validation (ImageNet) is tested on that, and says so in its report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from unskip._words import nearest
from unskip.data._images import ImageSet, resized
from unskip.data._small import KNOWN, divided
from unskip.errors import BadInput

Split = Literal["train", "val", "test"]
HOLD_OUT_PARTS = 10
_FORMS = 'a folder of images, "path/*.parquet" or hf:NAME'


def open_images(
    source: str | Path,
    split: Split = "train",
    *,
    root: str | Path | None = None,
    size: int | None = None,
    skip_broken: bool = False,
    hold_out: bool = False,
    download: bool = False,
) -> ImageSet:
    """A set of labelled images.

    `source` is digits, fashion-mnist, cifar10, cifar100, stl10, imagenet, a folder, parquet files or hf:NAME. `root` is
    where the files of a named set lie (default ~/.cache/unskip). `size` holds the images at that size, central part,
    resized; without it a folder is read from disk as it is needed. `skip_broken` leaves out, counts and reports what
    would be an error otherwise. `hold_out` takes the images of the "val" split out of "train".
    """
    if split not in get_args(Split):
        raise BadInput(f"split is {split!r}; it can be {', '.join(get_args(Split))}")
    name = str(source)
    folder = Path(root).expanduser() if root is not None else Path.home() / ".cache" / "unskip"
    if name in KNOWN:
        found = KNOWN[name](split, folder, download)
        if size is not None and found.images is not None and found.size != (size, size):
            found = _at(found, size)
        return _held_out(found, split, hold_out)
    raise BadInput(
        f"{name}: no such set, file or folder{nearest(name, KNOWN)}; a source is {', '.join(KNOWN)}, {_FORMS}"
    )


def _at(found: ImageSet, size: int) -> ImageSet:
    from dataclasses import replace

    assert found.images is not None
    return replace(found, images=resized(found.images, (size, size)))


def _held_out(found: ImageSet, split: str, hold_out: bool) -> ImageSet:
    """`found` is the test split, or the whole training split, of a set without a validation split."""
    if split == "test" or (split == "train" and not hold_out):
        return found
    counts = found.labels.bincount(minlength=len(found.classes))
    if (counts == 1).any():
        lone = found.classes[int((counts == 1).nonzero()[0])]
        raise BadInput(f"{found.name}: class {lone!r} has one image, too few to hold some out for validation")
    kept, part = divided(found.labels, HOLD_OUT_PARTS)
    return found.select(part if split == "val" else kept, split)
