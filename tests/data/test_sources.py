"""Opening image sets by name and from folders: their splits, and messages for bad input."""

import gzip
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from sklearn.datasets import load_digits
from tests.data.files import picture, write_folder
from torchvision import datasets
from torchvision.transforms.v2 import functional

from unskip.data import Feed, ImageSet, _assemble, _index, batch, fingerprint, open_images
from unskip.data._splits import divided
from unskip.errors import BadInput


def test_digits_match_scikit_learn() -> None:
    train, test = open_images("digits"), open_images("digits", "test")
    assert (train.size, train.channels, train.classes) == ((8, 8), 1, tuple("0123456789"))
    assert len(train) + len(test) == 1797
    counts = test.labels.bincount()
    assert counts.min() >= 34  # a fifth of each class
    assert counts.max() <= 37
    assert train.images is not None
    assert test.images is not None
    data = load_digits()
    wanted = sorted(
        (tuple(image.flatten().tolist()), int(label)) for image, label in zip(data.images, data.target, strict=True)
    )
    both = zip(torch.cat([train.images, test.images]), torch.cat([train.labels, test.labels]), strict=True)
    got = sorted((tuple((image.flatten() / (255 / 16)).round().tolist()), int(label)) for image, label in both)
    assert got == wanted
    assert train.images.max() == 255


def test_validation_is_a_tenth_of_each_class() -> None:
    train, rest, val = open_images("digits"), open_images("digits", hold_out=True), open_images("digits", "val")
    assert len(rest) + len(val) == len(train)
    for label, count in enumerate(train.labels.bincount().tolist()):
        assert int((val.labels == label).sum()) == round(count / 10)
    assert val.split == "val"
    again = open_images("digits", "val")
    assert again.images is not None
    assert val.images is not None
    assert torch.equal(again.images, val.images)


def test_splits_are_a_partition() -> None:
    labels = torch.randint(0, 7, (300,), generator=torch.Generator().manual_seed(0))
    rest, part = divided(labels, 10)
    assert sorted(torch.cat([rest, part]).tolist()) == list(range(300))
    assert part.tolist() != sorted(range(0, 300, 10))


def test_size_resizes() -> None:
    small = open_images("digits", size=4)
    assert small.size == (4, 4)
    full = open_images("digits")
    assert small.images is not None
    assert full.images is not None
    expected = functional.resize(full.images.float(), [4, 4], antialias=True)
    assert (small.images - expected).abs().max() < 0.501  # rounded to the nearest


def write_idx(file: Path, values: numpy.ndarray[Any, Any], packed: bool = False) -> None:
    data = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()
    file.write_bytes(gzip.compress(data) if packed else data)


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    random = numpy.random.default_rng(0)
    for stem, count in (("train", 40), ("t10k", 20)):
        write_idx(
            tmp_path / f"{stem}-images-idx3-ubyte.gz", random.integers(0, 256, (count, 28, 28), numpy.uint8), True
        )
        write_idx(tmp_path / f"{stem}-labels-idx1-ubyte", (numpy.arange(count) % 10).astype(numpy.uint8))
    return tmp_path


def test_fashion_mnist_from_idx_files(fashion: Path) -> None:
    train, test = open_images("fashion-mnist", root=fashion), open_images("fashion-mnist", "test", root=fashion)
    assert (len(train), len(test), train.size, train.channels) == (40, 20, (28, 28), 1)
    assert train.classes[9] == "Ankle boot"
    assert train.labels.tolist() == [i % 10 for i in range(40)]
    assert train.images is not None
    expected = numpy.random.default_rng(0).integers(0, 256, (40, 28, 28), numpy.uint8)
    assert (train.images[:, 0].numpy() == expected).all()


def test_a_failed_download_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object, **named: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.FashionMNIST", refused)
    with pytest.raises(BadInput, match=r"fashion-mnist: not found.*no network"):
        open_images("fashion-mnist", root=tmp_path, download=True)


