"""What the measures are given: floating tensors of the right shape and without NaN, carried to float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip._checks import finite, kind_of
from unskip.errors import BadInput


def floats(who: str, name: str, x: object, axes: str, least: int, most: int | None = None) -> Tensor:
    """x in float64, detached; `axes` says in words what shape is meant, `least` and `most` how many axes it has."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise BadInput(f"{who}: {name} must be a floating tensor {axes}, got {kind_of(x)}")
    if x.ndim < least or (most is not None and x.ndim > most) or x.numel() == 0:
        raise BadInput(f"{who}: {name} must be {axes} and not empty, got shape {tuple(x.shape)}")
    wide = x.detach().to(torch.float64)
    finite(who, name, wide)
    return wide


def centred(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (samples, dim) less its mean over samples; a feature that varies by no more than its rounding becomes zero.

    `dtype` is what the numbers were computed in. Two units in the last place of the feature's largest entry count as
    rounding: without this, constant features would leave a noise of full rank.
    """
    away = x - x.mean(0)
    noise = 2 * torch.finfo(dtype).eps * x.abs().amax(0)
    return torch.where(away.abs().amax(0) > noise, away, 0.0)


def same_rows(who: str, x: Tensor, y: Tensor) -> None:
    """Raise unless two matrices have a row for each of the same samples."""
    if len(x) != len(y):
        raise BadInput(f"{who}: both need one row for each sample, got {len(x)} rows and {len(y)}")


def finite_or_none(value: float) -> float | None:
    """None stands for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
