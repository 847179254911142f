"""WebDataset tars, and common tests of folders, tars and parquet files that are too large for memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.data.files import encoded, picture, write_parquet

from unskip.data import (
    Augment,
    Feed,
    ImageSet,
    _assemble,
    _index,
    _order,
    _parquet,
    _tar,
    batch,
    fingerprint,
    open_images,
)
from unskip.data._feed import usual_workers
from unskip.errors import BadInput

SIDE, COUNT, WINDOW = 10, 40, 12_000


def write_tar(file: Path, members: Iterable[tuple[str, bytes]], kind: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(file, "w", format=kind) as opened:
        for name, data in members:
            about = tarfile.TarInfo(name)
            about.size = len(data)
            opened.addfile(about, io.BytesIO(data))
    return file


def sample(index: int, label: int | None = None, name: str = "") -> list[tuple[str, bytes]]:
    name = name or f"{index:05d}"
    image = (f"{name}.png", encoded(picture(index, SIDE, SIDE)))
    return [image] if label is None else [(f"{name}.cls", str(label).encode()), image]


def write_shards(folder: Path, split: str = "train", count: int = COUNT, each: int = 8) -> str:
    folder.mkdir(exist_ok=True)
    for start in range(0, count, each):
        rows = range(start, min(start + each, count))
        write_tar(folder / f"{split}-{start:04d}.tar", [each for row in rows for each in sample(row, row % 5)])
    return str(folder / "{split}-*.tar")


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every set too large for memory, with windows of a few row groups."""
    for module in (_tar, _parquet):
        monkeypatch.setattr(module, "SMALL", 0)
    for module in (_order, _parquet):
        monkeypatch.setattr(module, "WINDOW", WINDOW)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same images as a folder, as tars and as parquet files, in the same order."""
    root = tmp_path_factory.mktemp("sources")
    images, labels = [encoded(picture(row, SIDE, SIDE)) for row in range(COUNT)], [row % 5 for row in range(COUNT)]
    for row, data in enumerate(images):
        (root / "folder" / f"{labels[row]}").mkdir(parents=True, exist_ok=True)
        (root / "folder" / f"{labels[row]}" / f"{row:05d}.png").write_bytes(data)
    (root / "parquet").mkdir()
    for start in range(0, COUNT, 16):
        part = slice(start, start + 16)
        write_parquet(root / "parquet" / f"train-{start:03d}.parquet", images[part], labels[part], list("01234"))
    tars = write_shards(root / "tar")
    return {"folder": str(root / "folder"), "tar": tars, "parquet": str(root / "parquet" / "{split}-*.parquet")}


def pixels(row: int) -> torch.Tensor:
    return torch.from_numpy(numpy.array(picture(row, SIDE, SIDE))).movedim(-1, 0)


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_every_source_yields_its_images_and_labels(kind: str, sources: dict[str, str], small_memory: None) -> None:
    images = open_images(sources[kind])
    assert images.images is None
    assert (len(images), images.classes) == (COUNT, tuple("01234"))
    rows = range(COUNT) if kind != "folder" else sorted(range(COUNT), key=lambda row: (row % 5, row))
    assert images.labels.tolist() == [row % 5 for row in rows]
    assert torch.equal(images.load(range(COUNT), SIDE), torch.stack([pixels(row) for row in rows]))
    assert torch.equal(pickle.loads(pickle.dumps(images)).load([3], SIDE), images.load([3], SIDE))
    # Each image once per epoch, with its label, in a shuffled order.
    feed = Feed(images, 8, SIDE, augment=Augment("none", flip=False, mean=(0.0,) * 3, std=(1.0,) * 3), workers=0)
    seen = [(x, int(y)) for xs, ys in feed.iterate(0, 5) for x, y in zip((xs * 255).round().byte(), ys, strict=True)]
    known = {pixels(row).numpy().tobytes(): row for row in range(COUNT)}
    order = [known[x.numpy().tobytes()] for x, _ in seen]
    assert [row % 5 for row in order] == [label for _, label in seen]
    assert sorted(order) == [*range(COUNT)]
    assert order != sorted(order)


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_batches_after_resuming_in_mid_epoch_are_equal(
    kind: str, world: int, sources: dict[str, str], small_memory: None
) -> None:
    """Bit for bit, in a newly opened set, with other numbers of processes, parts and workers."""
    augment = Augment("resized", mixup=0.8, cutmix=1.0)
    whole = [*Feed(open_images(sources[kind]), 8, 6, seed=3, augment=augment, workers=0).iterate(0, 9)]
    resumed = Feed(open_images(sources[kind]), 8, 6, seed=3, augment=augment, workers=2 if world == 1 else 0)
    parts = [[*resumed.iterate(7, 9, rank, world, parts=2 if world == 2 else 1)] for rank in range(world)]
    for place, (x, y) in enumerate(whole[7:]):
        per = len(parts[0]) // 2
        each = [batch for part in parts for batch in part[place * per : (place + 1) * per]]
        assert torch.equal(torch.cat([images for images, _ in each]), x)
        assert torch.equal(torch.cat([labels for _, labels in each]), y)


def test_row_groups_are_read_once_and_memory_is_bounded(
    sources: dict[str, str], small_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = open_images(sources["parquet"])
    reader: Any = images.reader
    read, most = list[int](), 0
    real = _parquet.ParquetReader._read

    def counted(self: Any, group: int) -> Any:
        read.append(group)
        nonlocal most
        most = max(most, self.cache.bytes)
        return real(self, group)

    monkeypatch.setattr(_parquet.ParquetReader, "_read", counted)
    list(Feed(images, 8, SIDE, workers=0).iterate(0, 5))
    assert sorted(read) == [*range(len(reader.ends))]
    assert most <= WINDOW * 1.25


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_a_changed_set_has_a_different_fingerprint(
    kind: str, sources: dict[str, str], small_memory: None, tmp_path: Path
) -> None:
    before = fingerprint(open_images(sources[kind]))
    assert fingerprint(open_images(sources[kind])) == before
    assert fingerprint(open_images(sources[kind]).select(range(COUNT - 1))) != before
    root = Path(sources[kind]) if kind == "folder" else Path(sources[kind]).parent
    file = sorted(path for path in root.rglob("*") if path.is_file())[0]
    kept, about = file.read_bytes(), file.stat()
    place = kept.index(b"IDAT") + 12
    file.write_bytes(kept[:place] + bytes([kept[place] ^ 1]) + kept[place + 1 :])  # of the same size
    assert fingerprint(open_images(sources[kind])) != before
    file.write_bytes(kept)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


def test_labels_and_names_of_tars(tmp_path: Path) -> None:
    about = json.dumps({"caption": "x", "label": 2}).encode()
    image, long = encoded(picture(0, SIDE, SIDE), "JPEG"), "d" * 90 + "/" + "n" * 200
    members = [
        ("a/b.json", about),
        ("a/b.JPEG", image),
        ("../../etc/passwd.cls", b" 1\n"),
        ("../../etc/passwd.webp", encoded(picture(1, SIDE, SIDE), "WEBP")),
        ("/abs/olute.png", encoded(picture(2, SIDE, SIDE))),
        ("/abs/olute.seg.png", b"a mask, and no image"),
        ("/abs/olute.json", about),
        ("/abs/olute.cls", b"0"),  # before .json
        (f"{long}.jpg", image),
        (f"{long}.cls", b"0"),
        ("readme.txt", b"no sample"),
    ]
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        write_tar(tmp_path / "x.tar", members, kind)
        found = open_images(tmp_path / "x.tar")
        assert (found.labels.tolist(), found.classes) == ([2, 1, 0, 0], ("0", "1", "2"))
        assert "1 samples have no image" in found.report[0]
        assert found.images is not None
        assert torch.equal(found.images[2], pixels(2))
    assert [path.name for path in tmp_path.iterdir()] == ["x.tar"]


def test_json_beside_a_label_file_is_ignored(tmp_path: Path) -> None:
    """If a sample has a .cls file, its .json may have any content."""
    notes = (b'{"label": "tench"}', b"[]", b"{" * 2000)
    members = [each for row, note in enumerate(notes) for each in (*sample(row, row), (f"{row:05d}.json", note))]
    assert open_images(write_tar(tmp_path / "x.tar", members)).labels.tolist() == [0, 1, 2]


def test_a_label_that_does_not_follow_its_image_is_refused(tmp_path: Path) -> None:
    """A tar with files in arbitrary order would otherwise be a set of one class."""
    members = sorted((each for row in range(4) for each in sample(row, row % 2)), key=lambda each: each[0][-3:])
    with pytest.raises(BadInput, match=r"no image has a label, and 4 labels have no image; .* --sort=name"):
        open_images(write_tar(tmp_path / "x.tar", members))


def test_links_are_skipped_and_sets_without_labels_have_one_class(tmp_path: Path) -> None:
    file = write_tar(tmp_path / "x.tar", [*sample(0), *sample(1)])
    with tarfile.open(file, "a") as opened:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            about = tarfile.TarInfo(f"link{kind!r}.png")
            about.type, about.linkname = kind, "/etc/passwd"
            opened.addfile(about)
    found = open_images(file)
    assert (len(found), found.classes) == (2, ("images",))
    assert "every image has label 0" in found.report[0]


def damaged(at: int, by: bytes) -> Any:
    return lambda data: data[:at] + by + data[at + len(by) :]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damaged(1024, b"\1"), r"byte 1024: not a tar header"),
        (lambda data: data[:1700], r"byte 1536: a member of .* truncated"),
        (lambda data: data[:1200], r"byte 1024: not a tar header"),
        (lambda data: data[:1536], r"byte 1536: a member"),
        (damaged(0, b"\x1f\x8b\x08\0"), r"byte 0: not a tar header"),
        (damaged(124, b"77777777777\0"), "byte 0: not a tar header"),  # the checksum no longer fits
        (damaged(512, b"four"), r"byte 512: no label in b'four"),
        (damaged(512, b"9" * 4), "a label of 9999; at most 1,000 classes"),
        (lambda data: data[:1024], "byte 1024: no zero blocks at the end"),  # between two members
        (lambda data: b"", "byte 0: no zero blocks"),
        (lambda data: bytes(1024), "no images in"),
    ],
)
def test_damaged_shards_are_named_with_the_position(
    tmp_path: Path, damage: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_assemble, "MOST_CLASSES", 1000)
    file = write_tar(tmp_path / "x.tar", [("0.cls", b"0000"), *sample(0)[:0], ("0.png", encoded(picture(0, 64, 64)))])
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(BadInput, match=rf"x\.tar.*{says}"):
        open_images(file)


def test_sizes_in_headers_are_not_trusted(tmp_path: Path) -> None:
    """Headers with a valid checksum: a size beyond the file, a size of 2**70, and one in a pax header."""
    for field in (b"77777777777\0", b"\x80" + (2**70).to_bytes(11, "big")):
        file = write_tar(tmp_path / "x.tar", sample(0, 0))
        data = bytearray(file.read_bytes())
        data[124:136] = field
        data[148:156] = b"%06o\0 " % (sum(data[:512]) - sum(data[148:156]) + 256)
        file.write_bytes(data)
        with pytest.raises(BadInput, match=r"x\.tar, byte 512: a member"):
            open_images(file)
    for records in (b"19 size=9999999999\n", b"13 size=many\n", b"12 size=many\n", b"99 size=1\n", b"x"):
        with tarfile.open(tmp_path / "x.tar", "w") as opened:
            about = tarfile.TarInfo("x")
            about.type, about.size = tarfile.XHDTYPE, len(records)
            opened.addfile(about, io.BytesIO(records))
            opened.addfile(tarfile.TarInfo("0.png"))
        with pytest.raises(BadInput, match=r"x\.tar, byte \d+: a "):
            open_images(tmp_path / "x.tar")


def test_samples_without_a_label_are_left_out(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [*sample(0, 0), *sample(1), *sample(2, 0)])
    found = open_images(tmp_path / "x.tar")
    assert len(found) == 2
    assert "no label" in found.report[0]


def test_a_shard_that_is_truncated_after_opening(tmp_path: Path, small_memory: None) -> None:
    images = open_images(write_shards(tmp_path, count=100, each=100))
    file = tmp_path / "train-0000.tar"
    os.truncate(file, (images.reader.table[99]["offset"] + 20))  # type: ignore[union-attr]
    feed = Feed(images, 10, SIDE, workers=0)
    list(feed.iterate(0, 10))
    assert list(feed.broken) == [99]
    assert "truncated" in feed.broken[99]


@pytest.mark.parametrize("writable", [True, False])
def test_an_index_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool) -> None:
    """It is written beside the shards, or in the cache folder if that fails."""
    monkeypatch.setattr(_index, "KEPT_FROM", 1)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    source = write_shards(tmp_path / "set")
    if not writable:  # file permissions do not stop root
        real = _index._write

        def refused(file: Path, index: Any) -> None:
            if file.parent == tmp_path / "set":
                raise OSError("read-only")
            real(file, index)

        monkeypatch.setattr(_index, "_write", refused)
    first = open_images(source)
    (index,) = tmp_path.rglob("*.index")
    assert (index.parent == tmp_path / "set") == writable
    with monkeypatch.context() as without:
        without.setattr(_tar, "list_shard", None)
        assert torch.equal(open_images(source).labels, first.labels)
    write_tar(tmp_path / "set" / "train-0000.tar", sample(0, 4))  # another shard with this name
    assert len(open_images(source)) == COUNT - 7


def test_shards_are_indexed_in_parallel(tmp_path: Path, small_memory: None) -> None:
    source = write_shards(tmp_path)
    many: ImageSet = open_images(source)  # SMALL is 0: by processes
    assert torch.equal(many.load(range(COUNT), SIDE), torch.stack([pixels(row) for row in range(COUNT)]))
    (tmp_path / "train-0008.tar").write_bytes(b"x" * 2000)
    with pytest.raises(BadInput, match=r"^\S*train-0008\.tar, byte 0: not a tar header"):
        open_images(source)


def test_processes_of_a_launcher_divide_the_cores(
    tmp_path: Path, small_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process indexes the shards and opens a feed."""
    source, real, asked = write_shards(tmp_path), _tar.DataLoader, list[int]()

    def counted(*args: Any, num_workers: int, **options: Any) -> Any:
        asked.append(num_workers)
        return real(*args, num_workers=0, **options)

    monkeypatch.setattr(_tar, "DataLoader", counted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    open_images(source)
    assert asked == [3]
    assert usual_workers(1000) == 3


def test_splits_of_tars(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write_shards(tmp_path, "val", 10)
    for source in (tmp_path, tmp_path / "*.tar", tmp_path / "{split}-*.tar"):
        assert [len(open_images(source, split)) for split in ("train", "val", "test")] == [COUNT, 10, 10]  # type: ignore[arg-type]
        assert batch(source, 4, SIDE).shape == (4, 3, SIDE, SIDE)
