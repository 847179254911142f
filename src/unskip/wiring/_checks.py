"""Checks of what a rule is given: each returns the plain value, or raises a BadInput that names the argument."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Iterable
from numbers import Integral, Real

from unskip._words import nearest
from unskip.errors import BadInput


def number(who: str, name: str, value: object, *, high: float = sys.float_info.max, zero: bool = True) -> float:
    """A finite number from 0 up to `high`."""
    try:
        result = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        result = math.inf
    if not 0 <= result <= high or (result == 0 and not zero):
        allowed = f"a number in {'[' if zero else '('}0, 1]" if high == 1 else "a finite number, 0 or more"
        raise BadInput(f"{who}: {name} must be {allowed}, got {reprlib.repr(value)}")
    return result + 0.0  # -0.0 becomes 0.0


def whole(who: str, name: str, value: object, *, low: int | None = None) -> int:
    """A whole number, `low` or more."""
    if not isinstance(value, Integral) or isinstance(value, bool) or (low is not None and int(value) < low):
        least = "" if low is None else f", {low} or more"
        raise BadInput(f"{who}: {name} must be a whole number{least}, got {reprlib.repr(value)}")
    return int(value)


def counts(runs: Iterable[int] | None, count: int) -> tuple[int, ...]:
    """How often each of `count` sites runs."""
    if runs is None:
        return (1,) * count
    each = tuple(whole("runs", "every entry", run, low=0) for run in runs)
    if len(each) != count:
        raise BadInput(f"runs: there must be one entry for each of the {count} sites, got {len(each)}")
    return each


def choice(who: str, name: str, value: object, allowed: tuple[str, ...]) -> None:
    """One of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        near = nearest(str(value), allowed)
        raise BadInput(f"{who}: {name} must be one of {', '.join(allowed)}, got {reprlib.repr(value)}{near}")
