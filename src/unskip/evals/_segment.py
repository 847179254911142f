"""Segmentation by a linear map of frozen patch tokens: what a 1x1 convolution can read from them.

    logits = up-sample(W z + b),    z the tokens of one block, or of several side by side, at every patch

Logits are brought to the size of the labels (bilinear), and judged there: one confusion matrix over all pixels of the
set, the mean IoU from it. W is trained by gradient descent on every labelled pixel (segment-linear-v1), or is the ridge
regression of each patch's share of classes, in closed form (segment-ridge-v1):

    W = argmin sum_i w_i |W z_i + b - y_i|^2 + penalty n |W|^2,   w_i the labelled share of patch i, y_i that of classes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.errors import BadInput
from unskip.evals._extract import Precision
from unskip.evals._iou import class_iou, confusion, mean_of
from unskip.evals._patches import Reader, batches
from unskip.evals._protocols import settings_of
from unskip.optim import schedules

_EPS = 1e-6


@dataclass(frozen=True)
class Segmentation:
    """What a linear map reads from blocks. `iou` has an entry a class, nan for one that is on neither side."""

    mean_iou: float
    iou: list[float]
    accuracy: float  # of all labelled pixels
    blocks: tuple[int, ...]
    protocol: str
    changes: dict[str, Any] = field(default_factory=dict)


class Masked(NamedTuple):
    """Images with their masks: (n, channels, height, width), bytes or normalised, and (n, height, width)."""

    images: Tensor
    masks: Tensor


def segment(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: int,
    *,
    blocks: int | Sequence[int] = -1,
    ignore: int | None = None,
    protocol: str = "segment-linear-v1",
    seed: int = 0,
    batch: int = 64,
    precision: Precision = "float32",
    changes: Mapping[str, Any] | None = None,
) -> Segmentation:
    """Trains a linear map on the images and masks of `train` and judges it on those of `test`.

    Several `blocks` are taken together, their tokens side by side (multi-scale). Pixels that are `ignore` do not count.
    """
    asked = (blocks,) if isinstance(blocks, int) else tuple(blocks)
    (found,) = _segment(model, train, test, classes, [asked], ignore, protocol, seed, batch, precision, changes)
    return found


def segment_blocks(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: int,
    *,
    blocks: Sequence[int] | Literal["all"] = "all",
    ignore: int | None = None,
    protocol: str = "segment-ridge-v1",
    seed: int = 0,
    batch: int = 64,
    precision: Precision = "float32",
    changes: Mapping[str, Any] | None = None,
) -> list[Segmentation]:
    """The curve over depth: each block on its own, from one pass over the images."""
    each: Any = "all" if isinstance(blocks, str) else [(index,) for index in blocks]
    return _segment(model, train, test, classes, each, ignore, protocol, seed, batch, precision, changes)


def _segment(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: int,
    sets: Any,
    ignore: int | None,
    protocol: str,
    seed: int,
    batch: int,
    precision: Precision,
    changes: Mapping[str, Any] | None,
) -> list[Segmentation]:
    settings = settings_of(protocol, "segment", changes)
    where = next(model.parameters()).device
    learnt, judged = (
        _checked(name, Masked(*each), classes, ignore, where) for name, each in (("train", train), ("test", test))
    )
    flat = "all" if sets == "all" else sorted({index for each in sets for index in each})
    reader = Reader(model, learnt.images, flat)
    if sets == "all":
        sets = [(index,) for index in reader.wanted]
    x, y = (
        _read(name, reader, each, classes, ignore, batch, precision)
        for name, each in (("train", learnt), ("test", judged))
    )
    found = []
    for each in sets:
        wanted = tuple(index % len(reader.axes) for index in each)
        z, t = (torch.cat([side.maps[index] for index in wanted], 1) for side in (x, y))
        head = _ridge(z, x, settings) if settings["solver"] == "ridge" else _descent(z, x, settings, seed)
        matrix = _matrix(head, t, y)
        ious = class_iou(matrix)
        right = float(matrix.diagonal().sum()) / max(1, int(matrix.sum()))
        found.append(Segmentation(mean_of(ious), ious, right, wanted, protocol, dict(changes or {})))
    return found


@dataclass(frozen=True)
class _Read:
    """Tokens on their grid (n, dim, rows, columns) by block, and the masks that are to be read from them."""

    maps: dict[int, Tensor]
    covered: tuple[float, float]  # shares of the grid's height and width that the image fills
    masks: Tensor  # (n, height, width)
    classes: int
    ignore: int | None

    @property
    def whole(self) -> list[int]:
        """Height and width of the grid in pixels of the masks, what lies beyond the image included."""
        return [round(side / share) for side, share in zip(self.masks.shape[1:], self.covered, strict=True)]

    def upsampled(self, logits: Tensor) -> Tensor:
        """(n, classes, rows, columns) to (n, classes, height, width): bilinear, without what lies beyond the image."""
        height, width = self.masks.shape[1:]
        out = F.interpolate(logits, self.whole, mode="bilinear", align_corners=False)
        return out[:, :, :height, :width]


def _read(
    name: str, reader: Reader, data: Masked, classes: int, ignore: int | None, batch: int, precision: Precision
) -> _Read:
    parts: dict[int, list[Tensor]] = {}
    for part in batches(len(data.images), batch):
        read = reader(data.images[part], precision)
        for index, tokens in read.blocks.items():
            parts.setdefault(index, []).append(tokens.mT.unflatten(2, read.grid))
    height, width = data.images.shape[2:]
    covered = (height / (read.stride[0] * read.grid[0]), width / (read.stride[1] * read.grid[1]))
    maps = {index: torch.cat(each) for index, each in parts.items()}
    broken = [index for index, each in maps.items() if not bool(each.isfinite().all())]
    if broken:  # a class would be found in them all the same
        raise BadInput(f"segment: {name} features of blocks {broken} are not finite; look at the model and the images")
    return _Read(maps, covered, data.masks, classes, ignore)


def _checked(name: str, data: Masked, classes: int, ignore: int | None, device: torch.device) -> Masked:
    images, masks = data
    if not isinstance(masks, Tensor) or masks.is_floating_point() or masks.ndim != 3 or len(masks) != len(images):
        found = f"{masks.dtype} {tuple(masks.shape)}" if isinstance(masks, Tensor) else type(masks).__name__
        raise BadInput(f"segment: {name} masks are whole numbers (n, height, width), one for each image, got {found}")
    if not len(images):
        raise BadInput(f"segment: there are no {name} images")
    (height, width), (tall, wide) = images.shape[2:], masks.shape[1:]
    if height * wide != width * tall:
        raise BadInput(
            f"segment: {name} masks are {tall} x {wide} and the images {height} x {width}; their sides are not in the "
            "same proportion, so a mask cannot lie over its image"
        )
    masks = masks.byte() if masks.dtype == torch.bool else masks
    values = masks.unique()
    wrong = [int(v) for v in values if not 0 <= int(v) < classes and (ignore is None or int(v) != ignore)]
    if wrong:
        raise BadInput(
            f"segment: {name} masks hold {wrong[:5]}, and there are {classes} classes, 0 to {classes - 1}; name the "
            "value that stands for no class as ignore"
        )
    if ignore is not None and not bool((values != ignore).any()):
        raise BadInput(f"segment: no pixel of the {name} masks has a class")
    return Masked(images, masks.to(device))  # once, and not batch by batch


class _Head(NamedTuple):
    weight: Tensor  # (classes, dim, 1, 1)
    bias: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return F.conv2d(z, self.weight.to(z), self.bias.to(z))


def _descent(z: Tensor, read: _Read, settings: Mapping[str, Any], seed: int) -> _Head:
    """By AdamW, on every labelled pixel; batch norm becomes part of the map."""
    count, dim = z.shape[:2]
    draw = torch.Generator().manual_seed(seed)
    start = torch.randn(read.classes, dim, generator=draw) * settings["start"]
    weight = start.to(z.device)[:, :, None, None].requires_grad_()
    bias = torch.zeros(read.classes, device=z.device, requires_grad=True)
    mean, variance = z.new_zeros(dim), z.new_ones(dim)
    optimizer = torch.optim.AdamW([weight, bias], lr=settings["lr"], weight_decay=settings["weight_decay"])
    batch = min(settings["batch"], count)
    per_epoch = count // batch
    total = settings["epochs"] * per_epoch
    skipped = -100 if read.ignore is None else read.ignore
    for step in range(total):
        if step % per_epoch == 0:
            order = torch.randperm(count, generator=draw).to(z.device)
        rows = order[step % per_epoch * batch :][:batch]
        part, truth = z[rows], read.masks[rows].long()
        if settings["batch_norm"]:
            spread, middle = torch.var_mean(part, (0, 2, 3), correction=0)
            part = (part - middle[:, None, None]) / (spread[:, None, None] + _EPS).sqrt()
            rate = 0.1 if step else 1.0  # from the first batch on: a small set has few steps to forget a start in
            mean.lerp_(middle, rate)
            variance.lerp_(spread, rate)
        schedules.apply(optimizer, lr=schedules.warmup_cosine(step, total=total))
        with torch.enable_grad():
            logits = read.upsampled(F.conv2d(part, weight, bias))
            labelled = (truth != skipped).sum().clamp_min(1)
            loss = F.cross_entropy(logits, truth, ignore_index=skipped, reduction="sum") / labelled
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
    scale = (variance + _EPS).rsqrt() if settings["batch_norm"] else torch.ones_like(variance)
    flat = weight.detach()[:, :, 0, 0] * scale
    return _Head(flat[:, :, None, None], bias.detach() - flat @ mean)


def _ridge(z: Tensor, read: _Read, settings: Mapping[str, Any]) -> _Head:
    """In closed form, on the share of classes in each patch; standardising becomes part of the map."""
    shares, weights = _shares(read, (z.shape[2], z.shape[3]))
    x = z.movedim(1, -1).flatten(0, 2)
    w = weights.flatten().double()
    total = w.sum()
    mean = w @ x.double() / total
    std = (w @ (x.double() - mean).square() / total).sqrt()
    std = torch.where(std > _EPS * std.max().clamp_min(_EPS), std, 1.0)
    dim = x.shape[1]
    gram = x.new_zeros(dim, dim, dtype=torch.float64)
    right = x.new_zeros(dim, read.classes, dtype=torch.float64)
    y = shares.flatten(0, 2).double()
    middle = w @ y / total
    for part in batches(len(x), 65536):
        each = (x[part].double() - mean) / std
        heavy = each * w[part, None]
        gram += heavy.T @ each
        right += heavy.T @ (y[part] - middle)
    gram.diagonal().add_(settings["penalty"] * total)
    weight = torch.cholesky_solve(right, torch.linalg.cholesky(gram)).T / std
    return _Head(weight[:, :, None, None], middle - weight @ mean)


def _shares(read: _Read, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Of each patch the share of each class in its labelled pixels (n, rows, columns, classes), and their share."""
    shares, weights = [], []
    for part in read.masks.split(64):
        labelled = torch.ones_like(part, dtype=torch.bool) if read.ignore is None else part != read.ignore
        hot = F.one_hot(torch.where(labelled, part.long(), 0), read.classes) * labelled[..., None]
        hot = F.pad(hot.movedim(-1, 1).float(), (0, read.whole[1] - part.shape[2], 0, read.whole[0] - part.shape[1]))
        pooled = F.adaptive_avg_pool2d(hot, grid).movedim(1, -1)
        weight = pooled.sum(-1)
        shares.append(pooled / weight.clamp_min(1e-12)[..., None])
        weights.append(weight)
    return torch.cat(shares), torch.cat(weights)


@torch.no_grad()
def _matrix(head: _Head, z: Tensor, read: _Read) -> Tensor:
    """The confusion matrix over all pixels."""
    total = torch.zeros(read.classes, read.classes, dtype=torch.int64, device=z.device)
    for part in batches(len(z), 64):
        predicted = read.upsampled(head(z[part])).argmax(1)
        total += confusion(predicted, read.masks[part], read.classes, read.ignore)
    return total
