"""Object discovery: TokenCut on the features of a backbone, evaluated by CorLoc and by masks.

    CorLoc = share of images whose box has an IoU of at least 1/2 with any of the image's true boxes

As in TokenCut (arXiv 2202.11539): keys of the last block by default, boxes of patches in pixels, cut off at the edge of
the image. An image without an answer is a miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unskip._checks import kind_of
from unskip.data import Normalise
from unskip.errors import BadInput
from unskip.evals._iou import pair_iou
from unskip.evals._patches import chunks, read_patches
from unskip.evals._registry import What, register
from unskip.evals._registry import protocol as find
from unskip.evals._split import Split
from unskip.evals._tokencut import Discovery, tokencut
from unskip.training import Precision


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
    normalise: Normalise | None = None,
    changes: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """CorLoc, and the mean IoU of the masks where true ones are given, with the shares of unsure and empty answers.

    `images` are (n, channels, height, width), normalised floats or bytes; bytes are normalised as the model's own
    preprocessing says, or as `normalise` does, (mean, std). `boxes` holds one box an image, (n, 4), or a tensor (k, 4)
    of them for each: x0, y0, x1, y1 in pixels. What reaches over the edge of the image is cut off. `masks` are (n,
    height, width), not 0 where the object is, of any size in the proportion of the images. Pixels that are `ignore` do
    not count, nor do images that have no others. For the curve over depth call `unskip.evals.evaluate`.
    """
    settings = find(protocol, evaluate_discovery).settings_with(changes)
    size = _shape(images)
    true_boxes(boxes, len(images), size)
    if masks is not None:
        _check_masks(masks, len(images), size, ignore)
    size_of_batch = batch or (1024 if next(model.parameters()).is_cuda else 64)
    parts = (images[part] for part in chunks(len(images), size_of_batch))
    read, _ = read_patches(model, parts, block, what, precision=precision, normalise=normalise)
    (tokens,) = read.blocks.values()
    held: dict[str, Any] = {"grid": read.grid, "stride": read.stride, "size": read.size, "masks": masks}
    split = Split(torch.zeros(len(images)), patches=tokens, boxes=boxes, ignore=ignore, **held)
    return evaluate_discovery(split, split, **settings)


@register(
    "discover-tokencut-v1",
    needs="patches",
    about="TokenCut on keys, CorLoc against all boxes of an image: arXiv 2202.11539.",
    fractions=("corloc", "unsure", "empty"),
    what="keys",
    truth="boxes",
    train=False,
    fixed=("floor",),
    tau=0.2,
    floor=1e-5,
    iou=0.5,
)
def evaluate_discovery(train: Split, test: Split, tau: float, floor: float, iou: float) -> dict[str, float]:
    """Of the patches of one block; masks are compared where there are any."""
    truth, owner = true_boxes(test.boxes, len(test), test.size)
    if test.masks is not None:
        _check_masks(test.masks, len(test), test.size, test.ignore)
    objects = tokencut(test.patches, test.grid, tau)
    placed = in_pixels(objects.boxes, test.stride, test.size).cpu()
    close = pair_iou(placed[owner], truth) >= iou
    hits = torch.zeros(len(test)).index_add_(0, owner, close.float()) > 0
    numbers = {
        "corloc": float(hits.double().mean()),
        "unsure": float((~objects.sure).double().mean()),
        "empty": float((~objects.masks.flatten(1).any(1)).double().mean()),
    }
    if test.masks is not None:
        scale = test.masks.shape[1] / test.size[0]  # pixels of a mask to one of its image
        stride = (test.stride[0] * scale, test.stride[1] * scale)
        numbers["mask_iou"] = _mask_iou(objects, stride, test.masks, test.ignore)
    return numbers


def _shape(images: Tensor) -> tuple[int, int]:
    if not isinstance(images, Tensor) or images.ndim != 4 or not len(images):
        raise BadInput(
            f"discover: images are a tensor (n, channels, height, width) and not empty, got {kind_of(images)}"
        )
    return images.shape[2], images.shape[3]


def in_pixels(boxes: Tensor, stride: tuple[float, float], size: tuple[int, int]) -> Tensor:
    """Boxes of patches as boxes of pixels, cut off at the edge of an image (height, width)."""
    scale = boxes.new_tensor([stride[1], stride[0]] * 2, dtype=torch.float64)
    edge = boxes.new_tensor([size[1], size[0]] * 2, dtype=torch.float64)
    return torch.minimum(boxes * scale, edge)


def true_boxes(boxes: Tensor | Sequence[Tensor], images: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """All boxes (m, 4), within their images, and for each the number of its image.

    Raises BadInput where one lies outside or is empty, and where an image has none.
    """
    if len(boxes) != images:
        raise BadInput(f"discover: {images} images and boxes of {len(boxes)}; there are some for each image")
    height, width = size
    if isinstance(boxes, Tensor) and boxes.ndim == 2:
        boxes = boxes[:, None]
    several = [torch.as_tensor(each, dtype=torch.float64) for each in boxes] if not isinstance(boxes, Tensor) else boxes
    counts = []
    for index, each in enumerate(several):
        shape = (1, *each.shape) if each.ndim == 1 else tuple(each.shape)
        if len(shape) != 2 or shape[1] != 4 or not shape[0]:
            raise BadInput(f"discover: the boxes of image {index} are {tuple(each.shape)}; x0, y0, x1, y1 for each")
        counts.append(shape[0])
    owner = torch.arange(images).repeat_interleave(torch.tensor(counts))
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


def _check_masks(masks: Tensor, images: int, size: tuple[int, int], ignore: int | None) -> None:
    if not isinstance(masks, Tensor) or masks.ndim != 3 or len(masks) != images:
        raise BadInput(f"discover: masks are a tensor (n, height, width), one for each image, got {kind_of(masks)}")
    if masks.shape[1] * size[1] != masks.shape[2] * size[0]:
        raise BadInput(
            f"discover: masks are {tuple(masks.shape)}, and the images {size[0]} x {size[1]}; their sides are not in "
            "the same proportion, so a mask cannot lie over its image"
        )
    if ignore is not None and bool((masks == ignore).all()):
        raise BadInput(f"discover: every pixel of the masks is {ignore}, and does not count")


def _mask_iou(objects: Discovery, stride: tuple[float, float], masks: Tensor, ignore: int | None) -> float:
    """The mean over images of the IoU of the mask with the true one, at full resolution."""
    height, width = masks.shape[1:]
    device = objects.masks.device
    rows = (torch.arange(height, device=device) / stride[0]).long().clamp_max(objects.masks.shape[1] - 1)
    columns = (torch.arange(width, device=device) / stride[1]).long().clamp_max(objects.masks.shape[2] - 1)
    total, images = 0.0, 0
    for part in chunks(len(masks), 256):
        truth = masks[part].to(device)
        mine = objects.masks[part][:, rows][:, :, columns]
        counted = truth != ignore if ignore is not None else torch.ones_like(truth, dtype=torch.bool)
        theirs = (truth != 0) & counted
        both, either = (mine & theirs).sum((1, 2)), ((mine | theirs) & counted).sum((1, 2))
        known = counted.flatten(1).any(1)
        total += float(torch.where(either > 0, both / either.clamp_min(1), 1.0)[known].double().sum())
        images += int(known.sum())
    return total / images
