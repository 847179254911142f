"""Object discovery: TokenCut on the features of a backbone, judged by CorLoc and by masks.

    CorLoc = share of images whose box has an IoU of at least 1/2 with any of the image's true boxes

As TokenCut judges it (arXiv 2202.11539): keys of the last block by default, boxes of patches in pixels, cut off at the
edge of the image. An image without an answer is a miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unskip.errors import BadInput
from unskip.evals._extract import Precision
from unskip.evals._iou import pair_iou
from unskip.evals._patches import Reader, What, batches
from unskip.evals._protocols import settings_of
from unskip.evals._tokencut import Discovery, tokencut


def discover(
    model: nn.Module,
    images: Tensor,
    boxes: Tensor | Sequence[Tensor],
    *,
    masks: Tensor | None = None,
    block: int = -1,
    what: What = "keys",
    protocol: str = "discover-tokencut-v1",
    ignore: int | None = None,
    batch: int | None = None,
    precision: Precision = "float32",
    changes: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """CorLoc, and the mean IoU of the masks where true ones are given, with how many answers are not sure or missing.

    `images` are (n, channels, height, width), normalised or bytes. `boxes` holds one box an image, (n, 4), or a tensor
    (k, 4) of them for each: x0, y0, x1, y1 in pixels. What reaches over the edge of the image is cut off. `masks` are
    (n, height, width), not 0 where the object is, of any size in the proportion of the images. Pixels that are `ignore`
    do not count, nor do images that have no others.
    """
    options: dict[str, Any] = {"what": what, "protocol": protocol, "batch": batch, "precision": precision}
    options |= {"masks": masks, "ignore": ignore, "changes": changes}
    (found,) = discover_blocks(model, images, boxes, blocks=[block], **options).values()
    return found


def discover_blocks(
    model: nn.Module,
    images: Tensor,
    boxes: Tensor | Sequence[Tensor],
    *,
    masks: Tensor | None = None,
    blocks: Sequence[int] | Literal["all"] = "all",
    what: What = "keys",
    protocol: str = "discover-tokencut-v1",
    ignore: int | None = None,
    batch: int | None = None,
    precision: Precision = "float32",
    changes: Mapping[str, float] | None = None,
) -> dict[int, dict[str, float]]:
    """The curve over depth: `discover` of each block, from one pass over the images."""
    settings = settings_of(protocol, "discover", changes)
    truth, owner = true_boxes(boxes, images)
    if masks is not None:
        _check_masks(masks, images, ignore)
    every, stride = _discovered(model, images, blocks, what, settings["tau"], batch, precision)
    size = (images.shape[2], images.shape[3])
    results: dict[int, dict[str, float]] = {}
    for block, found in every.items():
        placed = in_pixels(found.boxes, stride, size).cpu()
        close = pair_iou(placed[owner], truth) >= settings["iou"]
        hits = torch.zeros(len(images)).index_add_(0, owner, close.float()) > 0
        results[block] = {
            "corloc": float(hits.double().mean()),
            "unsure": float((~found.sure).double().mean()),
            "empty": float((~found.masks.flatten(1).any(1)).double().mean()),
        }
        if masks is not None:
            scale = masks.shape[1] / size[0]  # pixels of a mask to one of its image
            results[block]["mask_iou"] = _mask_iou(found, (stride[0] * scale, stride[1] * scale), masks, ignore)
    return results


def discoveries(
    model: nn.Module,
    images: Tensor,
    *,
    block: int = -1,
    what: What = "keys",
    tau: float = 0.2,
    batch: int | None = None,
    precision: Precision = "float32",
) -> tuple[Discovery, tuple[float, float]]:
    """What is found in each image, and how many pixels a patch is high and wide."""
    every, stride = _discovered(model, images, [block], what, tau, batch, precision)
    (found,) = every.values()
    return found, stride


def _discovered(
    model: nn.Module, images: Tensor, blocks: Any, what: What, tau: float, batch: int | None, precision: Precision
) -> tuple[dict[int, Discovery], tuple[float, float]]:
    reader = Reader(model, images, blocks, what)
    # A cut is some thousand small products, whatever the batch: on a GPU as many images at once as there is room for.
    batch = batch or (1024 if next(model.parameters()).is_cuda else 64)
    parts: dict[int, list[Discovery]] = {}
    for part in batches(len(images), batch):
        read = reader(images[part], precision)
        for index, features in read.blocks.items():
            parts.setdefault(index, []).append(tokencut(features, read.grid, tau))
    whole = {
        index: Discovery(*(torch.cat([getattr(each, part.name) for each in found]) for part in fields(Discovery)))
        for index, found in parts.items()
    }
    return whole, read.stride


def in_pixels(boxes: Tensor, stride: tuple[float, float], size: tuple[int, int]) -> Tensor:
    """Boxes of patches as boxes of pixels, cut off at the edge of an image (height, width)."""
    scale = boxes.new_tensor([stride[1], stride[0]] * 2, dtype=torch.float64)
    edge = boxes.new_tensor([size[1], size[0]] * 2, dtype=torch.float64)
    return torch.minimum(boxes * scale, edge)


def true_boxes(boxes: Tensor | Sequence[Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """All boxes (m, 4), within their images, and for each the number of its image.

    Raises BadInput where one lies outside or is empty, and where an image has none.
    """
    if not len(images):
        raise BadInput("discover: there are no images")
    if len(boxes) != len(images):
        raise BadInput(f"discover: {len(images)} images and boxes of {len(boxes)}; there are some for each image")
    height, width = images.shape[2:]
    if isinstance(boxes, Tensor) and boxes.ndim == 2:
        boxes = boxes[:, None]
    several = [torch.as_tensor(each, dtype=torch.float64) for each in boxes] if not isinstance(boxes, Tensor) else boxes
    counts = []
    for index, each in enumerate(several):
        shape = (1, *each.shape) if each.ndim == 1 else tuple(each.shape)
        if len(shape) != 2 or shape[1] != 4 or not shape[0]:
            raise BadInput(f"discover: the boxes of image {index} are {tuple(each.shape)}; x0, y0, x1, y1 for each")
        counts.append(shape[0])
    owner = torch.arange(len(images)).repeat_interleave(torch.tensor(counts))
    flat = torch.cat([each.reshape(-1, 4) for each in several]).to("cpu", torch.float64)
    cut = torch.minimum(flat.clamp_min(0), flat.new_tensor([width, height] * 2))
    for wrong, text in (
        (~flat.isfinite().all(1), "is not finite; x0, y0, x1, y1 for each"),
        (
            (cut[:, 2:] <= cut[:, :2]).any(1),
            f"has no part in an image {width} wide and {height} high; boxes are x0, y0, x1, y1 in pixels of the image",
        ),
    ):
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            raise BadInput(f"discover: box {flat[first].tolist()} of image {int(owner[first])} {text}")
    return cut, owner


def _check_masks(masks: Tensor, images: Tensor, ignore: int | None) -> None:
    found = tuple(masks.shape) if isinstance(masks, Tensor) else type(masks).__name__
    if not isinstance(masks, Tensor) or masks.ndim != 3 or len(masks) != len(images):
        raise BadInput(f"discover: masks are a tensor (n, height, width), one for each image, got {found}")
    if masks.shape[1] * images.shape[3] != masks.shape[2] * images.shape[2]:
        raise BadInput(
            f"discover: masks are {found}, and the images {tuple(images.shape)}; their sides are not in the same "
            "proportion, so a mask cannot lie over its image"
        )
    if ignore is not None and bool((masks == ignore).all()):
        raise BadInput(f"discover: every pixel of the masks is {ignore}, and does not count")


def _mask_iou(found: Discovery, stride: tuple[float, float], masks: Tensor, ignore: int | None) -> float:
    """The mean over images of the IoU of the mask with the true one, at full resolution."""
    height, width = masks.shape[1:]
    device = found.masks.device
    rows = (torch.arange(height, device=device) / stride[0]).long().clamp_max(found.masks.shape[1] - 1)
    columns = (torch.arange(width, device=device) / stride[1]).long().clamp_max(found.masks.shape[2] - 1)
    total, images = 0.0, 0
    for part in batches(len(masks), 256):
        truth = masks[part].to(device)
        mine = found.masks[part][:, rows][:, :, columns]
        counted = truth != ignore if ignore is not None else torch.ones_like(truth, dtype=torch.bool)
        theirs = (truth != 0) & counted
        both, either = (mine & theirs).sum((1, 2)), ((mine | theirs) & counted).sum((1, 2))
        known = counted.flatten(1).any(1)
        total += float(torch.where(either > 0, both / either.clamp_min(1), 1.0)[known].double().sum())
        images += int(known.sum())
    return total / images
