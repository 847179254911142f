"""hf:NAME or hf:NAME:CONFIG: any image set that the `datasets` library loads, from the hub, its cache or a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from unskip.data._decode import MixedSizes, held, in_range, readable
from unskip.data._images import ImageSet
from unskip.data._order import Rows
from unskip.data._parquet import columns
from unskip.data._splits import WORDS, Parts
from unskip.errors import BadInput


@dataclass(frozen=True, eq=False)
class HubReader:
    """Encoded images of a datasets.Dataset, which maps its files into memory."""

    name: str
    data: Any
    column: str
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        return f"{self.name}, row {int(self.rows[index])}"

    def encoded(self, index: int) -> bytes:
        got = self.data[int(self.rows[index])][self.column] or {"bytes": b""}
        return got["bytes"] if got["bytes"] is not None else Path(got["path"]).read_bytes()

    def select(self, indices: Sequence[int]) -> HubReader:
        return replace(self, rows=self.rows[list(indices)])


def hub_parts(text: str, size: int | None, skip_broken: bool) -> Parts:
    """The splits of a set of the `datasets` library."""
    try:
        import datasets
    except ImportError as error:
        raise BadInput(f"{text}: this needs the library datasets; pip install 'unskip[hf]'") from error
    name, _, config = text.removeprefix("hf:").partition(":")
    try:
        loaded = datasets.load_dataset(name, config or None)
    except Exception as error:  # it has many, and the network adds its own
        raise BadInput(f"{text}: datasets cannot load it ({type(error).__name__}: {error})") from error
    return {
        split: partial(_open, text, split, loaded[word], size, skip_broken)
        for split, words in WORDS.items()
        for word in words
        if word in loaded
    }


def _open(name: str, split: str, data: Any, size: int | None, skip_broken: bool) -> ImageSet:
    import datasets

    image, label = columns(name, data.column_names, data.features.to_dict())
    data = data.select_columns([image, label]).cast_column(image, datasets.Image(decode=False))
    labels = numpy.array([-1 if value is None else value for value in data[label]], numpy.int64)
    classes = tuple(getattr(data.features[label], "names", None) or map(str, range(labels.max(initial=-1) + 1)))
    every = HubReader(f"{name} ({split})", data, image, numpy.arange(len(labels)))
    rows, wrong = in_range(every, labels, len(classes), skip_broken)
    reader = every.select(rows)
    try:
        images, kept, broken = held(reader, size, skip_broken)
    except MixedSizes:
        images, (kept, broken) = None, readable(reader, skip_broken)
    reader = reader.select(kept)
    found = torch.from_numpy(labels[reader.rows])
    return ImageSet(name, split, classes, found, images, (*wrong, *broken), reader if images is None else None)