def test_fashion_mnist_matches_torchvision(tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    random = numpy.random.default_rng(0)
    for stem, count in (("train", 20), ("t10k", 10)):
        write_idx(raw / f"{stem}-images-idx3-ubyte", random.integers(0, 256, (count, 28, 28), numpy.uint8))
        write_idx(raw / f"{stem}-labels-idx1-ubyte", (numpy.arange(count) % 10).astype(numpy.uint8))
    ours, theirs = open_images("fashion-mnist", root=tmp_path), datasets.FashionMNIST(tmp_path)
    assert ours.images is not None
    assert torch.equal(ours.images[:, 0], theirs.data)
    assert torch.equal(ours.labels, theirs.targets)
    assert list(ours.classes) == theirs.classes


@pytest.mark.parametrize("damage", [b"", b"\0\0\x08\x01", b"\0\0\x08\x01\0\0\0\x05ab", b"\x1f\x8b\0\0"])
def test_fashion_mnist_names_a_damaged_file(fashion: Path, damage: bytes) -> None:
    for name in ("train-labels-idx1-ubyte", "train-images-idx3-ubyte.gz"):
        kept = (fashion / name).read_bytes()
        (fashion / name).write_bytes(damage)
        with pytest.raises(BadInput, match=name):
            open_images("fashion-mnist", root=fashion)
        (fashion / name).write_bytes(kept)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cifar10", "cifar-10-batches-py.*download=True"),
        ("cifar100", "cifar-100-python.*download=True"),
        ("stl10", "stl10_binary.*download=True"),
        ("fashion-mnist", r"train-images-idx3-ubyte\.gz.*/usr/share/datasets/fashion-mnist.*dataset-fashion-mnist"),
        ("imagenet", "unpack ILSVRC2012 there"),
        ("tiny-imagenet", "no wnids.txt in"),
    ],
)
def test_missing_sets_name_the_folders_that_were_searched(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=says) as caught:
        open_images(name, root=tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_cifar_through_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = numpy.random.default_rng(0)
    pixels = {name: random.integers(0, 256, (20, 3072), numpy.uint8) for name in ("data_batch_1", "test_batch")}
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name, values in pixels.items():
        (folder / name).write_bytes(pickle.dumps({"data": values, "labels": [i % 10 for i in range(20)]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [["data_batch_1", None]])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [["test_batch", None]])
    monkeypatch.setattr(datasets.CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": None})
    for split, name in (("train", "data_batch_1"), ("test", "test_batch")):
        found = open_images("cifar10", split, root=tmp_path)  # type: ignore[arg-type]
        assert found.images is not None
        assert (found.images.numpy() == pixels[name].reshape(20, 3, 32, 32)).all()
        assert found.classes == tuple("abcdefghij")


def test_stl10_through_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    values = numpy.random.default_rng(0).integers(0, 256, (20, 3, 96, 96), numpy.uint8)
    for part in ("train", "test"):
        values.tofile(folder / f"{part}_X.bin")
        (numpy.arange(20) % 10 + 1).astype(numpy.uint8).tofile(folder / f"{part}_y.bin")
    (folder / "class_names.txt").write_text("\n".join("abcdefghij") + "\n")
    monkeypatch.setattr(datasets.STL10, "train_list", [["train_X.bin", None], ["train_y.bin", None]])
    monkeypatch.setattr(datasets.STL10, "test_list", [["test_X.bin", None], ["test_y.bin", None]])
    found = open_images("stl10", root=tmp_path)
    assert found.images is not None
    assert (found.images.numpy() == values.transpose(0, 1, 3, 2)).all()  # the file holds columns
    assert found.labels.tolist() == [i % 10 for i in range(20)]


def test_folder_of_classes(tmp_path: Path) -> None:
    write_folder(tmp_path, {"dog": 20, "cat": 10})
    found = open_images(tmp_path)
    assert found.classes == ("cat", "dog")
    assert found.labels.bincount().tolist() == [10, 20]
    assert (found.images, found.size) == (None, None)
    pixels = found.load([0, 12], (16, 12))
    assert torch.equal(pixels[1], torch.from_numpy(numpy.array(picture(2, 16, 12))).movedim(-1, 0))
    assert len(open_images(tmp_path, "val")) == 3
    assert len(open_images(tmp_path, hold_out=True)) == 27
    with pytest.raises(BadInput, match=r"no test split .*train"):
        open_images(tmp_path, "test")


def test_a_small_folder_is_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, {"a": 3, "b": 2})
    held = open_images(tmp_path, size=12)
    assert held.images is not None
    assert held.images.shape == (5, 3, 12, 12)
    assert torch.equal(held.images[0], torch.from_numpy(numpy.array(picture(0, 16, 12))[2:14]).movedim(-1, 0))
    monkeypatch.setattr(_assemble, "MEMORY_LIMIT", 5 * 3 * 12 * 12 - 1)
    streamed = open_images(tmp_path, size=12)
    assert streamed.images is None
    assert "do not fit in memory" in streamed.report[0]
    assert torch.equal(streamed.load(range(5), 12), held.images)


def test_links_in_a_folder_are_followed_without_cycles(tmp_path: Path) -> None:
    write_folder(tmp_path / "elsewhere", {"b": 2})
    write_folder(tmp_path / "set", {"a": 3})
    (tmp_path / "set" / "a" / "up").symlink_to("..")
    (tmp_path / "set" / "a" / "same").symlink_to(".")
    (tmp_path / "set" / "b").symlink_to(tmp_path / "elsewhere" / "b")
    assert open_images(tmp_path / "set").labels.tolist() == [0, 0, 0, 1, 1]


def test_folder_with_splits(tmp_path: Path) -> None:
    for split, count in (("train", 4), ("validation", 2)):
        write_folder(tmp_path / split, {"a": count, "b": count})
    (tmp_path / "notes").mkdir()
    assert [len(open_images(tmp_path, split)) for split in ("train", "val", "test")] == [8, 4, 4]
    assert open_images(tmp_path, "test").report == ("no test split: this is the validation split",)
    assert "--validate" in open_images(tmp_path, "val").report[0]
    assert len(open_images(tmp_path, hold_out=True)) == 8  # it has a validation split
    assert len(open_images("imagenet", root=tmp_path)) == 8


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    write_folder(tmp_path, {"bus": 2, "train": 3})
    assert open_images(tmp_path).classes == ("bus", "train")


def test_folder_without_classes(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        picture(0).save(tmp_path / split / "0.png")
    found = open_images(tmp_path, "test")
    assert (found.classes, found.labels.tolist()) == (("images",), [0])
    assert found.report == ("no class folders: every image has label 0",)


def test_layout_of_tiny_imagenet(tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet-200"
    for name in ("n01", "n02"):
        write_folder(root / "train" / name, {"images": 3}, (64, 64))
    write_folder(root / "val", {"images": 4}, (64, 64))
    (root / "wnids.txt").write_text("n02\nn01\n")
    lines = [f"{i:03d}.png\tn0{2 - i % 2}\t0\t1\t2\t3" for i in range(4)]
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    train, val = open_images("tiny-imagenet", root=tmp_path), open_images("tiny-imagenet", "val", root=tmp_path)
    assert (len(train), train.size, train.classes) == (6, (64, 64), ("n01", "n02"))
    assert val.labels.tolist() == [1, 0, 1, 0]
    (root / "val" / "val_annotations.txt").write_text("000.png\tn07\n")
    with pytest.raises(BadInput, match=r"val_annotations\.txt: cannot be read"):
        open_images("tiny-imagenet", "val", root=tmp_path)


def test_empty_folders(tmp_path: Path) -> None:
    for inside in (tmp_path, tmp_path / "a"):
        inside.mkdir(exist_ok=True)
        (inside / "readme.txt").touch()
        with pytest.raises(BadInput, match=rf"{tmp_path}: no images in it"):
            open_images(tmp_path)


def test_a_class_missing_from_a_split(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"a": 2, "b": 2})
    write_folder(tmp_path / "test", {"b": 2})
    found = open_images(tmp_path, "test")
    assert (found.classes, found.labels.tolist()) == (("a", "b"), [1, 1])
    assert found.report == ("1 of 2 classes have no image: a",)


def test_an_image_outside_the_class_folders(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 2})
    picture(0).save(tmp_path / "stray.png")
    with pytest.raises(BadInput, match=r"stray\.png: an image outside the class folders"):
        open_images(tmp_path)


def test_a_dangling_link_is_a_broken_image(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 6, "b": 4})
    before = fingerprint(open_images(tmp_path))
    (tmp_path / "a" / "001.png").unlink()
    (tmp_path / "a" / "001.png").symlink_to(tmp_path / "gone.png")
    images = open_images(tmp_path)
    assert fingerprint(images) != before
    feed = Feed(images, 10, 12)
    assert len(next(feed.iterate(0, 1))[0]) == 10
    assert list(feed.broken) == [1]


def test_broken_images_are_left_out_in_memory(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 6, "b": 4})
    data = (tmp_path / "a" / "001.png").read_bytes()
    (tmp_path / "a" / "001.png").write_bytes(data[: len(data) // 2])
    found = open_images(tmp_path, size=12)
    assert (len(found), found.labels.tolist()) == (9, [0] * 5 + [1] * 4)
    assert found.report[0].startswith("left out 1 of 10: ")
    assert "a/001.png" in found.report[0]
    (tmp_path / "b" / "002.png").write_text("not an image")
    with pytest.raises(BadInput, match=r"a/001\.png: .* 2 of 10"):
        open_images(tmp_path, size=12)
    with pytest.raises(BadInput, match=r"b/002\.png: .*unknown format"):
        open_images(tmp_path).load([8], 12)


def test_a_set_of_broken_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").touch()
    with pytest.raises(BadInput, match="none of the 1"):
        open_images(tmp_path, size=8)


def test_a_decompression_bomb_is_not_decoded(tmp_path: Path) -> None:
    """The header declares 72 million pixels."""
    write_folder(tmp_path, {"a": 2})
    data = bytearray((tmp_path / "a" / "001.png").read_bytes())
    data[16:24] = struct.pack(">II", 9_000, 8_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    (tmp_path / "a" / "001.png").write_bytes(data)
    with pytest.raises(BadInput, match=r"a/001\.png: .*9000x8000 pixels"):
        open_images(tmp_path).load([1], 8)


def test_postscript_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would give PostScript to Ghostscript."""
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_: pytest.fail("Ghostscript is started"))
    write_folder(tmp_path, {"a": 2})
    lines = (b"%!PS-Adobe-3.0 EPSF-3.0", b"%%BoundingBox: 0 0 16 16", b"%%EndComments", b"showpage", b"")
    (tmp_path / "a" / "001.png").write_bytes(b"\n".join(lines))
    with pytest.raises(BadInput, match=r"a/001\.png: .*unknown format"):
        open_images(tmp_path).load([1], 8)


def test_a_large_folder_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_index, "KEPT_FROM", 1)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    folder = write_folder(tmp_path / "set", {"a": 3, "b/inner": 2})
    first = open_images(folder)
    (index,) = (tmp_path / "home").rglob("*.index")
    before = index.stat().st_mtime_ns
    with monkeypatch.context() as without:
        without.setattr("os.walk", None)
        again = open_images(folder)
    assert [again.place(row) for row in range(5)] == [first.place(row) for row in range(5)]
    assert torch.equal(again.labels, first.labels)
    picture(9).save(folder / "b" / "inner" / "new.png")
    assert len(open_images(folder)) == 6
    assert index.stat().st_mtime_ns > before
    index.write_bytes(b"damaged")
    assert len(open_images(folder)) == 6


def test_a_class_of_one_image_cannot_be_held_out(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 9, "b": 1})
    assert len(open_images(tmp_path)) == 10
    with pytest.raises(BadInput, match=r"b/000\.png: .* class 'b'"):
        open_images(tmp_path, "val")


def test_unknown_sources() -> None:
    with pytest.raises(BadInput, match=r"cifar11: .* nearest: cifar10"):
        open_images("cifar11")
    with pytest.raises(BadInput, match=r"split is 'dev'; .* val"):
        open_images("digits", "dev")  # type: ignore[arg-type]


def test_image_sets_are_checked() -> None:
    images, labels = torch.zeros(3, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1, 2])
    assert len(ImageSet("mine", "train", tuple("abc"), labels, images)) == 3
    with pytest.raises(BadInput, match=r"mine \(train\), image 2: label 2"):
        ImageSet("mine", "train", tuple("ab"), labels, images)
    with pytest.raises(BadInput, match="3 images and 2 labels"):
        ImageSet("mine", "train", tuple("abc"), labels[:2], images)
    with pytest.raises(BadInput, match=r"torch.float32 .* \(3, 1, 4, 4\)"):
        ImageSet("mine", "train", tuple("abc"), labels, images.float())
    with pytest.raises(BadInput, match=r"either images .* or a reader"):
        ImageSet("mine", "train", tuple("abc"), labels)


def test_batch_from_a_set() -> None:
    digits = open_images("digits")
    values = batch("digits", 4, 8, mean=(0.0,), std=(1.0,))
    assert digits.images is not None
    torch.testing.assert_close(values, digits.images[[0, 359, 719, 1078]].float() / 255)
    assert batch("digits", 4, (10, 6)).shape == (4, 3, 10, 6)
    with pytest.raises(BadInput, match=r"1 channels, .* mean of 2"):
        batch("digits", mean=(0.0, 0.0), std=(1.0, 1.0))


def test_batch_from_a_folder_an_array_and_noise(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 4, "b": 4}, (8, 8))
    values = batch(tmp_path, 2, 8, mean=(0.0,) * 3, std=(1.0,) * 3)
    torch.testing.assert_close(values[1], torch.from_numpy(numpy.array(picture(100, 8, 8))).movedim(-1, 0) / 255)
    numpy.save(tmp_path / "x.npy", numpy.arange(2 * 8 * 8, dtype=numpy.uint8).reshape(2, 8, 8))
    got = batch(tmp_path / "x.npy", 2, 8, mean=(0.0,), std=(1.0,))
    torch.testing.assert_close(got.flatten() * 255, torch.arange(128.0))
    numpy.save(tmp_path / "ids.npy", numpy.arange(6).reshape(2, 3))
    assert torch.equal(batch(tmp_path / "ids.npy", 2), torch.arange(6).reshape(2, 3))
    assert torch.equal(batch("random:3", size=8, seed=1), batch("random:3", size=8, seed=1))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nowhere", "nowhere: no such file"),
        ("random:none", "write random:N"),
        ("file.txt", r"file\.txt: a source"),
        ("words.npy", "first axis"),
        ("far.npy", "bytes, or floats"),
        ("damaged.npy", "cannot be read as an array"),
    ],
)
def test_batch_from_nothing(source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").touch()
    (tmp_path / "damaged.npy").write_bytes(b"x")
    numpy.save(tmp_path / "words.npy", numpy.array(["a", "b"]))
    numpy.save(tmp_path / "far.npy", numpy.full((2, 8, 8), 7.0))
    with pytest.raises(BadInput, match=says):
        batch(source)
