"""The effective decay prod_l alpha_l ** runs_l: how much of the input stream reaches the output.

"Residual Connections Harm Generative Representation Learning" (arXiv 2404.10947) finds the best features for an
effective decay in [1e-3, 1e-2).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

from unskip._checks import number, whole
from unskip.errors import BadInput

BAND = (1e-3, 1e-2)  # end exclusive


def effective_decay(alphas: Iterable[float], runs: Iterable[int] | None = None) -> float:
    """prod_l alpha_l ** runs_l, for sites that run runs_l times in one forward (default 1).

    Zero only if an alpha that runs is zero: otherwise clamped to the smallest and largest positive floats.
    """
    values = [number("effective_decay", "every alpha", alpha) for alpha in alphas]
    mantissa, exponent = 1.0, 0  # apart, so that no intermediate under- or overflows
    for value, run in zip(values, run_counts(runs, len(values)), strict=True):
        if value == 0 and run:
            return 0.0
        part, shift = math.frexp(value)
        while run:
            power = min(run, 512)  # part >= 1/2, so part ** 512 is still a normal float
            mantissa, carry = math.frexp(mantissa * part**power)
            exponent += carry + shift * power
            run -= power
    if exponent > sys.float_info.max_exp:
        return sys.float_info.max
    return max(math.ldexp(mantissa, exponent), math.ulp(0.0))


def band(decay: float) -> str:
    """An effective decay compared with the paper's band, as text."""
    decay = number("band", "decay", decay)
    position = "below" if decay < BAND[0] else "above" if decay >= BAND[1] else "in"
    return f"{position} the paper's band [1e-3, 1e-2)"


def run_counts(runs: Iterable[int] | None, count: int) -> tuple[int, ...]:
    """How often each of `count` sites runs in one forward."""
    if runs is None:
        return (1,) * count
    counts = tuple(whole("runs", "every entry", run, low=0) for run in runs)
    if len(counts) != count:
        raise BadInput(f"runs: there must be one entry for each of the {count} sites, got {len(counts)}")
    return counts
