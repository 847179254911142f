"""Writes small image sets to disk, and finds real ones if they exist."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

REAL = Path(os.environ.get("UNSKIP_DATA", Path(__file__).parents[3] / "shared" / "data"))
needs_real = pytest.mark.skipif(
    not (REAL / "cifar10-test.parquet").is_file(), reason=f"no real images in {REAL}; point UNSKIP_DATA at them"
)


def picture(seed: int, height: int = 12, width: int = 12, mode: str = "RGB") -> Image.Image:
    """An image of noise."""
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return Image.fromarray(numpy.random.default_rng(seed).integers(0, 256, shape, numpy.uint8), mode=None)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def write_parquet(
    file: Path,
    images: Sequence[bytes | None],
    labels: Sequence[int | None],
    names: Sequence[str] | None = None,
    columns: tuple[str, str] = ("image", "label"),
) -> Path:
    """A file in the Hugging Face layout; without class names it has no metadata."""
    table = pyarrow.table(
        {
            columns[0]: pyarrow.array(
                [{"bytes": image, "path": None} for image in images],
                pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]),
            ),
            columns[1]: pyarrow.array(labels, pyarrow.int64()),
        }
    )
    if names is not None:
        features = {columns[0]: {"_type": "Image"}, columns[1]: {"_type": "ClassLabel", "names": list(names)}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, file, row_group_size=4)
    return file


def write_folder(folder: Path, counts: dict[str, int], size: tuple[int, int] = (16, 12)) -> Path:
    """One folder per class, with the given number of PNG files."""
    for place, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            picture(100 * place + index, *size).save(folder / name / f"{index:03d}.png")
    return folder
