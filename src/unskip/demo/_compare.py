"""Sentences that compare two accuracies.

    several seeds   b - a ± t sqrt(s_a^2 / n_a + s_b^2 / n_b)         Welch's 95% interval over seeds
    one seed        b - a ± 2 sqrt((a (1 - a) + b (1 - b)) / n)       95% interval over n test images

A difference within its ± may be chance. An accuracy is at chance if it is at most c + 2 sqrt(c (1 - c) / n), with
c = 1 / classes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from unskip.report import difference

_TWO = ("without", "with")
Seeds = Sequence[float]


def mean_and_std(values: Seeds) -> str:
    """Mean and standard deviation over seeds."""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def compare(name: str, before: Seeds, after: Seeds, images: int, labels: tuple[str, str] = _TWO) -> str:
    """A sentence that compares two accuracies, each with one value per seed. `labels` name the two models."""
    change, size = _gap(before, after, images)
    numbers = f"{name}: {mean_and_std(before)} {labels[0]}, {mean_and_std(after)} {labels[1]}"
    if abs(change) <= size:
        return f"{numbers}. The difference, {change:+.3f}, may be chance: {_sample(before, images)} give ±{size:.3f}."
    return f"{numbers}, which is {_more(change)} by {abs(change):.3f} (±{size:.3f})."


def at_chance(accuracies: Seeds, classes: int, images: int) -> bool:
    """Whether the mean accuracy is no better than guessing."""
    chance = 1 / classes
    return statistics.fmean(accuracies) <= chance + 2 * math.sqrt(chance * (1 - chance) / images)


def _more(change: float) -> str:
    return "higher" if change > 0 else "lower"


def _sample(values: Seeds, images: int) -> str:
    return f"{len(values)} seeds" if len(values) > 1 else f"{images} test images"


def _gap(before: Seeds, after: Seeds, images: int) -> tuple[float, float]:
    """The difference of two means, and half the width of its 95% interval."""
    seeds = difference(before, after)
    assert seeds is not None
    if seeds.interval is not None:
        return seeds.value, (seeds.interval[1] - seeds.interval[0]) / 2
    a, b = statistics.fmean(before), statistics.fmean(after)
    return b - a, 2 * math.sqrt((a * (1 - a) + b * (1 - b)) / images)
