"""Object discovery: TokenCut on the features of a backbone, judged by CorLoc and by masks.

    CorLoc = share of images whose box has an IoU of at least 1/2 with any of the image's true boxes

As TokenCut judges it (arXiv 2202.11539): keys of the last block by default, boxes of patches in pixels, cut off at the
edge of the image. An image without an answer is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unskip.errors import BadInput
from unskip.evals._extract import Precision
from unskip.evals._iou import box_iou
from unskip.evals._patches import Reader, What, batches
from unskip.evals._protocols import protocol as find
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
    batch: int = 64,
    precision: Precision = "float32",
) -> dict[str, float]:
    """CorLoc, and the mean IoU of the masks where true ones are given, with how many answers are not sure or missing.

    `images` are (n, channels, height, width), normalised or bytes. `boxes` holds one box an image, (n, 4), or a tensor
    (k, 4) of them for each: x0, y0, x1, y1 in pixels. What reaches over the edge of the image is cut off. `masks` are
    (n, height, width), not 0 where the object is; pixels that are `ignore` do not count.
    """
    settings = find(protocol, "discover").settings
    truth = true_boxes(boxes, images)
    if masks is not None and masks.shape != (len(images), *images.shape[2:]):
        raise BadInput(
            f"discover: masks are {tuple(masks.shape)}, and the images {tuple(images.shape)}; there is a mask of the "
            "same height and width for each"
        )
    found, stride = discoveries(
        model, images, block=block, what=what, tau=settings["tau"], batch=batch, precision=precision
    )
    size = (images.shape[2], images.shape[3])
    placed = in_pixels(found.boxes, stride, size).cpu()
    hits = [float((box_iou(placed[i : i + 1], each) >= settings["iou"]).any()) for i, each in enumerate(truth)]
    result = {
        "corloc": sum(hits) / len(hits),
        "unsure": float((~found.sure).double().mean()),
        "empty": float((~found.masks.flatten(1).any(1)).double().mean()),
    }
    if masks is not None:
        result["mask_iou"] = _mask_iou(found, stride, masks, ignore)
    return result


def discoveries(
    model: nn.Module,
    images: Tensor,
    *,
    block: int = -1,
    what: What = "keys",
    tau: float = 0.2,
    batch: int = 64,
    precision: Precision = "float32",
) -> tuple[Discovery, tuple[float, float]]:
    """What is found in each image, and how many pixels a patch is high and wide."""
    reader = Reader(model, images, block, what)
    parts = []
    for part in batches(len(images), batch):
        read = reader(images[part], precision)
        (features,) = read.blocks.values()
        parts.append(tokencut(features, read.grid, tau))
    fields = [[getattr(each, name) for each in parts] for name in Discovery.__dataclass_fields__]
    return Discovery(*(torch.cat(each) for each in fields)), read.stride


def in_pixels(boxes: Tensor, stride: tuple[float, float], size: tuple[int, int]) -> Tensor:
    """Boxes of patches as boxes of pixels, cut off at the edge of an image (height, width)."""
    scale = boxes.new_tensor([stride[1], stride[0]] * 2, dtype=torch.float64)
    edge = boxes.new_tensor([size[1], size[0]] * 2, dtype=torch.float64)
    return torch.minimum(boxes * scale, edge)


def true_boxes(boxes: Tensor | Sequence[Tensor], images: Tensor) -> list[Tensor]:
    """For each image its boxes (k, 4), within the image. Raises BadInput where one lies outside or is empty."""
    if len(boxes) != len(images):
        raise BadInput(f"discover: {len(images)} images and boxes of {len(boxes)}; there are some for each image")
    height, width = images.shape[2:]
    found = []
    for index, each in enumerate(boxes):
        mine = torch.as_tensor(each, dtype=torch.float64).cpu()
        mine = mine[None] if mine.ndim == 1 else mine
        if mine.ndim != 2 or mine.shape[1] != 4 or not len(mine) or not bool(mine.isfinite().all()):
            raise BadInput(f"discover: the boxes of image {index} are {tuple(mine.shape)}; x0, y0, x1, y1 for each")
        cut = torch.minimum(mine.clamp_min(0), mine.new_tensor([width, height] * 2))
        wrong = (cut[:, 2:] <= cut[:, :2]).any(1)
        if bool(wrong.any()):
            raise BadInput(
                f"discover: box {mine[wrong][0].tolist()} of image {index} has no part in an image {width} wide and "
                f"{height} high; boxes are x0, y0, x1, y1 in pixels of the image"
            )
        found.append(cut)
    return found


def _mask_iou(found: Discovery, stride: tuple[float, float], masks: Tensor, ignore: int | None) -> float:
    """The mean over images of the IoU of the mask with the true one, at full resolution."""
    height, width = masks.shape[1:]
    device = found.masks.device
    rows = (torch.arange(height, device=device) / stride[0]).long().clamp_max(found.masks.shape[1] - 1)
    columns = (torch.arange(width, device=device) / stride[1]).long().clamp_max(found.masks.shape[2] - 1)
    total = 0.0
    for part in batches(len(masks), 256):
        truth = masks[part].to(device)
        mine = found.masks[part][:, rows][:, :, columns]
        counted = truth != ignore if ignore is not None else torch.ones_like(truth, dtype=torch.bool)
        theirs = (truth != 0) & counted
        both, either = (mine & theirs).sum((1, 2)), ((mine | theirs) & counted).sum((1, 2))
        total += float(torch.where(either > 0, both / either.clamp_min(1), 1.0).sum())
    return total / len(masks)
