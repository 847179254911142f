"""Segmentation by a linear map of frozen patch tokens, a 1x1 convolution.

    logits = upsample(W z + b),    z the tokens of one block, or of several concatenated, at every patch

Logits are upsampled to the size of the masks (bilinear). The mean IoU comes from one confusion matrix over all pixels
of the set. W is trained by gradient descent on every labelled pixel (segment-linear-v1), or is the ridge regression of
the class fractions y_i of each patch, in closed form (segment-ridge-v1):

    W = argmin sum_i w_i |W z_i + b - y_i|^2 + penalty n |W|^2,   w_i the labelled fraction of patch i
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
    """The result of a linear map on blocks. `iou` is by class, nan for one absent from predictions and targets."""

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
    normalised by the model's preprocessing, or by `normalise`, (mean, std). The tokens of several `blocks` are
    concatenated (multi-scale). Pixels with the value `ignore` do not count. For the curve over depth call
    `unskip.evals.evaluate`.
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
        shape: dict[str, Any] = {"grid": read.grid, "stride": read.stride, "size": read.size}
        labels = torch.zeros(len(images), dtype=torch.int64)
        splits.append(Split(labels, patches=tokens, masks=masks, ignore=ignore, options=Options(seed=seed), **shape))
    ious, accuracy = _evaluate(splits[0], splits[1], classes, settings)
    return Segmentation(mean_of(ious), ious, accuracy, wanted, protocol, dict(changes or {}))


@register(
    "segment-linear-v1",
    needs="patches",
    about="A linear layer on frozen patch tokens after batch norm without affine, logits upsampled to the size of the "
    "masks (bilinear), cross entropy of every labelled pixel; mean IoU from one confusion matrix over the set.",
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
    about="A linear layer in closed form: ridge regression of each patch's class fractions on standardised tokens, "
    "penalty times patches; logits upsampled to the size of the masks (bilinear). No seed, and fast.",
    truth="masks",
    fixed=("solver",),
    positive=("penalty",),
    solver="ridge",
    penalty=1e-3,
)
def evaluate_segmentation(train: Split, test: Split, **settings: Any) -> dict[str, float]:
    """The numbers for the patches of one block."""
    classes = 1 + max(_highest_class(train), _highest_class(test))
    for name, each in (("train", train), ("test", test)):
        _check(name, each.masks, (len(each), 0, *each.size), classes, each.ignore)
    ious, accuracy = _evaluate(train, test, classes, settings)
    return {"mean_iou": mean_of(ious), "pixel_accuracy": accuracy} | {f"iou_{i}": value for i, value in enumerate(ious)}


def _highest_class(split: Split) -> int:
    labelled = split.masks if split.ignore is None else split.masks[split.masks != split.ignore]
    return int(labelled.max()) if labelled.numel() else 0


def _evaluate(train: Split, test: Split, classes: int, settings: Mapping[str, Any]) -> tuple[list[float], float]:
    """The IoU of each class, and the fraction of correct pixels."""
    x, y = (_samples(name, each, classes) for name, each in (("train", train), ("test", test)))
    head = _ridge(x, settings) if settings["solver"] == "ridge" else _descent(x, settings, train.options.seed)
    matrix = _confusion(head, y)
    return class_iou(matrix), float(matrix.diagonal().sum()) / max(1, int(matrix.sum()))


@dataclass(frozen=True)
class _Samples:
    """Tokens on their grid (n, dim, rows, columns), and the masks to predict."""

    maps: Tensor
    size: tuple[int, int]  # height and width of the grid in pixels of the masks, including padding of the image
    masks: Tensor  # (n, height, width)
    classes: int
    ignore: int | None

    def upsampled(self, logits: Tensor) -> Tensor:
        """(n, classes, rows, columns) to (n, classes, height, width): bilinear, then cropped to the image."""
        height, width = self.masks.shape[1:]
        out = F.interpolate(logits, self.size, mode="bilinear", align_corners=False)
        return out[:, :, :height, :width]


def _samples(name: str, split: Split, classes: int) -> _Samples:
    if not bool(split.patches.isfinite().all()):  # argmax would still return classes
        raise BadInput(f"segment: {name} features are not finite; check the model and the images")
    masks = split.masks.byte() if split.masks.dtype == torch.bool else split.masks
    # A padded image covers only part of its grid.
    height, width = (
        round(pixels / (side / (step * count)))
        for pixels, side, step, count in zip(masks.shape[1:], split.size, split.stride, split.grid, strict=True)
    )
    maps = split.patches.mT.unflatten(2, split.grid)
    return _Samples(maps, (height, width), masks.to(maps.device), classes, split.ignore)


def _check(name: str, masks: Any, images: tuple[int, ...], classes: int, ignore: int | None) -> None:
    """Raises BadInput if masks do not fit images of a shape (n, channels, height, width)."""
    if not isinstance(masks, Tensor) or masks.is_floating_point() or masks.ndim != 3 or len(masks) != images[0]:
        raise BadInput(
            f"segment: {name} masks must be whole numbers (n, height, width), one per image, got {kind_of(masks)}"
        )
    if not len(masks):
        raise BadInput(f"segment: there are no {name} images")
    (height, width), (mask_height, mask_width) = images[2:], masks.shape[1:]
    if height * mask_width != width * mask_height:
        raise BadInput(
            f"segment: {name} masks are {mask_height} x {mask_width}, but the images {height} x {width}; masks need "
            "the same aspect ratio as their images"
        )
    values = [int(value) for value in masks.unique()]
    wrong = [value for value in values if not 0 <= value < classes and value != ignore]
    if wrong:
        raise BadInput(
            f"segment: {name} masks hold {wrong[:5]}, but the {classes} classes are 0 to {classes - 1}; pass the "
            "value for unlabelled pixels as ignore"
        )
    if ignore is not None and {*values} <= {ignore}:
        raise BadInput(f"segment: no pixel of the {name} masks has a class")


class _Head(NamedTuple):
    weight: Tensor  # (classes, dim, 1, 1)
    bias: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        return F.conv2d(z, self.weight.to(z), self.bias.to(z))


def _descent(samples: _Samples, settings: Mapping[str, Any], seed: int) -> _Head:
    """A head trained by AdamW on every labelled pixel, with batch norm folded in."""
    z = samples.maps
    count, dim = z.shape[:2]
    draw = torch.Generator().manual_seed(seed)
    start = torch.randn(samples.classes, dim, generator=draw) * settings["start"]
    weight = start.to(z.device)[:, :, None, None].requires_grad_()
    bias = torch.zeros(samples.classes, device=z.device, requires_grad=True)
    mean, variance = z.new_zeros(dim), z.new_ones(dim)
    optimizer = torch.optim.AdamW([weight, bias], lr=settings["lr"], weight_decay=settings["weight_decay"])
    batch = min(settings["batch"], count)
    per_epoch = count // batch
    total = settings["epochs"] * per_epoch
    ignore = -100 if samples.ignore is None else samples.ignore
    for step in range(total):
        if step % per_epoch == 0:
            order = torch.randperm(count, generator=draw).to(z.device)
        rows = order[step % per_epoch * batch :][:batch]
        part, truth = z[rows], samples.masks[rows].long()
        if settings["batch_norm"]:
            batch_variance, batch_mean = torch.var_mean(part, (0, 2, 3), correction=0)
            part = (part - batch_mean[:, None, None]) / (batch_variance[:, None, None] + _EPS).sqrt()
            rate = 0.1 if step else 1.0  # a small set has too few steps to forget initial statistics
            mean.lerp_(batch_mean, rate)
            variance.lerp_(batch_variance, rate)
        schedules.apply(optimizer, lr=schedules.warmup_cosine(step, total=total))
        with torch.enable_grad():
            logits = samples.upsampled(F.conv2d(part, weight, bias))
            labelled = (truth != ignore).sum().clamp_min(1)
            loss = F.cross_entropy(logits, truth, ignore_index=ignore, reduction="sum") / labelled
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
    scale = (variance + _EPS).rsqrt() if settings["batch_norm"] else torch.ones_like(variance)
    flat = weight.detach()[:, :, 0, 0] * scale
    return _Head(flat[:, :, None, None], bias.detach() - flat @ mean)


def _ridge(samples: _Samples, settings: Mapping[str, Any]) -> _Head:
    """A head in closed form on the class fractions of each patch, with standardisation folded in."""
    z = samples.maps
    fractions, weights = _class_fractions(samples)
    x = z.movedim(1, -1).flatten(0, 2)
    w = weights.flatten().double()
    total = w.sum()
    mean = w @ x.double() / total
    std = (w @ (x.double() - mean).square() / total).sqrt()
    std = torch.where(std > _EPS * std.max().clamp_min(_EPS), std, 1.0)
    dim = x.shape[1]
    gram = x.new_zeros(dim, dim, dtype=torch.float64)
    right = x.new_zeros(dim, samples.classes, dtype=torch.float64)
    y = fractions.flatten(0, 2).double()
    mean_y = w @ y / total
    for part in chunks(len(x), 65536):
        standardised = (x[part].double() - mean) / std
        weighted = standardised * w[part, None]
        gram += weighted.T @ standardised
        right += weighted.T @ (y[part] - mean_y)
    gram.diagonal().add_(settings["penalty"] * total)
    weight = torch.cholesky_solve(right, torch.linalg.cholesky(gram)).T / std
    return _Head(weight[:, :, None, None], mean_y - weight @ mean)


def _class_fractions(samples: _Samples) -> tuple[Tensor, Tensor]:
    """Class fractions of each patch's labelled pixels (n, rows, columns, classes), and the labelled fraction."""
    fractions, weights = [], []
    height, width = samples.size
    grid = (samples.maps.shape[2], samples.maps.shape[3])
    for part in samples.masks.split(64):
        labelled = torch.ones_like(part, dtype=torch.bool) if samples.ignore is None else part != samples.ignore
        one_hot = F.one_hot(torch.where(labelled, part.long(), 0), samples.classes) * labelled[..., None]
        one_hot = F.pad(one_hot.movedim(-1, 1).float(), (0, width - part.shape[2], 0, height - part.shape[1]))
        pooled = F.adaptive_avg_pool2d(one_hot, grid).movedim(1, -1)
        weight = pooled.sum(-1)
        fractions.append(pooled / weight.clamp_min(1e-12)[..., None])
        weights.append(weight)
    return torch.cat(fractions), torch.cat(weights)


@torch.no_grad()
def _confusion(head: _Head, samples: _Samples) -> Tensor:
    """The confusion matrix over all pixels."""
    z = samples.maps
    total = torch.zeros(samples.classes, samples.classes, dtype=torch.int64, device=z.device)
    for part in chunks(len(z), 64):
        predicted = samples.upsampled(head(z[part])).argmax(1)
        total += confusion(predicted, samples.masks[part], samples.classes, samples.ignore)
    return total
