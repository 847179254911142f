"""Parquet files in the Hugging Face image layout: a column of encoded images, one of labels, class names in the schema.

An image is a struct of `bytes` and `path`, or bytes alone. Small files are decoded once, on opening. Larger ones are
read by the row group, in the order of `_order`: a process keeps the groups of a window while rows of them come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy
from numpy.typing import NDArray

from unskip._extras import need
from unskip.data._assemble import SMALL, assembled, numbered
from unskip.data._images import ImageSet, Reader, samples
from unskip.data._index import Index, kept, stamp
from unskip.data._order import WINDOW, Groups, Rows
from unskip.data._splits import Parts, files_by_split
from unskip.errors import BadInput

MOST_GROUP = 2**30  # bytes of images in one row group, which is held in memory
MOST_ROWS = 2**20  # in a file of fewer bytes than rows: labels compress to nothing, and are held in memory
_IMAGES, _LABELS = ("image", "img", "images"), ("label", "labels", "fine_label")


class _Held:
    """Row groups in memory, up to some bytes; the one that came first leaves first. Pickled without them."""

    def __init__(self, limit: int) -> None:
        self.limit, self.groups, self.bytes, self.lock = limit, dict[int, Any](), 0, Lock()

    def __reduce__(self) -> tuple[type[_Held], tuple[int]]:
        return _Held, (self.limit,)

    def get(self, group: int, read: Callable[[int], Any]) -> Any:
        with self.lock:
            found = self.groups.get(group)
            if found is None:
                found = self.groups[group] = read(group)
                self.bytes += found.nbytes
                while self.bytes > self.limit and len(self.groups) > 3:
                    first = next(iter(self.groups))
                    self.bytes -= self.groups.pop(first).nbytes
            return found


@dataclass(frozen=True, eq=False)
class ParquetReader(Reader):
    """Encoded images of several files, one after the other, by the row group."""

    files: tuple[str, ...]
    column: str
    file: NDArray[numpy.int32]  # (groups,) the file of each row group
    ends: Rows  # (groups,) the row after its last, over all files
    sizes: Rows  # (groups,) bytes of its images
    rows: Rows  # (images,)
    held: _Held = field(default_factory=lambda: _Held(WINDOW + WINDOW // 4))

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        row, group = int(self.rows[index]), self._group(index)
        first = int(numpy.searchsorted(self.file, self.file[group]))  # group of the file
        return f"{self.files[self.file[group]]}, row {row - self._start(first)}"

    def encoded(self, index: int) -> bytes:
        group = self._group(index)
        found = self.held.get(group, self._read)
        return found[int(self.rows[index]) - self._start(group)].as_py() or b""

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
        return replace(self, held=_Held((WINDOW + WINDOW // 4) // processes))

    def _group(self, index: int) -> int:
        return int(numpy.searchsorted(self.ends, self.rows[index], side="right"))

    def _start(self, group: int) -> int:
        return int(self.ends[group - 1]) if group else 0

    def _read(self, group: int) -> Any:
        pyarrow, parquet = need("pyarrow"), need("pyarrow.parquet")
        file = int(self.file[group])
        inside = group - int(numpy.searchsorted(self.file, file))
        now = Path(self.files[file]).stat()
        footer = _footer(self.files[file], now.st_size, now.st_mtime_ns)
        # An image that is stored once for many rows stays one in memory, or a file of a kilobyte could fill it.
        rows = int(self.ends[group]) - self._start(group)
        once = [self.column] if rows * int(self.sizes[group]) > MOST_GROUP else None
        with parquet.ParquetFile(self.files[file], metadata=footer, read_dictionary=once) as opened:
            table = opened.read_row_group(inside, columns=[self.column], use_threads=False)
        found = table.column(0).combine_chunks()
        del table, opened
        pyarrow.default_memory_pool().release_unused()  # it would keep as much again as the groups that are held
        return found.field(0) if pyarrow.types.is_struct(found.type) else found


@lru_cache(64)
def _footer(file: str, size: int, changed: int) -> Any:
    """The metadata of a file as it is now, which can be long where it has many row groups."""
    return need("pyarrow.parquet").read_metadata(file)


def parquet_parts(pattern: str, size: int | None) -> Parts:
    """The splits of a pattern of parquet files."""
    splits = files_by_split(pattern)
    if not splits:
        raise BadInput(f"{pattern}: no such files; a pattern is a path with * or {{split}} in it")
    return {split: partial(open_parquet, pattern, split, splits, size) for split in splits}


def open_parquet(name: str, split: str, splits: Mapping[str, Sequence[str]], size: int | None) -> ImageSet:
    """One split of a set of files; the classes are those of all splits."""
    indices = {each: _index(files) for each, files in splits.items()}
    layouts = {each: index.texts["layout"] for each, index in indices.items()}
    for each, layout in layouts.items():
        if layout != layouts[split]:
            raise _different(splits[each][0], splits[split][0])
    index, layout = indices[split], json.loads(layouts[split])
    labels, ends = index.arrays["labels"], numpy.cumsum(index.arrays["rows"])
    most = max(int(each.arrays["labels"].max(initial=-1)) for each in indices.values())
    classes = tuple(layout["names"]) or numbered(name, most)
    bytes_ = index.arrays["bytes"]
    reader = ParquetReader(
        tuple(splits[split]), layout["column"], index.arrays["file"], ends, bytes_, numpy.arange(len(labels))
    )
    hold = size is not None or int(bytes_.sum()) <= SMALL
    return assembled(name, split, classes, labels, reader, size=size, hold=hold)


def _index(files: Sequence[str]) -> Index:
    files = [str(Path(file).absolute()) for file in files]
    return kept("\n".join(files), Path(files[0]).parent, partial(_listed, files), lambda _: stamp(files), "labels")


def _listed(files: Sequence[str]) -> Index:
    """The labels of all files, and the rows and bytes of their row groups. The files have to agree about columns."""
    pyarrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    layout, labels = None, list[Rows]()
    groups = list[tuple[int, int, int]]()
    for number, file in enumerate(files):
        try:
            opened = parquet.ParquetFile(file)
        except (OSError, pyarrow.ArrowException) as error:
            end = Path(file).stat().st_size
            raise BadInput(
                f"{file}: not a parquet file that can be read; its footer ends at byte {end} ({error})"
            ) from error
        with opened:
            schema, footer = opened.schema_arrow, opened.metadata
            features = _features(file, schema)
            image, label = columns(file, schema.names, features)
            column = _column(file, schema, image, label)
            names = features.get(label, {}).get("names") or []
            found = json.dumps({"column": column, "label": label, "names": [*map(str, names)]})
            if layout is not None and layout != found:
                raise _different(file, files[0])
            layout = found
            if footer.num_rows > max(MOST_ROWS, Path(file).stat().st_size):
                raise BadInput(f"{file}: {footer.num_rows:,} rows in a file of fewer bytes; that many hold no images")
            for inside in range(footer.num_row_groups):
                group = footer.row_group(inside)
                chunks = (group.column(each) for each in range(group.num_columns))
                size = sum(each.total_uncompressed_size for each in chunks if each.path_in_schema == column)
                if size > MOST_GROUP:
                    raise BadInput(
                        f"{file}: row group {inside} holds {size / 2**30:.1f} GiB of images, and at most "
                        f"{MOST_GROUP / 2**30:.0f} are read into memory; write the file with smaller row groups"
                    )
                groups.append((number, group.num_rows, size))
        labels.append(_labels(file, read_columns(file, [label]).column(label)))
    assert layout is not None
    table = numpy.array(groups, numpy.int64).reshape(-1, 3)
    arrays = {"file": table[:, 0].astype(numpy.int32), "rows": table[:, 1].copy(), "bytes": table[:, 2].copy()}
    return Index({**arrays, "labels": numpy.concatenate(labels)}, {"layout": layout})


def _features(file: str, schema: Any) -> dict[str, dict[str, Any]]:
    """What the library datasets says of each column."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        return {name: {**about, "names": [*(about.get("names") or [])]} for name, about in features.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"{file}: damaged notes on its columns ('huggingface' in its schema: {error})") from error


