"""Object discovery: TokenCut on the features of a backbone, evaluated by CorLoc and by masks.

    CorLoc = fraction of images whose box has an IoU of at least 1/2 with any of the image's true boxes

As in TokenCut (arXiv 2202.11539): keys of the last block by default; boxes are converted from patches to pixels and
clipped to the image. An image without an object counts as a miss.
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
    """CorLoc, the mean IoU of the masks if true masks are given, and the fractions of unsure and empty results.

    `images` are (n, channels, height, width), normalised floats or bytes. Bytes are normalised by the model's
    preprocessing, or by `normalise`, (mean, std). `boxes` has one box for each image, (n, 4), or a tensor (k, 4) for
    each image: x0, y0, x1, y1 in pixels, clipped to the image. `masks` are (n, height, width), nonzero on the object,
    of any size with the aspect ratio of the images. Pixels with the value `ignore` do not count, nor do images that
    have no other pixels. For the curve over depth call `unskip.evals.evaluate`.
    """
    settings = find(protocol, evaluate_discovery).settings_with(changes)
    if not isinstance(images, Tensor) or images.ndim != 4 or not len(images):
        raise BadInput(
            f"discover: images must be a non-empty tensor (n, channels, height, width), got {kind_of(images)}"
        )
    size = (images.shape[2], images.shape[3])
    true_boxes(boxes, len(images), size)
    if masks is not None:
        _check_masks(masks, len(images), size, ignore)
    batch = batch or (1024 if next(model.parameters()).is_cuda else 64)
    parts = (images[part] for part in chunks(len(images), batch))
    read, _ = read_patches(model, parts, block, what, precision=precision, normalise=normalise)
    (tokens,) = read.blocks.values()
    truth: dict[str, Any] = {"boxes": boxes, "masks": masks, "ignore": ignore}
    split = Split(torch.zeros(len(images)), patches=tokens, grid=read.grid, stride=read.stride, size=read.size, **truth)
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
    """The numbers for the patches of one block; masks are compared if there are any."""
    truth, owner = true_boxes(test.boxes, len(test), test.size)
    if test.masks is not None:
        _check_masks(test.masks, len(test), test.size, test.ignore)
    objects = tokencut(test.patches, test.grid, tau)
    predicted = in_pixels(objects.boxes, test.stride, test.size).cpu()
    matches = pair_iou(predicted[owner], truth) >= iou
    hits = torch.zeros(len(test)).index_add_(0, owner, matches.float()) > 0
    numbers = {
        "corloc": float(hits.double().mean()),
        "unsure": float((~objects.sure).double().mean()),
        "empty": float((~objects.masks.flatten(1).any(1)).double().mean()),
    }
    if test.masks is not None:
        scale = test.masks.shape[1] / test.size[0]  # mask pixels per image pixel
        stride = (test.stride[0] * scale, test.stride[1] * scale)
        numbers["mask_iou"] = _mask_iou(objects, stride, test.masks, test.ignore)
    return numbers


def in_pixels(boxes: Tensor, stride: tuple[float, float], size: tuple[int, int]) -> Tensor:
    """Boxes in patches converted to pixels, clipped to an image of `size` (height, width)."""
    scale = boxes.new_tensor([stride[1], stride[0]] * 2, dtype=torch.float64)
    edge = boxes.new_tensor([size[1], size[0]] * 2, dtype=torch.float64)
    return torch.minimum(boxes * scale, edge)


def true_boxes(boxes: Tensor | Sequence[Tensor], images: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """All boxes (m, 4), clipped to their images, and the image index of each box (m,).

    Raises BadInput for a box outside its image, an empty box, or an image without boxes.
    """
    if len(boxes) != images:
        raise BadInput(f"discover: {images} images, but boxes for {len(boxes)}; every image needs boxes")
    height, width = size
    if isinstance(boxes, Tensor) and boxes.ndim == 2:
        boxes = boxes[:, None]
    by_image = boxes if isinstance(boxes, Tensor) else [torch.as_tensor(each, dtype=torch.float64) for each in boxes]
    counts = []
    for index, each in enumerate(by_image):
        shape = (1, *each.shape) if each.ndim == 1 else tuple(each.shape)
        if len(shape) != 2 or shape[1] != 4 or not shape[0]:
            raise BadInput(
                f"discover: the boxes of image {index} have shape {tuple(each.shape)}; they must be x0, y0, x1, y1"
            )
        counts.append(shape[0])
    owner = torch.arange(images).repeat_interleave(torch.tensor(counts))
    flat = torch.cat([each.reshape(-1, 4) for each in by_image]).to("cpu", torch.float64)
    clipped = torch.minimum(flat.clamp_min(0), flat.new_tensor([width, height] * 2))
    outside = f"is empty or outside its image of width {width} and height {height}; boxes are x0, y0, x1, y1 in pixels"
    for wrong, problem in (
        (~flat.isfinite().all(1), "is not finite"),
        ((clipped[:, 2:] <= clipped[:, :2]).any(1), outside),
    ):
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            raise BadInput(f"discover: box {flat[first].tolist()} of image {int(owner[first])} {problem}")
    return clipped, owner


def _check_masks(masks: Tensor, images: int, size: tuple[int, int], ignore: int | None) -> None:
    if not isinstance(masks, Tensor) or masks.ndim != 3 or len(masks) != images:
        raise BadInput(f"discover: masks must be a tensor (n, height, width), one per image, got {kind_of(masks)}")
    if masks.shape[1] * size[1] != masks.shape[2] * size[0]:
        raise BadInput(
            f"discover: masks are {tuple(masks.shape)}, but the images {size[0]} x {size[1]}; masks need the same "
            "aspect ratio as their images"
        )
    if ignore is not None and bool((masks == ignore).all()):
        raise BadInput(f"discover: every pixel of the masks is {ignore}, the value to ignore")


def _mask_iou(objects: Discovery, stride: tuple[float, float], masks: Tensor, ignore: int | None) -> float:
    """The mean IoU of predicted and true masks over images, at the resolution of the true masks."""
    height, width = masks.shape[1:]
    device = objects.masks.device
    rows = (torch.arange(height, device=device) / stride[0]).long().clamp_max(objects.masks.shape[1] - 1)
    columns = (torch.arange(width, device=device) / stride[1]).long().clamp_max(objects.masks.shape[2] - 1)
    total, images = 0.0, 0
    for part in chunks(len(masks), 256):
        truth = masks[part].to(device)
        counted = truth != ignore if ignore is not None else torch.ones_like(truth, dtype=torch.bool)
        predicted = objects.masks[part][:, rows][:, :, columns] & counted
        true = (truth != 0) & counted
        both, either = (predicted & true).sum((1, 2)), (predicted | true).sum((1, 2))
        labelled = counted.flatten(1).any(1)
        total += float(torch.where(either > 0, both / either.clamp_min(1), 1.0)[labelled].double().sum())
        images += int(labelled.sum())
    return total / images
