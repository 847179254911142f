"""95% intervals: of a mean over seeds, and of the difference between two groups of runs.

    mean over n seeds           mean ± t(n - 1) s / sqrt(n)                              Student
    difference of two means     b - a ± t(v) sqrt(s_a^2 / n_a + s_b^2 / n_b)             Welch, v by Satterthwaite
    difference of two runs      from the Wilson intervals (l, u) of their fractions:     Newcombe 1998, method 10
        b - a - sqrt((b - l_b)^2 + (u_a - a)^2),   b - a + sqrt((u_b - b)^2 + (a - l_a)^2)

The first two measure the variance over seeds, the last that over test samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

Interval = tuple[float, float]

# The 97.5% quantile of Student's t for 1 to 30 degrees of freedom.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


class Difference(NamedTuple):
    """Second group minus first, with a 95% interval (None if unknown) and its method."""

    value: float
    interval: Interval | None
    method: str


def of_mean(values: Sequence[float]) -> Interval | None:
    """The 95% interval of the mean over seeds; None for fewer than two."""
    if len(values) < 2:
        return None
    half = _t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def difference(
    before: Sequence[float], after: Sequence[float], wilson: tuple[Interval | None, Interval | None] = (None, None)
) -> Difference | None:
    """The difference between the values of two groups; `wilson` has the intervals of single runs."""
    if not before or not after:
        return None
    a, b = statistics.fmean(before), statistics.fmean(after)
    if len(before) > 1 and len(after) > 1:
        parts = [statistics.variance(values) / len(values) for values in (before, after)]
        if not sum(parts):
            return Difference(b - a, (b - a, b - a), "Welch")
        denominator = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (before, after), strict=True))
        half = _t(sum(parts) ** 2 / denominator) * math.sqrt(sum(parts))
        return Difference(b - a, (b - a - half, b - a + half), "Welch")
    first, second = wilson
    if len(before) == len(after) == 1 and first is not None and second is not None:
        low = math.hypot(b - second[0], first[1] - a)
        high = math.hypot(second[1] - b, a - first[0])
        return Difference(b - a, (b - a - low, b - a + high), "Newcombe")
    return Difference(b - a, None, "")


def _t(freedom: float) -> float:
    """The quantile at degrees of freedom rounded down, which widens the interval; past 30 it is within 1e-3."""
    whole = max(1, math.floor(freedom))
    return _T[whole - 1] if whole <= len(_T) else 1.96 + 2.4 / whole
