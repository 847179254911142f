"""Named sets that fit in memory: digits, which ship with the package; Fashion-MNIST, CIFAR and STL-10 from files.

Files are only downloaded with download=True.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from unskip._extras import need
from unskip.data._images import ImageSet
from unskip.data._splits import divided
from unskip.errors import BadInput

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def digits(split: str, root: Path, download: bool) -> ImageSet:
    """1,797 handwritten digits, 8x8 and gray; a fixed fifth of each class is the test split."""
    with numpy.load(Path(__file__).with_name("digits.npz")) as data:  # its source: DIGITS.md
        images = torch.from_numpy((data["images"] * (255 / 16)).round().astype(numpy.uint8))[:, None]  # from 0..16
        labels = torch.from_numpy(data["labels"].astype(numpy.int64))
    train, test = divided(labels, 5)
    everything = ImageSet("digits", split, tuple("0123456789"), labels, images)
    return everything.select(test if split == "test" else train)


def fashion_mnist(split: str, root: Path, download: bool) -> ImageSet:
    """70,000 gray images of clothes, 28x28 (arXiv 1708.07747), from IDX files, gzipped or not."""
    if download:
        datasets = need("torchvision.datasets")
        _torchvision("fashion-mnist", root, lambda: datasets.FashionMNIST(str(root), download=True))
    stem = "t10k" if split == "test" else "train"
    folders = (root / "FashionMNIST" / "raw", root / "fashion-mnist", root, DEBIAN)
    images, labels = (idx(_find(f"{stem}-{kind}-ubyte", folders)) for kind in ("images-idx3", "labels-idx1"))
    return ImageSet("fashion-mnist", split, _FASHION, labels.long(), images[:, None])


def _find(name: str, folders: tuple[Path, ...]) -> Path:
    for folder in folders:
        for file in (folder / name, folder / f"{name}.gz"):
            if file.is_file():
                return file
    places = ", ".join(map(str, folders))
    raise BadInput(
        f"fashion-mnist: no {name} or {name}.gz in {places}; give their folder as root= or "
        "--data-root, install Debian's dataset-fashion-mnist, or download them with download=True or --download"
    )


def idx(file: Path) -> Tensor:
    """The bytes of an IDX file: two zeros, the type (8 for bytes), the number of axes, their lengths, the values."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            zero, kind, axes = struct.unpack(">HBB", opened.read(4))
            shape = struct.unpack(f">{axes}I", opened.read(4 * axes))
            data = opened.read()
    except (OSError, EOFError, struct.error) as error:
        raise BadInput(f"{file}: cannot be read as an IDX file ({error}); get the file again") from error
    if zero != 0 or kind != 8 or len(data) != numpy.prod(shape):
        raise BadInput(f"{file}: not an IDX file of bytes, or truncated; get the file again")
    return torch.from_numpy(numpy.frombuffer(data, numpy.uint8).reshape(shape).copy())


def cifar10(split: str, root: Path, download: bool) -> ImageSet:
    """60,000 images in ten classes, 32x32."""
    return _cifar("cifar10", need("torchvision.datasets").CIFAR10, split, root, download)


def cifar100(split: str, root: Path, download: bool) -> ImageSet:
    """60,000 images in a hundred classes, 32x32."""
    return _cifar("cifar100", need("torchvision.datasets").CIFAR100, split, root, download)


def _cifar(name: str, kind: Any, split: str, root: Path, download: bool) -> ImageSet:
    data = _torchvision(
        name, root / kind.base_folder, lambda: kind(str(root), train=split != "test", download=download)
    )
    images = torch.from_numpy(data.data).movedim(-1, 1).contiguous()
    return ImageSet(name, split, tuple(data.classes), torch.tensor(data.targets), images)


def stl10(split: str, root: Path, download: bool) -> ImageSet:
    """5,000 and 8,000 labelled images, 96x96."""
    STL10 = need("torchvision.datasets").STL10
    part = "test" if split == "test" else "train"
    data = _torchvision("stl10", root / STL10.base_folder, lambda: STL10(str(root), split=part, download=download))
    labels = torch.from_numpy(numpy.asarray(data.labels, dtype=numpy.int64))
    return ImageSet("stl10", split, tuple(data.classes), labels, torch.from_numpy(numpy.array(data.data)))


def _torchvision(name: str, folder: Path, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (RuntimeError, OSError) as error:
        raise BadInput(
            f"{name}: not found, or damaged, in {folder} ({error}); give its parent folder as root= or "
            "--data-root, or let torchvision download it with download=True or --download"
        ) from error


KNOWN: dict[str, Callable[[str, Path, bool], ImageSet]] = {
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "stl10": stl10,
}
