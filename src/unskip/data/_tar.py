"""WebDataset shards: tar files in which adjacent members of one stem, such as 0001.jpg and 0001.cls, are a sample.

The image is .jpg, .jpeg, .png or .webp; the label is the whole number in .cls, or else under "label" in .json. Shards
are not unpacked: an index of offsets is built once, and images are read in place. Member names are only keys, never
paths; links and devices are skipped. A set without any label is one class.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy
from torch.utils.data import DataLoader, Dataset

from unskip.data._assemble import SMALL, assembled, numbered
from unskip.data._decode import MOST_BYTES
from unskip.data._images import ImageSet, Reader, samples
from unskip.data._index import Index, shard_index
from unskip.data._loader import cores, same
from unskip.data._order import Rows
from unskip.errors import BadInput

_BLOCK = 512
_IMAGES, _LABELS = (b"jpg", b"jpeg", b"png", b"webp"), (b"cls", b"json")
_MOST = 2**20  # bytes of a label, or of an extended header
_ROW = numpy.dtype([("offset", "<i8"), ("size", "<i4"), ("shard", "<i4")])


@dataclass(frozen=True, eq=False)
class TarReader(Reader):
    """Images of several shards, by shard and offset."""

    files: tuple[str, ...]
    table: Any  # (images,) of _ROW

    def __len__(self) -> int:
        return len(self.table)

    def place(self, index: int) -> str:
        return f"{self.files[self.table[index]['shard']]}, byte {self.table[index]['offset']}"

    def encoded(self, index: int) -> bytes:
        offset, size, shard = self.table[index].tolist()
        with FileIO(self.files[shard]) as opened:
            data = os.pread(opened.fileno(), size, offset)
        if len(data) < size:
            raise OSError(f"{len(data)} of {size} bytes; the shard is truncated")
        return data

    def select(self, rows: Rows) -> TarReader:
        return replace(self, table=self.table[rows])

    def identity(self) -> Iterator[bytes]:
        yield from samples(self.files)
        yield self.table.tobytes()


def open_tar(name: str, split: str, splits: Mapping[str, Sequence[str]], size: int | None) -> ImageSet:
    """One split of a set of shards; the classes are those of all splits."""
    indices = {part: shard_index(files, _listed) for part, files in splits.items()}
    most = max(int(index.arrays["labels"].max(initial=-1)) for index in indices.values())
    arrays = indices[split].arrays
    table = numpy.empty(len(arrays["labels"]), _ROW)
    for field in ("offset", "size", "shard"):
        table[field] = arrays[field]
    report = list[str]()
    without_image, labels_alone = arrays["alone"].tolist()
    if without_image:
        report.append(f"{without_image} samples have no image ({', '.join(kind.decode() for kind in _IMAGES)})")
    labels, classes = arrays["labels"], numbered(name, most)
    if most < 0:
        if labels_alone:
            raise BadInput(
                f"{name}: no image has a label, and {labels_alone} labels have no image; an image and its label must "
                "be adjacent in a shard, as tar --sort=name puts them"
            )
        labels, classes = numpy.zeros_like(labels), ("images",)
        report.append("no labels (.cls, or label in .json): every image has label 0")
    in_memory = size is not None or int(arrays["size"].sum(dtype=numpy.int64)) <= SMALL
    reader = TarReader(tuple(splits[split]), table)
    return assembled(name, split, classes, labels, reader, size=size, in_memory=in_memory, report=report)


def _listed(files: Sequence[str]) -> Index:
    """The samples of all shards, listed by several processes if the shards are large."""
    workers = min(len(files), cores()) if sum(Path(file).stat().st_size for file in files) > SMALL else 0
    tables, alone = list[Rows](), numpy.zeros(2, numpy.int64)
    shards: DataLoader[Any] = DataLoader(_Shards(files), batch_size=None, num_workers=workers, collate_fn=same)
    for shard, listed in enumerate(shards):
        if isinstance(listed, str):
            raise BadInput(listed)
        rows, counts = listed
        tables.append(numpy.column_stack([rows, numpy.full(len(rows), shard)]))
        alone += counts
    table = numpy.concatenate(tables)
    arrays = {"offset": table[:, 0].copy(), "labels": table[:, 2].copy(), "alone": alone}
    arrays |= {"size": table[:, 1].astype(numpy.int32), "shard": table[:, 3].astype(numpy.int32)}
    return Index(arrays, {})


@dataclass(frozen=True)
class _Shards(Dataset[Any]):
    files: Sequence[str]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, shard: int) -> Any:
        try:
            return list_shard(self.files[shard])
        except (BadInput, OSError) as error:  # DataLoader would wrap a worker's exception in its traceback
            return str(error)


def list_shard(file: str) -> tuple[Rows, Rows]:
    """(samples, 3): offset and size of the image, and label, -1 for none; and (2,): the number of samples without an
    image, and how many of those have a label."""
    rows, alone = list[tuple[int, int, int]](), numpy.zeros(2, numpy.int64)
    with FileIO(file) as opened:
        for key, members in groupby(_keyed(file, opened.fileno()), lambda member: member[0]):
            places = dict[bytes, tuple[int, int]]()  # the first member of each kind
            for _, kind, offset, size in members:
                places.setdefault(kind, (offset, size))
            image = next((place for kind, place in places.items() if kind in _IMAGES), None)
            label = next((kind for kind in _LABELS if kind in places), None)
            if image is None:
                alone += (bool(key), label is not None)
                continue
            if image[1] > MOST_BYTES:
                raise BadInput(f"{file}, byte {image[0]}: an image of {image[1]} bytes; at most {MOST_BYTES} are read")
            rows.append((*image, -1 if label is None else _label(file, label, opened.fileno(), *places[label])))
    return numpy.array(rows, numpy.int64).reshape(-1, 3), alone


def _keyed(file: str, descriptor: int) -> Iterator[tuple[bytes, bytes, int, int]]:
    """Key, kind, offset and size of each member. The key is the name up to the first dot after the last slash."""
    for name, offset, size in _members(file, descriptor):
        folder, slash, base = name.rpartition(b"/")
        stem, _, kind = base.partition(b".")
        yield folder + slash + stem, kind.lower(), offset, size


def _label(file: str, kind: bytes, descriptor: int, offset: int, size: int) -> int:
    text = os.pread(descriptor, min(size, _MOST), offset)
    try:
        label = int(text) if kind == b"cls" else json.loads(text).get("label", -1)
        if type(label) is int and -1 <= label < 2**31:
            return label
    except (ValueError, AttributeError, RecursionError):
        pass
    raise BadInput(
        f"{file}, byte {offset}: no label in {text[:20]!r}; .cls is a whole number, and .json has one under 'label'"
    )


def _members(file: str, descriptor: int) -> Iterator[tuple[bytes, int, int]]:
    """Name, offset and size of each regular file in a tar of the ustar, GNU or pax format."""
    end, at = os.fstat(descriptor).st_size, 0
    extended: dict[bytes, bytes] = {}  # fields of the next member from extended headers
    while at < end:
        header = os.pread(descriptor, _BLOCK, at)
        if header == bytes(_BLOCK):
            return
        size = _size(file, at, header)
        kind, offset = header[156:157], at + _BLOCK
        if b"size" in extended and kind in b"0\0":
            size = _number(file, at, extended[b"size"])
        at = offset + -(-size // _BLOCK) * _BLOCK
        if offset + size > end:
            raise BadInput(f"{file}, byte {offset}: a member of {size} bytes in a file of {end}; the file is truncated")
        if kind in b"LKxg":
            if size > _MOST:
                raise BadInput(f"{file}, byte {offset}: an extended header of {size} bytes; at most {_MOST} are read")
            text = os.pread(descriptor, size, offset)
            if kind == b"L":
                extended[b"path"] = text.rstrip(b"\0")
            elif kind == b"x":
                extended |= _records(file, offset, text)
            continue
        name, prefix = header[:100].partition(b"\0")[0], header[345:500].partition(b"\0")[0]
        if prefix and header[257:263] == b"ustar\0":
            name = prefix + b"/" + name
        if kind in b"0\0":
            yield extended.get(b"path", name), offset, size
        extended = {}
    raise BadInput(
        f"{file}, byte {end}: no zero blocks at the end of the shard, so it is truncated; get it again, or if it is "
        f"complete, add them: truncate -s +1024 {file}"
    )


def _size(file: str, at: int, header: bytes) -> int:
    """The size of a member. Raises BadInput unless the header is complete and its checksum is right."""
    checksum = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if len(header) < _BLOCK or header[148:156].strip(b" \0").lstrip(b"0") != b"%o" % checksum:
        raise BadInput(f"{file}, byte {at}: not a tar header, or damaged; get the shard again")
    field = header[124:136]
    if field[0] & 0x80:  # GNU's base-256 format
        return int.from_bytes(field[1:], "big")
    return _number(file, at, field.strip(b" \0") or b"0", 8)


def _number(file: str, at: int, text: bytes, base: int = 10) -> int:
    try:
        if text.isdigit():
            return int(text, base)
    except ValueError:
        pass
    raise BadInput(f"{file}, byte {at}: a size of {text[:20]!r} in the header; get the shard again")


def _records(file: str, at: int, text: bytes) -> dict[bytes, bytes]:
    """The records of a pax header, each "length key=value" with a newline."""
    records = {}
    while text:
        length = text.partition(b" ")[0]
        end = _number(file, at, length)
        record = text[:end]
        if len(record) < end or not record.endswith(b"\n") or b"=" not in record:
            raise BadInput(f"{file}, byte {at}: a damaged extended header; get the shard again")
        key, _, value = record[len(length) + 1 : -1].partition(b"=")
        records[key] = value
        text = text[len(record) :]
    return records
