"""Images with masks and boxes: parquet files with a column `mask`, `bbox`, or both, besides images and labels.

A mask is an encoded one-channel image of the same size as its image. `values` maps its numbers to classes: {1: 1, 2: 0,
3: 255} turns a trimap (object, background, border) into classes, with 255 to ignore. A box is x0, y0, x1, y1 in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from unskip.data._device import crop_resize
from unskip.data._images import ImageSet
from unskip.data._parquet import read_columns
from unskip.data._sources import open_images
from unskip.data._splits import files_by_split
from unskip.errors import BadInput

TRIMAP = {1: 1, 2: 0, 3: 255}  # object, background, and a border to ignore


@dataclass(frozen=True, eq=False)
class DenseSet:
    """Images in memory as bytes (n, channels, H, W), with masks (n, H, W), boxes (n, 4), or both."""

    images: ImageSet
    masks: Tensor | None
    boxes: Tensor | None
    ignore: int | None = None  # the mask value of pixels without a class

    @staticmethod
    def of(
        pixels: Tensor, masks: Tensor | None = None, boxes: Tensor | None = None, ignore: int | None = None
    ) -> DenseSet:
        """A set from tensors; pixels are bytes (n, channels, H, W)."""
        labels = torch.zeros(len(pixels), dtype=torch.int64)
        return DenseSet(ImageSet("images", "test", ("none",), labels, pixels), masks, boxes, ignore)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def pixels(self) -> Tensor:
        assert self.images.images is not None
        return self.images.images

    def renamed(self, values: Mapping[int, int]) -> DenseSet:
        """The same set with the numbers of its masks mapped by `values`."""
        return replace(self, masks=None if self.masks is None else _mapped(self.masks, values, self.images.name))


def open_dense(
    source: str | Path,
    split: Literal["train", "val", "test"] = "train",
    *,
    size: int | None = None,
    values: Mapping[int, int] | None = None,
) -> DenseSet:
    """Opens one split of a set of parquet files.

    With a `size`, images and boxes are resized to a square. Masks keep their size; if they are not square they are
    resized to a square of the longer side.
    """
    from pyarrow import parquet

    files = files_by_split(str(source))
    chosen = files.get(split) or (files.get("val") if split == "test" else None)
    if not chosen:
        raise BadInput(f"{source}: no {split} split (it has: {', '.join(files) or 'none'})")
    images = open_images(source, split)
    if images.images is None:
        raise BadInput(f"{source}: too large for memory; use fewer or smaller images")
    names = [name for name in ("mask", "bbox") if name in parquet.read_schema(chosen[0]).names]
    if not names:
        raise BadInput(f"{chosen[0]}: no column mask or bbox; evaluation needs one of them")
    tables = {file: read_columns(file, names) for file in chosen}
    masks = boxes = None
    if "mask" in names:
        masks = torch.cat([_masks(table.column("mask"), file, images) for file, table in tables.items()])
        masks = masks if values is None else _mapped(masks, values, str(source))
    if "bbox" in names:
        boxes = torch.cat([_boxes(table.column("bbox"), file) for file, table in tables.items()])
    height, width = images.images.shape[2:]
    if size is not None and (height, width) != (size, size):
        box = torch.tensor([[0.0, 0, height, width, 0]])
        chunks = images.images.split(512)
        parts = [crop_resize(part, box.expand(len(part), 5), (size, size)).round().byte() for part in chunks]
        images = replace(images, images=torch.cat(parts))
        if masks is not None and height != width:  # the images are squares now
            masks = F.interpolate(masks[:, None], (max(height, width),) * 2, mode="nearest-exact")[:, 0]
        boxes = None if boxes is None else boxes * torch.tensor([size / width, size / height] * 2, dtype=torch.float64)
    return DenseSet(images, masks, boxes)


def infer_classes(*sets: DenseSet) -> tuple[DenseSet, ...]:
    """The splits of one set with class numbers in their masks, and the number to ignore, inferred from all masks.

    Masks of 1, 2 and 3 are a trimap: object, background, and a border to ignore. In masks of 0 and 255, 255 is the
    object; with other numbers present, 255 is ignored.
    """
    numbers = {int(number) for part in sets if part.masks is not None for number in part.masks.unique()}
    if numbers and numbers <= set(TRIMAP):
        return tuple(replace(part.renamed(TRIMAP), ignore=255) for part in sets)
    if numbers == {0, 255}:
        return tuple(part.renamed({0: 0, 255: 1}) for part in sets)
    return tuple(replace(part, ignore=255) for part in sets) if 255 in numbers else sets


def _boxes(column: Any, file: str) -> Tensor:
    boxes = column.to_pylist()
    for row, box in enumerate(boxes):
        if not isinstance(box, list) or len(box) != 4 or None in box:
            raise BadInput(f"{file}, row {row}: bbox is {box}; a box is x0, y0, x1, y1 in pixels")
    return torch.tensor(boxes, dtype=torch.float64)


def _masks(column: Any, file: str, images: ImageSet) -> Tensor:
    from PIL import Image

    assert images.size is not None
    masks = []
    for row, cell in enumerate(column.to_pylist()):
        encoded = cell["bytes"] if isinstance(cell, dict) else cell
        try:
            with Image.open(BytesIO(encoded)) as opened:
                mask = torch.from_numpy(numpy.array(opened.convert("L") if opened.mode not in ("L", "P") else opened))
        except Exception as error:  # decoders raise anything on damaged files
            raise BadInput(f"{file}, row {row}: the mask cannot be read as an image ({error})") from error
        if tuple(mask.shape) != images.size:
            raise BadInput(
                f"{file}, row {row}: a mask of {mask.shape[0]} x {mask.shape[1]} for an image of {images.size[0]} x "
                f"{images.size[1]}"
            )
        masks.append(mask.byte())
    return torch.stack(masks)


def _mapped(masks: Tensor, values: Mapping[int, int], source: str) -> Tensor:
    unknown = sorted(set(masks.unique().tolist()) - set(values))
    if unknown:
        raise BadInput(f"{source}: masks contain {unknown[:5]}, which `values` does not map")
    table = torch.zeros(256, dtype=torch.uint8)
    for number, target in values.items():
        table[number] = target
    return table[masks.int()]
