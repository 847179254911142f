"""Two accuracies compared, in words.

    over seeds      b - a ± t sqrt(s_a^2 / n_a + s_b^2 / n_b)         Welch, 95%: what other seeds would change
    of one seed     b - a ± 2 sqrt((a (1 - a) + b (1 - b)) / n)       n test images: what other images would change

A difference within its ± may be chance. An accuracy is at chance where it is within two sqrt(c (1 - c) / n) of c, or
below, for c of one class in so many.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from unskip.report import difference

_TWO = ("without", "with")
Seeds = Sequence[float]


def shown(values: Seeds) -> str:
    """Mean and standard deviation over seeds."""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def compared(name: str, before: Seeds, after: Seeds, images: int, named: tuple[str, str] = _TWO) -> str:
    """A sentence about two accuracies of `name`, a value a seed, and what the two are called."""
    change, size = _gap(before, after, images)
    numbers = f"{name}: {shown(before)} {named[0]}, {shown(after)} {named[1]}"
    if abs(change) <= size:
        return f"{numbers}. The difference, {change:+.3f}, may be chance: {_of(before, images)} give ±{size:.3f}."
    return f"{numbers}, which is {_more(change)} by {abs(change):.3f} (±{size:.3f})."


def at_chance(accuracies: Seeds, classes: int, images: int) -> bool:
    """Whether guessing does as well."""
    chance = 1 / classes
    return statistics.fmean(accuracies) <= chance + 2 * math.sqrt(chance * (1 - chance) / images)


def _more(change: float) -> str:
    return "higher" if change > 0 else "lower"


def _of(values: Seeds, images: int) -> str:
    return f"{len(values)} seeds" if len(values) > 1 else f"{images} test images"


def _gap(before: Seeds, after: Seeds, images: int) -> tuple[float, float]:
    """The difference of two means, and half of its 95% interval."""
    seeds = difference(before, after)
    assert seeds is not None
    if seeds.interval is not None:
        return seeds.value, (seeds.interval[1] - seeds.interval[0]) / 2
    a, b = statistics.fmean(before), statistics.fmean(after)
    return b - a, 2 * math.sqrt((a * (1 - a) + b * (1 - b)) / images)
