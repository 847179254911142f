"""Class O: decides by the flip criterion, the canonical form, and the certificates that go with them.

A block without spare units can absorb its skip if and only if some set S of units has

    W_down[:, S] W_up[S, :] = -A / c        ("Can an MLP Absorb Its Own Skip Connection?", arXiv 2604.23705)

With p spare units (dead, duplicate, or added by a wider replacement) more is possible: splits and fresh pairs. A flip
set counts within the rounding of the stored weights; an obstruction has to exceed the rounding of the coarsest dtype
that holds the same numbers, so that storing them otherwise never turns one answer into the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unskip.absorption._construct import Built, build, pivots
from unskip.absorption._equation import Dual
from unskip.absorption._exact import flips_exactly
from unskip.absorption._keys import Keys, canonical, doubtful
from unskip.absorption._measure import agree, linear_gap
from unskip.absorption._problem import SHARE, Problem
from unskip.absorption._refuse import needs_bias, spectral, where
from unskip.absorption._search import search
from unskip.absorption._verdict import Certificate, Obstruction


@dataclass(eq=False)
class Outcome:
    """What is known at the end: a replacement, obstructions, or a reason to stay undecided."""

    built: Built | None = None
    error: float | None = None
    exact: bool = False
    worst: float = math.inf  # of the replacement: its error over what is allowed
    measured: dict[str, float] = field(default_factory=dict)
    obstructions: list[Obstruction] = field(default_factory=list)
    bound: float | None = None  # on |E_S|_F over all flip sets
    missed: float | None = None  # what the closest flip set that was not taken leaves of the skip
    why: str = ""  # where neither holds


def decide(problem: Problem) -> Outcome:
    """The flip criterion and what spare units add to it."""
    out = Outcome()
    keys = canonical(problem)
    dual = None if keys.spares < 0 else _possible(problem, keys, out)
    if out.built is not None:
        return out
    if dual is not None and keys.spares == 0:
        out.bound = abs(problem.odd) * dual.bound
    trust = distrust(problem)
    if trust is not None:
        out.why = f"no replacement was found; {trust}"
        return out
    doubt = doubtful(problem, keys)
    if not problem.hidden_bias:
        out.obstructions += needs_bias(problem, keys)
    if keys.spares + doubt < 0 and problem.block.phi.name != "hardswish":
        sentence = f"{keys.count} units each bend the input in their own place; {problem.width} units cannot do that."
        out.obstructions.append(Obstruction(sentence, Certificate("count", {"keys": keys.count, **where(problem)})))
    elif keys.spares < 0:
        out.why = "it takes more units than that exactly, but rounding may have told some of the units apart"
        if problem.block.phi.name == "hardswish":
            out.why = "HardSwish units can stand in for one another, so fewer may do"
    elif keys.spares + doubt == 0:
        out.obstructions += _only_flips(problem, keys, dual)
        if problem.up.numel() + problem.down.numel() <= 2_000_000 and problem.output_bias:
            out.obstructions += spectral(problem, 0)
        out.why = _open(problem, keys, out)
    else:
        freer = problem.with_constant()
        out.obstructions += spectral(freer, keys.spares + doubt)
        out.why = f"{keys.spares} spare units could be used in more ways than were tried, and no general proof applies"
        if doubt:
            out.why = (
                f"{doubt} units differ from others, or from nothing, by no more than rounding of the stored weights: "
                "exactly it may be impossible, but weights this close could absorb the skip"
            )
    return out


def distrust(problem: Problem) -> str | None:
    """Why an obstruction by flips would not be sound here, or None."""
    phi = problem.block.phi
    if not phi.trusted:
        return f"more is not proved for the activation {phi.name!r}"
    if problem.caveat is not None:
        return problem.caveat
    if phi.name == "hardswish":
        if problem.domain is not None:
            return "HardSwish on a bounded domain is not settled"
        if bool(problem.bias.any()) and problem.parallel_rows() > 2:
            return "HardSwish units with parallel rows have relations of their own, so more than flips may be possible"
    return None


def _only_flips(problem: Problem, keys: Keys, dual: Dual | None) -> list[Obstruction]:
    if dual is None:
        return []
    data = {"matrix": dual.matrix, "rows": dual.rows, "columns": dual.columns, "bound": dual.bound, **where(problem)}
    if dual.index is not None:
        data["index"] = dual.index
        sentence = f"The only way to make up the skip takes a fraction of unit {int(keys.first[dual.index])}."
        return [Obstruction(sentence, Certificate("integrality", data))]
    sentence = (
        "Flipping units is all that a replacement of this width can do, and no choice of units comes closer to the "
        f"skip than {abs(problem.odd) * dual.bound:.3g} (Frobenius norm; the skip itself has {problem.size:.3g})."
    )
    return [Obstruction(sentence, Certificate("dual", data))]


def _open(problem: Problem, keys: Keys, out: Outcome) -> str:
    if out.missed is not None:
        return (
            f"a flip set comes within {out.missed / problem.size:.2g} of the skip (relative), which is more than these "
            "weights' dtype loses and less than a coarser one that holds them exactly; tolerance= takes it"
        )
    return (
        f"no flip set was found and none could be ruled out; the rank-ones of the {keys.count} units are dependent, or "
        "beside weights this large rounding alone could hide or make a skip"
    )


# --- Possible ---------------------------------------------------------------------------------------------------------


def _possible(problem: Problem, keys: Keys, out: Outcome) -> Dual | None:
    """Looks for a replacement; what the search for flips proved on the way comes back."""
    tolerance = problem.tolerance / abs(problem.odd)
    if keys.spares > 0:
        _best(problem, keys, _ways(problem, keys), out)
        if out.built is not None:
            return None
    found = search(
        keys.joint, keys.rows, keys.goal, tolerance, lambda flips: _accept(problem, keys, flips, (), out),
        tight=keys.spares == 0,
    )  # fmt: skip
    return found.dual if out.built is None else None


def _ways(problem: Problem, keys: Keys) -> Iterable[tuple[int, ...]]:
    """The keys to split, way by way; what they leave goes to fresh pairs. Fresh pairs alone come first."""
    yield ()
    if problem.one_each or not keys.count:
        return
    n, p = keys.rows.shape[1], keys.spares
    if p >= 2 * n - min(keys.count, n):
        order = pivots(keys.rows)
        if p >= 2 * n - len(order):
            yield tuple(order[: max(2 * n - p, 0)])  # as few as will do: the last pivots are the worst conditioned
            yield tuple(order)


def _best(problem: Problem, keys: Keys, ways: Iterable[tuple[int, ...]], out: Outcome) -> None:
    """Of the ways that hold, the one whose error is least against what is allowed."""
    nothing = torch.zeros(keys.count, dtype=torch.bool, device=keys.rows.device)
    for split in ways:
        this = Outcome()
        if _accept(problem, keys, nothing, split, this) and this.worst < out.worst:
            out.built, out.error, out.exact = this.built, this.error, this.exact
            out.worst, out.measured = this.worst, this.measured


def _accept(problem: Problem, keys: Keys, flips: Tensor, split: tuple[int, ...], out: Outcome) -> bool:
    """What is left of the skip is within rounding of the flipped units, and the outputs agree."""
    block = problem.block
    used = flips.to(keys.rows.device) & keys.without(split)
    weights = keys.joint[:, used].norm(dim=0) * keys.rows[used].norm(dim=1)
    bulk = math.hypot(problem.odd * float(weights.norm()), problem.size)
    most = min(problem.near(block.roundoff, bulk / 2), problem.tolerance)
    if not split and keys.spares == 0:  # cheap, and most candidates end here
        left = abs(problem.odd) * float((keys.joint[:, used] @ keys.rows[used] - keys.goal).norm())
        if not left <= most:
            if left <= problem.tolerance:
                out.missed = min(left, math.inf if out.missed is None else out.missed)
            return False
    built = build(problem, keys, used, split)
    if built is None or not float(built.left.norm()) <= most:
        return False
    gap = built.left
    if not problem.bounded:
        gap, skip = linear_gap(block, built.block)
        noise = 1e-12 * problem.bulk
        if not float(gap.norm()) <= SHARE * float(skip.norm()) + noise:
            return False  # the dtype cannot hold the new weights well enough
    seen = agree(block, built.block, problem.domain if problem.basis is None else None)
    if not seen.holds:
        return False
    exact = built.flips is not None and flips_exactly(problem, built.flips)
    if not exact and 2 * block.roundoff * bulk >= SHARE * problem.size > 0:
        return False  # beside such weights rounding alone could hide or make a skip
    out.built, out.exact, out.worst, out.measured = built, exact, seen.worst, seen.measured
    left = float((built.left if built.flips is not None else gap).norm())
    out.error = left / problem.size if problem.size else 0.0
    return True
