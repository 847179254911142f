"""How much of the first stream is left at the end: prod_l alpha_l ** runs_l, and the band that the paper wants it in.

"Residual Connections Harm Generative Representation Learning" (arXiv 2404.10947) finds the best features where this
product lies in [1e-3, 1e-2).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

from unskip._checks import number, whole
from unskip.errors import BadInput

BAND = (1e-3, 1e-2)  # from the first, up to but without the second


def effective_decay(alphas: Iterable[float], runs: Iterable[int] | None = None) -> float:
    """prod_l alpha_l ** runs_l, for sites that run runs_l times in one forward (default 1).

    Zero only when an alpha that runs is zero: what a float cannot hold stops at the least or greatest positive one.
    """
    values = [number("effective_decay", "every alpha", alpha) for alpha in alphas]
    mantissa, exponent = 1.0, 0  # kept apart, so that nothing on the way under- or overflows
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
    """Where an effective decay lies relative to the paper's band."""
    decay = number("band", "decay", decay)
    place = "below" if decay < BAND[0] else "above" if decay >= BAND[1] else "in"
    return f"{place} the paper's band [1e-3, 1e-2)"


def run_counts(runs: Iterable[int] | None, count: int) -> tuple[int, ...]:
    """How often each of `count` sites runs in one forward."""
    if runs is None:
        return (1,) * count
    each = tuple(whole("runs", "every entry", run, low=0) for run in runs)
    if len(each) != count:
        raise BadInput(f"runs: there must be one entry for each of the {count} sites, got {len(each)}")
    return each
