"""Segmentation by a linear map of frozen patch tokens: what a 1x1 convolution can read from them.

    logits = up-sample(W z + b),    z the tokens of one block, or of several side by side, at every patch

Logits are brought to the size of the labels (bilinear), and compared there: one confusion matrix over all pixels of the
set, the mean IoU from it. W is trained by gradient descent on every labelled pixel (segment-linear-v1), or is the ridge
regression of each patch's share of classes, in closed form (segment-ridge-v1):

    W = argmin sum_i w_i |W z_i + b - y_i|^2 + penalty n |W|^2,   w_i the labelled share of patch i, y_i that of classes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._checks import kind_of
from unskip.data import Normalise
from unskip.errors import BadInput
from unskip.evals._iou import class_iou, confusion, mean_of
from unskip.evals._patches import chunks, read_patches
from unskip.evals._registry import protocol as find
from unskip.evals._registry import register
from unskip.evals._split import Options, Split
from unskip.optim import schedules
from unskip.training import Precision

_EPS = 1e-6


@dataclass(frozen=True)
class Segmentation:
    """The result of a linear map on blocks. `iou` has an entry a class, nan for one that is on neither side."""

    mean_iou: float
    iou: list[float]
    accuracy: float  # of all labelled pixels
    blocks: tuple[int, ...]
    protocol: str
    changes: dict[str, Any] = field(default_factory=dict)


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
    normalise: Normalise | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Segmentation:
    """Trains a linear map on the images and masks of `train` and evaluates it on those of `test`.

    Images are (n, channels, height, width), bytes or normalised floats, and masks (n, height, width). Bytes are
    normalised as the model's own preprocessing says, or as `normalise` does, (mean, std). Several `blocks` are taken
    together, their tokens side by side (multi-scale). Pixels that are `ignore` do not count. For the curve over depth
    call `unskip.evals.evaluate`.
    """
    settings = find(protocol, evaluate_segmentation).settings_with(changes)
    splits: list[Split] = []
    for name, (images, masks) in (("train", train), ("test", test)):
        _check(name, masks, tuple(images.shape), classes, ignore)
        parts = (images[part] for part in chunks(len(images), batch))
        read, all_blocks = read_patches(model, parts, blocks, precision=precision, normalise=normalise)
        chosen = [blocks] if isinstance(blocks, int) else blocks
        wanted = tuple(index % len(all_blocks) for index in chosen)
        tokens = torch.cat([read.blocks[index] for index in wanted], 2)
        held: dict[str, Any] = {"grid": read.grid, "stride": read.stride, "size": read.size, "masks": masks}
        labels = torch.zeros(len(images), dtype=torch.int64)
        splits.append(Split(labels, patches=tokens, ignore=ignore, options=Options(seed=seed), **held))
    ious, accuracy = _segmented(splits[0], splits[1], classes, settings)
    return Segmentation(mean_of(ious), ious, accuracy, wanted, protocol, dict(changes or {}))


@register(
    "segment-linear-v1",
    needs="patches",
    about="A linear layer on frozen patch tokens after batch norm without affine, logits brought to the size of the "
    "labels (bilinear), cross entropy of every labelled pixel; mean IoU from one confusion matrix over the set.",
    truth="masks",
    fixed=("solver", "flip"),
    positive=("epochs", "batch", "lr"),
    solver="adamw",
    epochs=40,
    batch=32,
    lr=1e-3,
    weight_decay=1e-4,
    batch_norm=True,
    start=0.01,
    flip=False,
)
@register(
    "segment-ridge-v1",
    needs="patches",
    about="The same map in closed form: ridge regression of each patch's share of classes on standardised tokens, "
    "penalty times patches; logits brought to the size of the labels (bilinear). No seed, and fast.",
    truth="masks",
    fixed=("solver",),
    positive=("penalty",),
    solver="ridge",
    penalty=1e-3,
)
def evaluate_segmentation(train: Split, test: Split, **settings: Any) -> dict[str, float]:
    """Of the patches of one block."""
    highest = [_highest(each) for each in (train, test)]
    for name, each in (("train", train), ("test", test)):
        _check(name, each.masks, (len(each), 0, *each.size), 1 + max(highest), each.ignore)
    ious, accuracy = _segmented(train, test, 1 + max(highest), settings)
    return {"mean_iou": mean_of(ious), "pixel_accuracy": accuracy} | {f"iou_{i}": value for i, value in enumerate(ious)}


def _highest(split: Split) -> int:
    """The highest class of the masks."""
    known = split.masks if split.ignore is None else split.masks[split.masks != split.ignore]
    return int(known.max()) if known.numel() else 0


def _segmented(train: Split, test: Split, classes: int, settings: Mapping[str, Any]) -> tuple[list[float], float]:
    """The IoU of each class, and the share of pixels that are right."""
    x, y = (_read(name, each, classes) for name, each in (("train", train), ("test", test)))
    head = _ridge(x, settings) if settings["solver"] == "ridge" else _descent(x, settings, train.options.seed)
    matrix = _matrix(head, y)
    return class_iou(matrix), float(matrix.diagonal().sum()) / max(1, int(matrix.sum()))


@dataclass(frozen=True)
class _Read:
    """Tokens on their grid (n, dim, rows, columns), and the masks that are to be read from them."""

    maps: Tensor
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


def _read(name: str, split: Split, classes: int) -> _Read:
    if not bool(split.patches.isfinite().all()):  # a class would be found in them all the same
        raise BadInput(f"segment: {name} features are not finite; look at the model and the images")
    covered = tuple(
        side / (step * count) for side, step, count in zip(split.size, split.stride, split.grid, strict=True)
    )
    masks = split.masks.byte() if split.masks.dtype == torch.bool else split.masks
    maps = split.patches.mT.unflatten(2, split.grid)
    return _Read(maps, (covered[0], covered[1]), masks.to(maps.device), classes, split.ignore)


def _check(name: str, masks: Any, images: tuple[int, ...], classes: int, ignore: int | None) -> None:
    """Raises BadInput where masks do not fit images of a shape (n, channels, height, width)."""
    if not isinstance(masks, Tensor) or masks.is_floating_point() or masks.ndim != 3 or len(masks) != images[0]:
        raise BadInput(
            f"segment: {name} masks are whole numbers (n, height, width), one for each image, got {kind_of(masks)}"
        )
    if not len(masks):
        raise BadInput(f"segment: there are no {name} images")
    (height, width), (tall, wide) = images[2:], masks.shape[1:]
    if height * wide != width * tall:
        raise BadInput(
            f"segment: {name} masks are {tall} x {wide} and the images {height} x {width}; their sides are not in the "
            "same proportion, so a mask cannot lie over its image"
        )
    values = masks.unique()
    wrong = [int(v) for v in values if not 0 <= int(v) < classes and (ignore is None or int(v) != ignore)]
    if wrong:
        raise BadInput(
            f"segment: {name} masks hold {wrong[:5]}, and there are {classes} classes, 0 to {classes - 1}; name the "
            "value that stands for no class as ignore"
        )
    if ignore is not None and not bool((values != ignore).any()):
        raise BadInput(f"segment: no pixel of the {name} masks has a class")


class _Head(NamedTuple):
    weight: Tensor  # (classes, dim, 1, 1)
    bias: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return F.conv2d(z, self.weight.to(z), self.bias.to(z))


def _descent(read: _Read, settings: Mapping[str, Any], seed: int) -> _Head:
    """By AdamW, on every labelled pixel; batch norm becomes part of the map."""
    z = read.maps
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


def _ridge(read: _Read, settings: Mapping[str, Any]) -> _Head:
    """In closed form, on the share of classes in each patch; standardising becomes part of the map."""
    z = read.maps
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
    for part in chunks(len(x), 65536):
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
def _matrix(head: _Head, read: _Read) -> Tensor:
    """The confusion matrix over all pixels."""
    z = read.maps
    total = torch.zeros(read.classes, read.classes, dtype=torch.int64, device=z.device)
    for part in chunks(len(z), 64):
        predicted = read.upsampled(head(z[part])).argmax(1)
        total += confusion(predicted, read.masks[part], read.classes, read.ignore)
    return total