def _column(file: str, schema: Any, image: str, label: str) -> str:
    """The path of the column of images. Raises BadInput where images are not bytes, or labels not whole numbers."""
    types = need("pyarrow").types
    for name in (image, label):
        if schema.names.count(name) > 1:
            raise BadInput(f"{file}: {schema.names.count(name)} columns are called {name!r}; one is needed")
    images, labels = schema.field(image).type, schema.field(label).type
    inside = types.is_struct(images) and images.get_field_index("bytes") >= 0
    kind = images.field("bytes").type if inside else images
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_binary(kind) or types.is_large_binary(kind)):
        raise BadInput(f"{file}: column {image!r} holds {images}; images are bytes, or a struct with a field of bytes")
    if not types.is_integer(labels):
        raise BadInput(f"{file}: column {label!r} holds {labels}; labels are whole numbers")
    return f"{image}.bytes" if inside else image


def _different(file: str, other: str) -> BadInput:
    return BadInput(f"{file}: its columns or classes are not those of {other}; they are different sets")


def columns(place: str, names: Sequence[str], features: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """The column of images and that of labels: by the features' types, and by the usual names."""

    def chosen(kind: str, usual: tuple[str, ...]) -> str:
        typed = [name for name in names if features.get(name, {}).get("_type") == kind]
        known = [name for name in usual if name in (typed or names)]
        if not known and len(typed) != 1:
            raise BadInput(f"{place}: no column is called {' or '.join(usual)}; it has: {', '.join(names)}")
        return known[0] if known else typed[0]

    return chosen("Image", _IMAGES), chosen("ClassLabel", _LABELS)


def read_columns(file: str, wanted: list[str]) -> Any:
    """Some columns of a file."""
    pyarrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    try:
        return parquet.read_table(file, columns=wanted, partitioning=None)
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"{file}: cannot be read ({error}); get the file again") from error


def _labels(file: str, column: Any) -> Rows:
    """Labels as int64, -1 where there is none."""
    pyarrow = need("pyarrow")
    try:
        labels: Rows = column.cast(pyarrow.int64()).fill_null(-1).to_numpy()
    except pyarrow.ArrowInvalid as error:
        raise BadInput(f"{file}: labels are whole numbers below 2**63 ({error})") from error
    return labels
