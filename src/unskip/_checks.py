"""Checks of arguments: each returns the plain value, or raises a BadInput that names the argument and what it takes."""

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
) -> float:
    """A finite number from 0 (or, with zero=False, above it) up to `high`, or up to but without `below`."""
    try:
        result = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        result = math.inf
    if not 0 <= result <= high or (result == 0 and not zero) or (below is not None and result >= below):
        least = "[0" if zero else "(0"
        allowed = f"a finite number, {'0 or more' if zero else 'above 0'}"
        if below is not None:
            allowed = f"a number in {least}, {below:g})"
        elif high != sys.float_info.max:
            allowed = f"a number in {least}, {high:g}]"
        raise BadInput(f"{who}: {name} must be {allowed}, got {reprlib.repr(value)}")
    return result + 0.0  # -0.0 becomes 0.0


def whole(who: str, name: str, value: object, *, low: int | None = None) -> int:
    """A whole number, `low` or more."""
    if not isinstance(value, Integral) or isinstance(value, bool) or (low is not None and int(value) < low):
        least = "" if low is None else f", {low} or more"
        raise BadInput(f"{who}: {name} must be a whole number{least}, got {reprlib.repr(value)}")
    return int(value)


def choice(who: str, name: str, value: object, allowed: Iterable[str]) -> str:
    """One of the allowed words."""
    names = tuple(allowed)
    if not isinstance(value, str) or value not in names:
        near = nearest(str(value), names)
        raise BadInput(f"{who}: {name} must be one of {', '.join(names)}, got {reprlib.repr(value)}{near}")
    return value


def kind_of(value: object) -> str:
    """What was given, for a message: dtype and shape of a tensor, or the name of a type."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def finite(who: str, name: str, x: Tensor) -> None:
    """Raise if x holds NaN or infinity, with how many and where the first one is."""
    good = torch.isfinite(x)
    if not bool(good.all()):
        wrong = (~good).nonzero()
        first = tuple(wrong[0].tolist())
        raise BadInput(
            f"{who}: {name} holds {len(wrong)} non-finite of {x.numel()} entries, the first {float(x[first])} at "
            f"{first}; find the layer that makes them, or leave these samples out"
        )
