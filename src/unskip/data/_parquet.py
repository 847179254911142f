"""Parquet files in the Hugging Face image layout: a column of encoded images, one of labels, class names in the schema.

An image is a struct of `bytes` and `path`, or only bytes. Small files are decoded once, on opening. Larger ones are
read by the row group, in the order of `_order`: a process keeps the groups of the current window in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy
from numpy.typing import NDArray

from unskip._extras import need
from unskip.data._assemble import SMALL, assembled, numbered
from unskip.data._images import ImageSet, Reader, samples
from unskip.data._index import Index, shard_index
from unskip.data._order import WINDOW, Groups, Rows
from unskip.errors import BadInput

MOST_GROUP = 2**30  # bytes of images in one row group, which is read into memory at once
MOST_ROWS = 2**20  # in a file of fewer bytes than rows: labels can compress to almost nothing, but are read into memory
_IMAGES, _LABELS = ("image", "img", "images"), ("label", "labels", "fine_label")


class _Cache:
    """Row groups in memory, up to a number of bytes, first in first out. Pickled empty."""

    def __init__(self, limit: int) -> None:
        self.limit, self.groups, self.bytes, self.lock = limit, dict[int, Any](), 0, Lock()

    def __reduce__(self) -> tuple[type[_Cache], tuple[int]]:
        return _Cache, (self.limit,)

    def get(self, group: int, read: Callable[[int], Any]) -> Any:
        with self.lock:
            images = self.groups.get(group)
            if images is None:
                images = self.groups[group] = read(group)
                self.bytes += images.nbytes
                while self.bytes > self.limit and len(self.groups) > 3:
                    first = next(iter(self.groups))
                    self.bytes -= self.groups.pop(first).nbytes
            return images


@dataclass(frozen=True, eq=False)
class ParquetReader(Reader):
    """Encoded images of several concatenated files, read by the row group."""

    files: tuple[str, ...]
    column: str
    file: NDArray[numpy.int32]  # (groups,) the file of each row group
    ends: Rows  # (groups,) the row after its last one, counted over all files
    sizes: Rows  # (groups,) bytes of its images
    rows: Rows  # (images,)
    cache: _Cache = field(default_factory=lambda: _Cache(WINDOW + WINDOW // 4))

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        row, group = int(self.rows[index]), self._group(index)
        first = int(numpy.searchsorted(self.file, self.file[group]))  # the first group of the file
        return f"{self.files[self.file[group]]}, row {row - self._start(first)}"

    def encoded(self, index: int) -> bytes:
        group = self._group(index)
        images = self.cache.get(group, self._read)
        return images[int(self.rows[index]) - self._start(group)].as_py() or b""

    def select(self, rows: Rows) -> ParquetReader:
        return replace(self, rows=self.rows[rows])

    def identity(self) -> Iterator[bytes]:
        yield from samples(self.files)
        yield self.ends.tobytes()
        yield self.rows.tobytes()

    @property
    def groups(self) -> Groups:
        return Groups(numpy.searchsorted(self.ends, self.rows, side="right").astype(numpy.int32), self.sizes)

    def divided(self, processes: int) -> ParquetReader:
        return replace(self, cache=_Cache((WINDOW + WINDOW // 4) // processes))

    def _group(self, index: int) -> int:
        return int(numpy.searchsorted(self.ends, self.rows[index], side="right"))

    def _start(self, group: int) -> int:
        return int(self.ends[group - 1]) if group else 0

    def _read(self, group: int) -> Any:
        pyarrow, parquet = need("pyarrow"), need("pyarrow.parquet")
        file = int(self.file[group])
        number = group - int(numpy.searchsorted(self.file, file))  # of the group in its file
        status = Path(self.files[file]).stat()
        footer = _footer(self.files[file], status.st_size, status.st_mtime_ns)
        # An image stored once for many rows stays a dictionary entry; copies of it could fill the memory.
        rows = int(self.ends[group]) - self._start(group)
        dictionary = [self.column] if rows * int(self.sizes[group]) > MOST_GROUP else None
        with parquet.ParquetFile(self.files[file], metadata=footer, read_dictionary=dictionary) as opened:
            table = opened.read_row_group(number, columns=[self.column], use_threads=False)
        images = table.column(0).combine_chunks()
        del table, opened
        pyarrow.default_memory_pool().release_unused()  # else it keeps as much memory again as the cached groups
        return images.field(0) if pyarrow.types.is_struct(images.type) else images


@lru_cache(64)
def _footer(file: str, size: int, changed: int) -> Any:
    """The metadata of a file, which are large if it has many row groups; cached until the file changes."""
    return need("pyarrow.parquet").read_metadata(file)


def open_parquet(name: str, split: str, splits: Mapping[str, Sequence[str]], size: int | None) -> ImageSet:
    """One split of a set of files; the classes are those of all splits."""
    indices = {part: shard_index(files, _listed) for part, files in splits.items()}
    index = indices[split]
    for part, other in indices.items():
        if other.texts["layout"] != index.texts["layout"]:
            raise _different(splits[part][0], splits[split][0])
    layout, labels = json.loads(index.texts["layout"]), index.arrays["labels"]
    most = max(int(other.arrays["labels"].max(initial=-1)) for other in indices.values())
    classes = tuple(layout["names"]) or numbered(name, most)
    ends, sizes = numpy.cumsum(index.arrays["rows"]), index.arrays["bytes"]
    rows = numpy.arange(len(labels))
    reader = ParquetReader(tuple(splits[split]), layout["column"], index.arrays["file"], ends, sizes, rows)
    in_memory = size is not None or int(sizes.sum()) <= SMALL
    return assembled(name, split, classes, labels, reader, size=size, in_memory=in_memory)


def _listed(files: Sequence[str]) -> Index:
    """The labels of all files, and the rows and bytes of their row groups. All files must have the same columns."""
    pyarrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    layout, labels = None, list[Rows]()
    groups = list[tuple[int, int, int]]()
    for file_number, file in enumerate(files):
        try:
            opened = parquet.ParquetFile(file)
        except (OSError, pyarrow.ArrowException) as error:
            end = Path(file).stat().st_size
            raise BadInput(
                f"{file}: cannot be read as a parquet file; its footer ends at byte {end} ({error})"
            ) from error
        with opened:
            schema, footer = opened.schema_arrow, opened.metadata
            features = _features(file, schema)
            image, label = columns(file, schema.names, features)
            column = _column(file, schema, image, label)
            names = features.get(label, {}).get("names") or []
            own = json.dumps({"column": column, "label": label, "names": [*map(str, names)]})
            if layout not in (None, own):
                raise _different(file, files[0])
            layout = own
            if footer.num_rows > max(MOST_ROWS, Path(file).stat().st_size):
                raise BadInput(f"{file}: {footer.num_rows:,} rows in a file of fewer bytes; these cannot be images")
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                chunks = (group.column(index) for index in range(group.num_columns))
                size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)
                if size > MOST_GROUP:
                    raise BadInput(
                        f"{file}: row group {number} has {size / 2**30:.1f} GiB of images, and at most "
                        f"{MOST_GROUP / 2**30:.0f} are read into memory; write the file with smaller row groups"
                    )
                groups.append((file_number, group.num_rows, size))
        labels.append(_labels(file, read_columns(file, [label]).column(label)))
    assert layout is not None
    table = numpy.array(groups, numpy.int64).reshape(-1, 3)
    arrays = {"file": table[:, 0].astype(numpy.int32), "rows": table[:, 1].copy(), "bytes": table[:, 2].copy()}
    return Index({**arrays, "labels": numpy.concatenate(labels)}, {"layout": layout})


def _features(file: str, schema: Any) -> dict[str, dict[str, Any]]:
    """The features of each column, as written by the library datasets."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        return {name: {**feature, "names": [*(feature.get("names") or [])]} for name, feature in features.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"{file}: damaged metadata of the columns ('huggingface' in the schema: {error})") from error


