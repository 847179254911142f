"""Opens sets of labelled images: named sets, folders, shards (parquet, tar), sets on the Hugging Face hub.

Without a validation split, a fixed tenth of each class of the training split is used as one, the same on every machine.
`split="train"` still includes it, unless hold_out=True. Without a test split (ImageNet), the validation split is used
for testing, and the report says so.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from unskip._checks import whole
from unskip._words import nearest
from unskip.data._documents import STDLIB
from unskip.data._folder import folder_parts, tiny_imagenet_parts
from unskip.data._hub import hub_parts
from unskip.data._images import ImageSet, resized
from unskip.data._parquet import open_parquet
from unskip.data._small import KNOWN
from unskip.data._splits import Parts, open_split, pattern_parts
from unskip.data._tar import open_tar
from unskip.errors import BadInput

Split = Literal["train", "val", "test"]
NAMES = (*KNOWN, "tiny-imagenet", "imagenet")


def open_images(
    source: str | Path,
    split: Split = "train",
    *,
    root: str | Path | None = None,
    size: int | None = None,
    hold_out: bool = False,
    download: bool = False,
) -> ImageSet:
    """Opens one split of a set of labelled images.

    `source` is digits, fashion-mnist, cifar10, cifar100, stl10, tiny-imagenet, imagenet, a folder, parquet files
    ("path/*.parquet", "name-{split}.parquet"), WebDataset shards ("path/{split}-*.tar") or hf:NAME. `root`
    is the folder of the files of named sets (default ~/.cache/unskip). With a `size` the images are decoded into
    memory, center-cropped and resized to squares; without it folders, and shards of more than 1 GiB, are read from disk
    on demand. `hold_out` removes the images of the "val" split from "train".
    """
    if split not in get_args(Split):
        raise BadInput(f"split is {split!r}; it can be {', '.join(get_args(Split))}")
    if size is not None:
        whole("open_images", "size", size, low=1)
    folder = Path(root).expanduser() if root is not None else Path.home() / ".cache" / "unskip"
    return open_split(str(source), _parts(source, folder, size, download), split, hold_out)


def absolute_source(source: str) -> str:
    """The source with absolute paths; names are unchanged."""
    path = Path(source).expanduser()
    if source in (*NAMES, STDLIB):
        return source
    if source.startswith("hf:"):  # a folder, or else a name on the hub
        name, colon, config = source.removeprefix("hf:").partition(":")
        folder = Path(name).expanduser()
        return f"hf:{folder.absolute()}{colon}{config}" if folder.is_dir() else source
    return str(path.absolute()) if path.exists() or path.parent != Path() or path.suffix else source


def _parts(source: str | Path, root: Path, size: int | None, download: bool) -> Parts:
    name, path = str(source), Path(source).expanduser()
    if name in KNOWN:
        return {split: partial(_known, name, split, root, size, download) for split in ("train", "test")}
    if name == "imagenet":
        return folder_parts(_imagenet(root), size)
    if name == "tiny-imagenet":
        return tiny_imagenet_parts(root, size)
    if name.startswith("hf:"):
        return hub_parts(name, size)
    if name.endswith(".parquet"):
        return pattern_parts(open_parquet, str(path), size)
    if name.endswith(".tar"):
        return pattern_parts(open_tar, str(path), size)
    if path.is_dir():
        for folder in (path, path / "data"):  # sets of the hub have their files in data/
            for pattern, opener in (("*.parquet", open_parquet), ("*.tar", open_tar)):
                if any(folder.glob(pattern)):
                    return pattern_parts(opener, str(folder / pattern), size)
        return folder_parts(path, size)
    raise BadInput(
        f"{name}: no such set, file or folder{nearest(name, NAMES)}; a source is {', '.join(NAMES)}, a folder of "
        "images, 'path/*.parquet', 'path/*.tar' or hf:NAME"
    )


def _known(name: str, split: str, root: Path, size: int | None, download: bool) -> ImageSet:
    images = KNOWN[name](split, root, download)
    assert images.images is not None
    return images if size is None else replace(images, images=resized(images.images, (size, size)))


def _imagenet(root: Path) -> Path:
    for folder in (root / "imagenet", root):
        if (folder / "train").is_dir() or (folder / "val").is_dir():
            return folder
    raise BadInput(
        f"imagenet: no train or val folder in {root / 'imagenet'} or {root}; unpack ILSVRC2012 there as "
        "train/CLASS/*.JPEG and val/CLASS/*.JPEG, or give its folder as root= or --data-root"
    )
