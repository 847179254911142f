"""A run judged on images with masks and boxes: segmentation, object discovery, and pictures of its features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from unskip.anatomy import block_indices
from unskip.data import open_dense, open_images
from unskip.errors import BadInput
from unskip.evals import Result, discover_blocks, patches, pictures, protocol, segment_blocks
from unskip.recipes._data import cached_opener, evaluated_split, open_split
from unskip.recipes._open import Trained, open_run

DENSE = ("segment", "discover")
TRIMAP = {1: 1, 2: 0, 3: 255}  # object, ground, and a border that does not count


def judge_dense(
    out: str | Path,
    source: str,
    protocols: Iterable[str],
    *,
    blocks: int | Iterable[int] | Literal["all"] = "all",
    size: int | None = None,
    values: Mapping[int, int] | None = None,
    ignore: int | None = None,
    seed: int = 0,
    precision: Any = "float32",
    device: str | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Trained, list[Result]]:
    """Judges the blocks of a run on a set of parquet files with masks or boxes, and adds rows to its evals.jsonl.

    Images are brought to `size` (default: the run's). Without `values` and `ignore` a mask of 1, 2 and 3 is a trimap,
    one of 0 and 255 an object, and beside other classes 255 is none.
    """
    names = list(protocols)
    unknown = [name for name in names if protocol(name).kind not in DENSE]
    if unknown:
        raise BadInput(
            f"{', '.join(unknown)}: judged by labels, not by masks or boxes; run `unskip eval` without --dense"
        )
    run = open_run(out, device)
    size = size or run.config.size
    train, test = (open_dense(source, split, size=size, values=values) for split in ("train", "test"))
    if values is None and ignore is None:
        names_of, ignore = _meaning({number for each in (train, test) for number in _numbers(each.masks)})
        train, test = (train, test) if names_of is None else (train.renamed(names_of), test.renamed(names_of))
    count = len(patches(run.encoder, test.pixels[:1], "all").blocks)
    wanted = block_indices(blocks, count)
    results: list[Result] = []
    for name in names:
        mine = dict((changes or {}).get(name, {}))
        options: dict[str, Any] = {"protocol": name, "precision": precision, "changes": mine}
        if protocol(name).kind == "segment":
            if train.masks is None or test.masks is None:
                raise BadInput(f"{source}: no masks, and {name} needs them")
            classes = 1 + max(_highest(each.masks, ignore, source) for each in (train, test))
            pair = ((train.pixels, train.masks), (test.pixels, test.masks))
            options |= {"ignore": ignore, "seed": seed}
            for found in segment_blocks(run.encoder, *pair, classes, blocks=wanted, **options):
                numbers = {"mean_iou": found.mean_iou, "pixel_accuracy": found.accuracy}
                numbers |= {f"iou_{index}": value for index, value in enumerate(found.iou)}
                results.append(Result(name, found.blocks[0], numbers, "patches", mine))
        else:
            if test.boxes is None:
                raise BadInput(f"{source}: no boxes, and {name} needs them")
            options |= {"masks": test.masks, "ignore": ignore}
            curve = discover_blocks(run.encoder, test.pixels, test.boxes, blocks=wanted, **options)
            results += [Result(name, block, numbers, "keys", mine) for block, numbers in curve.items()]
    for each in results:
        row = {"step": run.step, **each.to_dict(), "data": Path(source).name, "size": size}
        row |= {"seed": seed, "precision": precision}
        run.folder.append("evals.jsonl", row)
    return run, results


def picture_run(
    out: str | Path, target: str | Path, source: str | None = None, device: str | None = None, count: int = 6
) -> Path:
    """A sheet of pictures of a run's features, of images that it is judged by or of another set of parquet files."""
    opener = cached_opener()
    run = open_run(out, device)
    images = (
        open_split(run.config, evaluated_split(run.config), opener) if source is None else open_images(source, "test")
    )
    chosen = torch.linspace(0, len(images) - 1, count).long()
    # Another set as it is, where its images are of one size and the model takes any.
    whole = source is not None and images.size is not None and getattr(run.encoder, "dynamic_img_size", False)
    size = None if whole else run.config.size
    return pictures(run.encoder, images.load(chosen, size), Path(target))


def _numbers(masks: Tensor | None) -> list[int]:
    found: list[int] = [] if masks is None else masks.unique().tolist()
    return found


def _meaning(numbers: set[int]) -> tuple[Mapping[int, int] | None, int | None]:
    """New names for the numbers of masks, and the one that does not count, where nobody has said."""
    if numbers and numbers <= set(TRIMAP):
        return TRIMAP, 255
    if numbers == {0, 255}:
        return {0: 0, 255: 1}, None
    return None, 255 if 255 in numbers else None


def _highest(masks: Tensor | None, ignore: int | None, source: str) -> int:
    assert masks is not None
    known = masks if ignore is None else masks[masks != ignore]
    if not known.numel():
        raise BadInput(f"{source}: no pixel of its masks has a class")
    return int(known.max())
