"""Parquet files in the Hugging Face image layout: a column of encoded images, one of labels, class names in the schema.

An image is a struct of `bytes` and `path`, or bytes alone. The encoded images are read into memory, and decoded once
where the pixels fit there too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
import torch

from unskip.data._decode import MEMORY_LIMIT, held, in_range
from unskip.data._images import ImageSet
from unskip.data._order import Rows
from unskip.data._splits import Parts, files_by_split
from unskip.errors import BadInput

_IMAGES, _LABELS = ("image", "img", "images"), ("label", "labels", "fine_label")


@dataclass(frozen=True, eq=False)
class ParquetReader:
    """Encoded images of several files, one after the other."""

    column: Any  # a pyarrow ChunkedArray of bytes
    files: tuple[str, ...]
    starts: tuple[int, ...]  # the first row of each file
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        row = int(self.rows[index])
        file = int(numpy.searchsorted(self.starts, row, side="right")) - 1
        return f"{self.files[file]}, row {row - self.starts[file]}"

    def encoded(self, index: int) -> bytes:
        return self.column[int(self.rows[index])].as_py() or b""

    def select(self, indices: Sequence[int]) -> ParquetReader:
        return replace(self, rows=self.rows[list(indices)])


def parquet_parts(pattern: str, size: int | None, skip_broken: bool) -> Parts:
    """The splits of a pattern of parquet files."""
    splits = files_by_split(pattern)
    if not splits:
        raise BadInput(f"{pattern}: no such files; a pattern is a path with * or {{split}} in it")
    every = tuple(file for files in splits.values() for file in files)
    return {
        split: partial(_open, pattern, split, tuple(files), every, size, skip_broken) for split, files in splits.items()
    }


def _open(
    name: str, split: str, files: tuple[str, ...], every: tuple[str, ...], size: int | None, skip_broken: bool
) -> ImageSet:
    import pyarrow

    image, label, classes = _layout(every)
    tables = [read_columns(file, [image, label]) for file in files]
    column = pyarrow.chunked_array([chunk for table in tables for chunk in table.column(image).chunks])
    if pyarrow.types.is_struct(column.type):
        column = pyarrow.compute.struct_field(column, "bytes")
    labels = numpy.concatenate([_labels(table.column(label)) for table in tables])
    starts = tuple(int(start) for start in numpy.cumsum([0, *(len(table) for table in tables)])[:-1])
    reader = ParquetReader(column, files, starts, numpy.arange(len(labels)))
    if not len(labels):
        raise BadInput(f"{', '.join(files)}: no images in it")
    rows, wrong = in_range(reader, labels, len(classes), skip_broken)
    reader = reader.select(rows)
    images, kept, broken = held(reader, size, skip_broken)
    reader = reader.select(kept)
    found = torch.from_numpy(labels[reader.rows])
    return ImageSet(name, split, classes, found, images, (*wrong, *broken), reader if images is None else None)


def _layout(files: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
    """The column of images, that of labels, and the classes; the files have to agree about them."""
    import pyarrow
    from pyarrow import parquet

    found, first, most, encoded = None, "", -1, 0
    for file in files:
        try:
            opened = parquet.ParquetFile(file)
        except (OSError, pyarrow.ArrowException) as error:
            raise BadInput(f"{file}: not a parquet file that can be read ({error})") from error
        with opened:
            features = json.loads((opened.schema_arrow.metadata or {}).get(b"huggingface", b"{}"))
            features = features.get("info", {}).get("features", {})
            image, label = columns(file, opened.schema_arrow.names, features)
            names = tuple(features.get(label, {}).get("names") or ())
            if found is not None and found != (image, label, names):
                raise BadInput(f"{file}: its columns or classes are not those of {first}; they are different sets")
            found, first = (image, label, names), first or file
            encoded += sum(opened.metadata.row_group(i).total_byte_size for i in range(opened.num_row_groups))
            if not names:
                most = max(most, int(_labels(read_columns(file, [label]).column(label)).max(initial=-1)))
    if encoded > MEMORY_LIMIT:
        raise BadInput(
            f"{files[0]}: the files hold {encoded / 2**30:.0f} GiB, and at most {MEMORY_LIMIT / 2**30:.0f} are read "
            "into memory; open their folder as hf:FOLDER, or unpack them into a folder of images"
        )
    assert found is not None
    return found[0], found[1], found[2] or tuple(map(str, range(most + 1)))


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
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(file, columns=wanted, partitioning=None)
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"{file}: cannot be read ({error}); get the file again") from error


def _labels(column: Any) -> Rows:
    """Labels as int64, -1 where there is none."""
    labels: Rows = column.fill_null(-1).to_numpy().astype(numpy.int64)
    return labels
