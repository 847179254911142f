"""Intersection over union of classes, from one confusion matrix over a whole set, and of boxes.

    IoU_c = C_cc / (sum_j C_cj + sum_i C_ic - C_cc),     C_ij = pixels of class i predicted as class j

The mean is over classes that occur in predictions or targets; a class absent from both does not count.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip._checks import kind_of
from unskip.errors import BadInput


def confusion(predictions: Tensor, targets: Tensor, classes: int, ignore: int | None = None) -> Tensor:
    """Pixel counts (classes, classes), int64, by true and predicted class, without pixels whose target is `ignore`."""
    for name, values in (("predictions", predictions), ("targets", targets)):
        if not isinstance(values, Tensor) or values.is_floating_point() or values.dtype == torch.bool:
            raise BadInput(f"mean_iou: {name} must be integer class indices, got {kind_of(values)}; use argmax first")
    if predictions.shape != targets.shape:
        raise BadInput(
            f"mean_iou: predictions are {tuple(predictions.shape)}, but targets {tuple(targets.shape)}; resize the "
            "predictions to the size of the targets"
        )
    if classes < 1:
        raise BadInput(f"mean_iou: classes is {classes}; it must be 1 or more")
    true = targets.flatten().long()
    predicted = predictions.flatten().to(true.device).long()
    if ignore is not None:
        counted = true != ignore
        true, predicted = true[counted], predicted[counted]
    for name, values in (("targets", true), ("predictions", predicted)):
        wrong = (values < 0) | (values >= classes)
        if bool(wrong.any()):
            raise BadInput(
                f"mean_iou: {name} hold class {int(values[wrong][0])}, but the {classes} classes are 0 to "
                f"{classes - 1}; pass the value for unlabelled pixels as ignore"
            )
    return torch.bincount(true * classes + predicted, minlength=classes * classes).view(classes, classes)


def class_iou(matrix: Tensor) -> list[float]:
    """The IoU of every class from a confusion matrix; nan for a class absent from predictions and targets."""
    both = matrix.diagonal().double()
    either = matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
    return [float(x / y) if y else math.nan for x, y in zip(both, either, strict=True)]


def mean_of(ious: list[float]) -> float:
    """The mean without nan; nan if nothing else is left."""
    known = [value for value in ious if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def mean_iou(predictions: Tensor, targets: Tensor, classes: int, ignore: int | None = None) -> float:
    """The mean IoU over classes for sets of masks, (images, height, width) or any other common shape.

    All pixels of all images count equally, except those whose target is `ignore`. Classes absent from both predictions
    and targets are left out; without any class the mean is nan.
    """
    return mean_of(class_iou(confusion(predictions, targets, classes, ignore)))


def pair_iou(one: Tensor, other: Tensor) -> Tensor:
    """The pairwise IoU of boxes (..., 4): x0, y0, x1, y1, end exclusive; 0 for an empty box."""
    one, other = one.double(), other.double()
    low, high = torch.maximum(one[..., :2], other[..., :2]), torch.minimum(one[..., 2:], other[..., 2:])
    both = (high - low).clamp_min(0).prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).clamp_min(0).prod(-1) for boxes in (one, other)]
    either = areas[0] + areas[1] - both
    return torch.where(either > 0, both / either.clamp_min(1e-300), 0.0)
