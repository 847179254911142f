"""Checks of the inputs of measures: floating tensors of the right shape, finite, converted to float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip._checks import finite, kind_of
from unskip.errors import BadInput


def floats(who: str, name: str, x: object, axes: str, least: int, most: int | None = None) -> Tensor:
    """x in float64, detached; `axes` describes the expected shape, `least` and `most` bound the number of axes."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise BadInput(f"{who}: {name} must be a floating tensor {axes}, got {kind_of(x)}")
    if x.ndim < least or (most is not None and x.ndim > most) or x.numel() == 0:
        raise BadInput(f"{who}: {name} must be {axes} and not empty, got shape {tuple(x.shape)}")
    wide = x.detach().to(torch.float64)
    finite(who, name, wide)
    return wide


def centred(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (samples, dim) minus its mean over samples; features that vary only by rounding become zero.

    `dtype` is the dtype that x was computed in. Two units in the last place of a feature's largest entry count as
    rounding; otherwise constant features would leave noise of full rank.
    """
    rounding = 2 * torch.finfo(dtype).eps * x.abs().amax(0)
    x = x - x.mean(0)
    return torch.where(x.abs().amax(0) > rounding, x, 0.0)


def same_rows(who: str, x: Tensor, y: Tensor) -> None:
    """Raises BadInput unless both matrices have the same number of rows."""
    if len(x) != len(y):
        raise BadInput(f"{who}: both need one row for each sample, got {len(x)} rows and {len(y)}")


def finite_or_none(value: float) -> float | None:
    """The value, or None for NaN and infinity, which JSON cannot represent."""
    return value if math.isfinite(value) else None
