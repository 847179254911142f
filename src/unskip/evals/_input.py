"""Checks of features and labels: finite, one label per row, and training samples for every test class.

Evaluators compute in full precision, even under autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from unskip._checks import finite, kind_of
from unskip.errors import BadInput

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """The same function with autocast off, so that rounding does not decide which neighbour is the nearest."""

    @wraps(function)
    def precise(*arguments: P.args, **options: P.kwargs) -> R:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*arguments, **options)

    return precise


def checked(
    who: str, train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features (..., samples, dim) as float32 and labels as int64, all on the device of `train`."""
    pairs = []
    for name, x, y in (("train", train, train_labels), ("test", test, test_labels)):
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2 or x.numel() == 0:
            raise BadInput(f"{who}: {name} must be non-empty floating features (samples, dim), got {kind_of(x)}")
        if not isinstance(y, Tensor) or y.is_floating_point() or y.ndim != 1 or len(y) != x.shape[-2]:
            raise BadInput(f"{who}: {name}_labels must be {x.shape[-2]} whole numbers, one a sample, got {kind_of(y)}")
        x = x.detach().to(train.device, torch.float32)  # large float64 values overflow here, so check afterwards
        finite(who, name, x)
        if int(y.min()) < 0:
            raise BadInput(f"{who}: {name}_labels holds {int(y.min())}; classes count from 0")
        pairs.append((x, y.to(train.device, torch.int64)))
    (a, a_labels), (b, b_labels) = pairs
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-1]:
        raise BadInput(f"{who}: train is {tuple(a.shape)}, but test {tuple(b.shape)}; their features must be the same")
    check_classes(who, a_labels, b_labels)
    return a, a_labels, b, b_labels


def check_classes(who: str, train_labels: Tensor, test_labels: Tensor) -> None:
    """Raises BadInput if a class of the test samples has no training sample."""
    count = int(torch.maximum(train_labels.max(), test_labels.max())) + 1
    missing = (train_labels.bincount(minlength=count) == 0) & (test_labels.bincount(minlength=count) > 0)
    if bool(missing.any()):
        first = int(missing.nonzero()[0])
        raise BadInput(
            f"{who}: class {first} has test samples but no training sample ({int(missing.sum())} such classes); "
            "add training samples of these classes, or leave out the test samples"
        )
