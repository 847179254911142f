"""What a comparison of two accuracies says, and no more.

    z = (b - a) / sqrt((a (1 - a) + b (1 - b)) / n),   n test images; below two in size it may be chance

It is the chance of the test images alone: another seed of the training may move both. An accuracy is at chance where it
is within two sqrt(c (1 - c) / n) of c, or below, for c of one class in so many.
"""

from __future__ import annotations

import math

_TWO = ("without", "with")


def compared(name: str, before: float, after: float, images: int, named: tuple[str, str] = _TWO) -> str:
    """A sentence about two accuracies of `name` on the same number of test images, and what the two are called."""
    difference, size = after - before, _twice_the_error(before, after, images)
    numbers = f"{name}: {before:.3f} {named[0]}, {after:.3f} {named[1]}"
    if abs(difference) <= size:
        return f"{numbers}. The difference, {difference:+.3f}, may be chance: {images} test images give ±{size:.3f}."
    return f"{numbers}, which is {_more(difference)} by {abs(difference):.3f} (±{size:.3f})."


def beside(kept: float, cut: float, images: int) -> str:
    """A sentence about a model that kept its skips, beside one without them that was just spoken of."""
    difference, size = cut - kept, _twice_the_error(kept, cut, images)
    said = f"With all its skips it reaches {kept:.3f} in as many steps: without them"
    if abs(difference) <= size:
        return f"{said}, initialised, it is as good, but for {difference:+.3f}, which may be chance (±{size:.3f})."
    return f"{said}, initialised, it is {_more(difference)} by {abs(difference):.3f} (±{size:.3f})."


def at_chance(accuracy: float, classes: int, images: int) -> bool:
    """Whether guessing does as well."""
    chance = 1 / classes
    return accuracy <= chance + 2 * math.sqrt(chance * (1 - chance) / images)


def ranked(before: float, after: float, named: tuple[str, str] = _TWO) -> str:
    """A sentence about two effective ranks, and what the two are called."""
    close = abs(after - before) < 0.02 * before
    word = "about the same" if close else _more(after - before)
    return f"Effective rank: {before:.1f} {named[0]}, {after:.1f} {named[1]}, which is {word}."


def _more(difference: float) -> str:
    return "higher" if difference > 0 else "lower"


def _twice_the_error(a: float, b: float, images: int) -> float:
    return 2 * math.sqrt((a * (1 - a) + b * (1 - b)) / images)
