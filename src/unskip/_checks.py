"""Argument checks: each returns the plain value, or raises BadInput with the argument and its allowed values."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Iterable
from numbers import Integral, Real

import torch
from torch import Tensor

from unskip._words import nearest
from unskip.errors import BadInput


def number(
    who: str,
    name: str,
    value: object,
    *,
    high: float = sys.float_info.max,
    below: float | None = None,
    zero: bool = True,
    negative: bool = False,
) -> float:
    """Checks for a number of at least 0 (above 0 with zero=False), at most `high`, and less than `below`. With
    `negative`, for a finite number.
    """
    try:
        result = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        result = math.inf
    if negative and math.isfinite(result):
        return result + 0.0
    if not 0 <= result <= high or (result == 0 and not zero) or (below is not None and result >= below):
        least = "[0" if zero else "(0"
        allowed = "a finite number" if negative else f"a finite number, {'0 or more' if zero else 'above 0'}"
        if below is not None:
            allowed = f"a number in {least}, {below:g})"
        elif high != sys.float_info.max:
            allowed = f"a number in {least}, {high:g}]"
        raise BadInput(f"{who}: {name} must be {allowed}, got {reprlib.repr(value)}")
    return result + 0.0  # -0.0 becomes 0.0


def whole(who: str, name: str, value: object, *, low: int | None = None) -> int:
    """Checks for a whole number, at least `low`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or (low is not None and int(value) < low):
        least = "" if low is None else f", {low} or more"
        raise BadInput(f"{who}: {name} must be a whole number{least}, got {reprlib.repr(value)}")
    return int(value)


def choice(who: str, name: str, value: object, allowed: Iterable[str]) -> str:
    """Checks for one of the allowed words."""
    names = tuple(allowed)
    if not isinstance(value, str) or value not in names:
        near = nearest(str(value), names)
        raise BadInput(f"{who}: {name} must be one of {', '.join(names)}, got {reprlib.repr(value)}{near}")
    return value


def kind_of(value: object) -> str:
    """A value described in a message: dtype and shape of a tensor, or the name of its type."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def finite(who: str, name: str, x: Tensor) -> None:
    """Raises BadInput if x has NaN or infinite entries, with their number and the index of the first."""
    is_finite = torch.isfinite(x)
    if not bool(is_finite.all()):
        wrong = (~is_finite).nonzero()
        first = tuple(wrong[0].tolist())
        raise BadInput(
            f"{who}: {name} has {len(wrong)} non-finite of {x.numel()} entries, the first {float(x[first])} at "
            f"{first}; find the layer that causes them, or exclude these samples"
        )