def _column(file: str, schema: Any, image: str, label: str) -> str:
    """The path of the column of images. Raises BadInput unless images are bytes and labels are whole numbers."""
    types = need("pyarrow").types
    for name in (image, label):
        if schema.names.count(name) > 1:
            raise BadInput(f"{file}: {schema.names.count(name)} columns are called {name!r}; one is needed")
    images, labels = schema.field(image).type, schema.field(label).type
    in_struct = types.is_struct(images) and images.get_field_index("bytes") >= 0
    kind = images.field("bytes").type if in_struct else images
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_binary(kind) or types.is_large_binary(kind)):
        raise BadInput(f"{file}: column {image!r} is {images}; images are bytes, or a struct with a field of bytes")
    if not types.is_integer(labels):
        raise BadInput(f"{file}: column {label!r} is {labels}; labels are whole numbers")
    return f"{image}.bytes" if in_struct else image


def _different(file: str, other: str) -> BadInput:
    return BadInput(f"{file}: columns or classes differ from those of {other}; open different sets separately")


def columns(place: str, names: Sequence[str], features: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """The column of images and that of labels: by the types of the features, or by the usual names."""

    def chosen(kind: str, usual: tuple[str, ...]) -> str:
        typed = [name for name in names if features.get(name, {}).get("_type") == kind]
        known = [name for name in usual if name in (typed or names)]
        if not known and len(typed) != 1:
            raise BadInput(f"{place}: no column is called {' or '.join(usual)}; it has: {', '.join(names)}")
        return known[0] if known else typed[0]

    return chosen("Image", _IMAGES), chosen("ClassLabel", _LABELS)


def read_columns(file: str, wanted: list[str]) -> Any:
    """Reads columns of a file as a pyarrow table."""
    pyarrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    try:
        return parquet.read_table(file, columns=wanted, partitioning=None)
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"{file}: cannot be read ({error}); get the file again") from error


def _labels(file: str, column: Any) -> Rows:
    """Labels as int64; -1 means none."""
    pyarrow = need("pyarrow")
    try:
        labels: Rows = column.cast(pyarrow.int64()).fill_null(-1).to_numpy()
    except pyarrow.ArrowInvalid as error:
        raise BadInput(f"{file}: labels must be whole numbers below 2**63 ({error})") from error
    return labels
