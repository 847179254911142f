"""What a comparison of two accuracies says, and no more.

    z = (b - a) / sqrt((a (1 - a) + b (1 - b)) / n),   n test images; below two in size it may be chance

It is the chance of the test images alone: another seed of the training may move both.
"""

from __future__ import annotations

import math


def compared(name: str, before: float, after: float, images: int) -> str:
    """A sentence about two accuracies of `name` on the same number of test images."""
    error = math.sqrt((before * (1 - before) + after * (1 - after)) / images)
    difference = after - before
    numbers, size = f"{name}: {before:.3f} without, {after:.3f} with", f"±{2 * error:.3f}"
    if abs(difference) <= 2 * error:
        return f"{numbers}. The difference, {difference:+.3f}, may be chance: {images} test images give {size}."
    return f"{numbers}, which is {'higher' if difference > 0 else 'lower'} by {abs(difference):.3f} ({size})."


def ranked(before: float, after: float) -> str:
    """A sentence about two effective ranks."""
    close = abs(after - before) < 0.02 * before
    word = "about the same" if close else "higher" if after > before else "lower"
    return f"Effective rank: {before:.1f} without, {after:.1f} with, which is {word}."
