"""Intersection over union: of classes, from one confusion matrix over a whole set, and of boxes.

    IoU_c = C_cc / (sum_j C_cj + sum_i C_ic - C_cc),     C_ij = pixels of class i that were taken for class j

The mean is over classes that occur on either side; a class that is absent from both does not count.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip._checks import kind_of
from unskip.errors import BadInput


def confusion(predictions: Tensor, targets: Tensor, classes: int, ignore: int | None = None) -> Tensor:
    """(classes, classes), int64: pixels by true class and by predicted class. Those whose target is `ignore` are left
    out."""
    for name, values in (("predictions", predictions), ("targets", targets)):
        if not isinstance(values, Tensor) or values.is_floating_point() or values.dtype == torch.bool:
            raise BadInput(
                f"mean_iou: {name} are class numbers of a whole type, got {kind_of(values)}; take the argmax first"
            )
    if predictions.shape != targets.shape:
        raise BadInput(
            f"mean_iou: predictions are {tuple(predictions.shape)} and targets {tuple(targets.shape)}; bring the "
            "predictions to the size of the targets"
        )
    if classes < 1:
        raise BadInput(f"mean_iou: {classes} classes; there is one at least")
    wanted = targets.flatten().long()
    guessed = predictions.flatten().to(wanted.device).long()
    if ignore is not None:
        counted = wanted != ignore
        wanted, guessed = wanted[counted], guessed[counted]
    for name, values in (("targets", wanted), ("predictions", guessed)):
        wrong = (values < 0) | (values >= classes)
        if bool(wrong.any()):
            raise BadInput(
                f"mean_iou: {name} hold class {int(values[wrong][0])}, and there are {classes} classes, 0 to "
                f"{classes - 1}; name the value that stands for no class as ignore"
            )
    return torch.bincount(wanted * classes + guessed, minlength=classes * classes).view(classes, classes)


def class_iou(matrix: Tensor) -> list[float]:
    """The IoU of every class from a confusion matrix; nan for a class that is on neither side."""
    both = matrix.diagonal().double()
    either = matrix.sum(0) + matrix.sum(1) - matrix.diagonal()
    return [float(x / y) if y else math.nan for x, y in zip(both, either, strict=True)]


def mean_of(ious: list[float]) -> float:
    """The mean over the classes that are there; nan where none is."""
    known = [value for value in ious if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def mean_iou(predictions: Tensor, targets: Tensor, classes: int, ignore: int | None = None) -> float:
    """The mean IoU over classes of whole sets of masks, (images, height, width) or any other shape that both share.

    All pixels count alike, whichever image they are from; those whose target is `ignore` do not count. Classes absent
    from both sides are left out, and without any class the mean is nan.
    """
    return mean_of(class_iou(confusion(predictions, targets, classes, ignore)))


def pair_iou(one: Tensor, other: Tensor) -> Tensor:
    """The IoU of boxes (..., 4) with as many others: x0, y0, x1, y1, end exclusive; an empty box meets nothing."""
    one, other = one.double(), other.double()
    low, high = torch.maximum(one[..., :2], other[..., :2]), torch.minimum(one[..., 2:], other[..., 2:])
    both = (high - low).clamp_min(0).prod(-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).clamp_min(0).prod(-1) for boxes in (one, other)]
    either = areas[0] + areas[1] - both
    return torch.where(either > 0, both / either.clamp_min(1e-300), 0.0)
