"""Parquet files in the Hugging Face layout: small generated ones, and real ones if they exist."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pytest
import torch
from PIL import Image, ImageOps
from pyarrow import parquet
from tests.data.files import REAL, encoded, needs_real, picture, write_parquet

from unskip.data import Augment, Feed, _parquet, absolute_source, batch, open_images
from unskip.errors import BadInput, MissingPackage

NAMES = ("cat", "dog")


def pictures(count: int, start: int = 0) -> list[bytes]:
    return [encoded(picture(start + index)) for index in range(count)]


def test_pixels_labels_and_classes(tmp_path: Path) -> None:
    write_parquet(tmp_path / "pets-train.parquet", pictures(10), [0, 1] * 5, NAMES)
    write_parquet(tmp_path / "pets-test.parquet", pictures(4, 50), [1, 0] * 2, NAMES)
    for pattern in ("pets-{split}.parquet", "pets-*.parquet", "*.parquet", "."):
        train, test = (open_images(str(tmp_path / pattern), split) for split in ("train", "test"))
        assert (len(train), len(test), train.classes, train.size) == (10, 4, NAMES, (12, 12))
        assert test.labels.tolist() == [1, 0, 1, 0]
        assert test.images is not None
        for index in range(4):
            assert (test.images[index].numpy() == numpy.array(picture(50 + index)).transpose(2, 0, 1)).all()
    assert len(open_images(str(tmp_path / "pets-{split}.parquet"), "val")) == 2  # one of each class


def test_several_files_and_other_columns(tmp_path: Path) -> None:
    for index in range(2):
        write_parquet(
            tmp_path / f"train-{index:05d}-of-00002.parquet",
            pictures(3, 3 * index),
            [index] * 3,
            None,
            ("img", "label"),
        )
    write_parquet(tmp_path / "validation-00000-of-00001.parquet", pictures(1, 9), [2], None, ("img", "label"))
    found = open_images(tmp_path)
    assert found.classes == ("0", "1", "2")  # over all splits
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.report == ("1 of 3 classes have no image: 2",)
    assert "no test split: this is the validation split" in open_images(tmp_path, "test").report


def test_gray_images_stay_gray(tmp_path: Path) -> None:
    gray = [encoded(picture(index, mode="L"), kind) for index, kind in enumerate(["PNG", "JPEG", "PNG"])]
    found = open_images(str(write_parquet(tmp_path / "x.parquet", gray, [0, 1, 0], NAMES)))
    assert found.channels == 1
    mixed = open_images(str(write_parquet(tmp_path / "y.parquet", [*gray, *pictures(1)], [0, 1, 0, 1], NAMES)))
    assert mixed.channels == 3
    assert mixed.images is not None
    assert found.images is not None
    assert torch.equal(mixed.images[:3], found.images.expand(-1, 3, -1, -1))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
def test_decoded_images_match_pillow(tmp_path: Path, kind: str) -> None:
    data = encoded(picture(0, 17, 23), kind)
    found = open_images(str(write_parquet(tmp_path / "x.parquet", [data], [0], ["one"])))
    (tmp_path / "file").write_bytes(data)
    assert found.images is not None
    assert (found.images[0].numpy() == numpy.array(Image.open(tmp_path / "file")).transpose(2, 0, 1)).all()


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_orientation_is_applied(tmp_path: Path, turn: int) -> None:

    exif = Image.Exif()
    exif[0x0112] = turn
    files = [tmp_path / "x.jpg", tmp_path / "x.png"]
    picture(0, 16, 24).resize((96, 64)).save(files[0], exif=exif, quality=100, subsampling=0)
    picture(0, 16, 24).resize((96, 64)).save(files[1], exif=exif)
    size = (64, 96) if turn < 5 else (96, 64)
    for file in files:
        found = open_images(str(write_parquet(tmp_path / "x.parquet", [file.read_bytes()], [0], ["one"])))
        assert found.images is not None
        assert found.size == size
        expected = numpy.array(ImageOps.exif_transpose(Image.open(file)))
        assert (found.images[0].numpy() == expected.transpose(2, 0, 1)).all()


def test_deep_gray_images_are_scaled_and_not_clipped(tmp_path: Path) -> None:
    deep = encoded(Image.fromarray(numpy.full((8, 8), 26214, numpy.uint16)))  # 0.4 of 65535
    found = open_images(str(write_parquet(tmp_path / "x.parquet", [deep], [0], ["one"])))
    assert found.channels == 1
    assert found.images is not None
    assert found.images.unique().tolist() == [102]


def test_images_may_be_plain_bytes(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"image": pictures(2), "label": [0, 1]}), tmp_path / "x.parquet")
    found = open_images(tmp_path)
    assert found.images is not None
    assert (found.images[1].numpy() == numpy.array(picture(1)).transpose(2, 0, 1)).all()


def test_one_file_for_all_splits(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "mine.parquet", pictures(20), [0, 1] * 10, NAMES)
    assert [len(open_images(str(file), "train")), len(open_images(str(file), "val"))] == [20, 2]
    with pytest.raises(BadInput, match=r"no test split .*train.* \{split\}"):
        open_images(str(file), "test")
    with pytest.raises(BadInput, match=r"no such files; .* \{split\}"):
        open_images(str(tmp_path / "nothing-*.parquet"))


def test_a_test_file_is_never_trained_on(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "x-test.parquet", pictures(4), [0, 1] * 2, NAMES)
    assert len(open_images(str(file), "test")) == 4
    for split in ("train", "val"):
        with pytest.raises(BadInput, match=r"no train split .*test"):
            open_images(str(file), split)  # type: ignore[arg-type]
    write_parquet(tmp_path / "other.parquet", pictures(4), [0, 1] * 2, NAMES)
    with pytest.raises(BadInput, match=r"other\.parquet: .* named after a split"):
        open_images(tmp_path, "test")


def test_sets_with_different_classes_are_not_joined(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a-train.parquet", pictures(2), [0, 1], NAMES)
    write_parquet(tmp_path / "b-train.parquet", pictures(2), [0, 1], ("hat", "cap"))
    with pytest.raises(BadInput, match=r"b-train\.parquet: .*a-train\.parquet"):
        open_images(tmp_path)


def test_rows_without_a_label_or_an_image_are_left_out_and_counted(tmp_path: Path) -> None:
    data, labels = list[bytes | None](pictures(1) * 200), list[int | None]([0, 1] * 100)
    labels[2], labels[3], labels[7], data[5], data[9] = 7, None, -3, b"\xff\xd8 not a jpeg", None
    file = str(write_parquet(tmp_path / "x.parquet", data, labels, NAMES))
    found = open_images(file)
    assert len(found) == 195
    labelled, decoded = found.report
    assert labelled.startswith("left out 3 of 200: ")
    assert "row 2: label 7 out of range" in labelled
    assert "row 3: no label" in labelled
    assert decoded.startswith("left out 2 of 197: ")
    assert "row 5: cannot be read as an image" in decoded
    labels[11] = None
    with pytest.raises(BadInput, match=r"x\.parquet, row 2: label 7 .* 4 of 200"):
        open_images(str(write_parquet(tmp_path / "x.parquet", data, labels, NAMES)))


def test_truncated_jpeg_is_broken(tmp_path: Path) -> None:
    data = encoded(picture(0, 64, 64), "JPEG")
    file = write_parquet(tmp_path / "x.parquet", [data, data[: len(data) // 2]], [0, 0], ["one"])
    assert "row 1: cannot be read as an image" in open_images(str(file)).report[0]


def test_mixed_sizes(tmp_path: Path) -> None:
    data = [*pictures(1), encoded(picture(1, 10, 14))]
    file = str(write_parquet(tmp_path / "x.parquet", data, [0, 1], NAMES))
    with pytest.raises(BadInput, match=r"row 1: 14x10 .* 12x12"):
        open_images(file)
    found = open_images(file, size=10)
    assert found.images is not None
    assert (found.images[1].numpy() == numpy.array(picture(1, 10, 14))[:, 2:12].transpose(2, 0, 1)).all()


@pytest.mark.parametrize(
    ("damage", "says"),
    [(b"", "cannot be read as a parquet file"), (b"PAR1 this is none PAR1", "cannot be read as a parquet file")],
)
def test_damaged_files(tmp_path: Path, damage: bytes, says: str) -> None:
    (tmp_path / "x.parquet").write_bytes(damage)
    with pytest.raises(BadInput, match=rf"x\.parquet: {says}"):
        open_images(tmp_path)


HUB = '{"info": {"features": %s}}'


@pytest.mark.parametrize(
    ("changes", "notes", "says"),
    [
        ({}, "{nope", "damaged metadata of the columns"),
        ({}, "[1]", "damaged metadata of the columns"),
        ({}, HUB % "[1]", "damaged metadata of the columns"),
        ({}, HUB % '{"label": {"names": 5}}', "damaged metadata of the columns"),
        ({"label": ["a", "b"]}, None, "column 'label' is string; labels are whole numbers"),
        ({"label": [0.5, 1.0]}, None, "column 'label' is double; labels are whole numbers"),
        ({"label": pyarrow.array([0, 2**63], pyarrow.uint64())}, None, "whole numbers below 2"),
        ({"label": [0, 2**62]}, None, "a label of 4611686018427387904; at most 1,048,576 classes"),
        ({"image": [1, 2]}, None, "column 'image' is int64; images are bytes"),
        ({"image": [{"path": "a"}, {"path": "b"}]}, None, "column 'image' is struct.* images are bytes"),
    ],
)
def test_columns_that_hold_something_else(
    tmp_path: Path, changes: dict[str, Any], notes: str | None, says: str
) -> None:
    table = pyarrow.table({"image": [encoded(picture(0)), encoded(picture(1))], "label": [0, 1]} | changes)
    table = table if notes is None else table.replace_schema_metadata({"huggingface": notes})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=rf"a\.parquet: .*{says}"):
        open_images(tmp_path / "a.parquet")


def test_implausibly_many_rows_are_refused(tmp_path: Path) -> None:
    """Equal labels compress so well that a file of 2 MB could use all memory."""
    rows = 2**20 + 1
    labels = pyarrow.array(numpy.zeros(rows, numpy.int64))
    parquet.write_table(
        pyarrow.table({"image": pyarrow.nulls(rows, pyarrow.binary()), "label": labels}), tmp_path / "a.parquet"
    )
    with pytest.raises(BadInput, match=r"a\.parquet: 1,048,577 rows in a file of fewer bytes"):
        open_images(tmp_path / "a.parquet")


def test_duplicate_column_names_are_refused(tmp_path: Path) -> None:
    columns = [pyarrow.array([encoded(picture(0))]), *[pyarrow.array([0])] * 2]
    parquet.write_table(pyarrow.Table.from_arrays(columns, ["image", "label", "label"]), tmp_path / "a.parquet")
    with pytest.raises(BadInput, match="2 columns are called 'label'"):
        open_images(tmp_path / "a.parquet")


def test_unsigned_labels(tmp_path: Path) -> None:
    images, labels = [encoded(picture(row)) for row in range(3)], pyarrow.array([1, None, 0], pyarrow.uint8())
    parquet.write_table(pyarrow.table({"image": images, "label": labels}), tmp_path / "a.parquet")
    assert open_images(tmp_path / "a.parquet").labels.tolist() == [1, 0]


def test_empty_and_foreign_files(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "x.parquet", [], [], NAMES)
    with pytest.raises(BadInput, match=r"x\.parquet: no images in"):
        open_images(str(file))
    file = write_parquet(tmp_path / "y.parquet", pictures(1), [0], None, ("photo", "label"))
    with pytest.raises(BadInput, match=r"y\.parquet: no column .* photo, label"):
        open_images(str(file))


def test_large_files_are_read_by_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(3):
        write_parquet(tmp_path / f"{index}.parquet", pictures(6, 6 * index), [0, 1] * 3, NAMES)
    held = open_images(tmp_path)
    monkeypatch.setattr(_parquet, "SMALL", 100)
    streamed = open_images(tmp_path)
    assert streamed.images is None
    assert streamed.place(9) == f"{tmp_path / '1.parquet'}, row 3"
    again = pickle.loads(pickle.dumps(streamed))
    for images in (streamed, again):
        for (x, y), (u, v) in zip(Feed(held, 4, 12).evaluate(), Feed(images, 4, 12).evaluate(), strict=True):
            assert torch.equal(x, u)
            assert torch.equal(y, v)
    with pytest.raises(BadInput, match="pass the size"):
        streamed.load([0])
    monkeypatch.setattr(_parquet, "MOST_GROUP", 100)
    with pytest.raises(BadInput, match=r"0\.parquet: row group 0 .* smaller"):
        open_images(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_an_image_repeated_in_all_rows_is_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    """A file of a few kB would use all memory if its dictionary were expanded to one copy per row."""
    large = encoded(picture(0, 400, 400))
    images = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 200, pyarrow.int32()), [large])
    column = pyarrow.StructArray.from_arrays([images], ["bytes"]) if nested else images
    table = pyarrow.table({"image": column, "label": [0, 1] * 100})
    parquet.write_table(table, tmp_path / "a.parquet", store_schema=False)  # so the column has plain bytes
    monkeypatch.setattr(_parquet, "SMALL", 0)
    monkeypatch.setattr(_parquet, "MOST_GROUP", 10 * len(large))
    reader: Any = open_images(tmp_path / "a.parquet").reader
    assert reader.encoded(150) == large
    assert reader.cache.bytes < 2 * len(large)


def test_sets_of_the_hub_are_read_without_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    write_parquet(folder / "train-00000-of-00001.parquet", pictures(10), [0, 1] * 5, NAMES)
    write_parquet(folder / "test-00000-of-00001.parquet", pictures(4, 50), [0, 1] * 2, NAMES)
    for split in ("train", "val", "test"):
        theirs = open_images(f"hf:{folder}", split)  # type: ignore[arg-type]
        ours = open_images(folder, split)  # type: ignore[arg-type]
        assert theirs.images is not None
        assert ours.images is not None
        assert torch.equal(theirs.images, ours.images)
        assert torch.equal(theirs.labels, ours.labels)
        assert theirs.classes == ours.classes
    assert not any(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())  # no copy
    with pytest.raises(BadInput, match=r"hf:.*nowhere: datasets cannot load it"):
        open_images(f"hf:{tmp_path / 'nowhere'}")
    (tmp_path / "loose").mkdir()
    picture(0).save(tmp_path / "loose" / "0.png")
    with pytest.raises(BadInput, match="its files are imagefolder"):
        open_images(f"hf:{tmp_path / 'loose'}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackage, match=r"pip install 'unskip\[hf\]'"):
        open_images("hf:any")


def test_a_folder_after_hf_is_recorded_as_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a run resumes from any working directory. Names on the hub are unchanged."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    sources = [absolute_source(f"hf:{name}") for name in ("mine", "mine:plain", "owner/name:plain")]
    assert sources == [f"hf:{tmp_path}/mine", f"hf:{tmp_path}/mine:plain", "hf:owner/name:plain"]


def test_a_file_with_damaged_pages(tmp_path: Path) -> None:
    """The footer with the schema is intact."""
    file = write_parquet(tmp_path / "x.parquet", pictures(4), [0, 1] * 2, NAMES)
    data = bytearray(file.read_bytes())
    data[4:200] = bytes(196)
    file.write_bytes(data)
    with pytest.raises(BadInput, match=r"x\.parquet"):
        open_images(str(file))


def test_a_folder_with_files_of_two_sets(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a-train.parquet", pictures(4), [0, 1] * 2, NAMES)
    write_parquet(tmp_path / "b-train.parquet", pictures(4), [0, 1] * 2, ["x", "y"])
    with pytest.raises(BadInput, match=r"b-train\.parquet.*different sets"):
        open_images(str(tmp_path))


@needs_real
def test_real_images() -> None:
    test = open_images(f"{REAL}/cifar10-{{split}}.parquet", "test")
    assert (len(test), test.size, test.classes[:2]) == (10_000, (32, 32), ("airplane", "automobile"))
    assert test.labels.bincount().tolist() == [1000] * 10
    pets = open_images(f"{REAL}/pets-*.parquet", "test", size=32)
    assert (len(pets), len(pets.classes), pets.size) == (736, 37, (32, 32))
    tiny = open_images(f"{REAL}/tinyimagenet100-*.parquet", "val")
    assert (len(tiny), len(tiny.classes), tiny.size) == (2000, 100, (64, 64))
    assert batch(f"{REAL}/pets-{{split}}.parquet", 4, 64).shape == (4, 3, 64, 64)


@needs_real
def test_real_images_are_normalised_and_learnable() -> None:
    """A nearest-mean classifier on the images of a feed is far above chance."""
    test = open_images(f"{REAL}/cifar10-test.parquet", "test")
    assert test.images is not None
    rest, part = test.select(range(8000)), test.select(range(8000, 10_000))
    feed = Feed(rest, 500, augment=Augment(), seed=1)
    total, count = torch.zeros(10, 3, 32, 32), torch.zeros(10)
    moments = []
    for x, y in feed.iterate(0, feed.steps_per_epoch):
        total.index_add_(0, y, x)
        count += y.bincount(minlength=10)
        moments.append((x.mean(), x.std()))
    assert abs(sum(float(mean) for mean, _ in moments) / 16) < 0.5
    assert 0.8 < sum(float(std) for _, std in moments) / 16 < 1.5
    means = (total / count[:, None, None, None]).flatten(1)
    right = sum(int((torch.cdist(x.flatten(1), means).argmin(1) == y).sum()) for x, y in Feed(part, 500).evaluate())
    assert right / 2000 > 0.2
