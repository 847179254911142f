"""Decides blocks of class O by the flip criterion and the canonical form, with certificates.

A block without spare units can absorb its skip if and only if some set S of units has

    W_down[:, S] W_up[S, :] = -A / c        ("Can an MLP Absorb Its Own Skip Connection?", arXiv 2604.23705)

With p spare units (dead, duplicate, or added by a wider replacement) more is possible: splits and fresh pairs. A flip
set is accepted up to the rounding of the stored weights. An obstruction has to exceed the rounding of the coarsest
dtype that represents the same numbers, so a change of the stored dtype never turns one verdict into the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unskip.absorption._construct import Built, build, independent_rows
from unskip.absorption._keys import Keys, canonical_keys, count_uncertain, separate_keys
from unskip.absorption._measure import compare_outputs, gap_is_negligible, linear_gap
from unskip.absorption._problem import MAX_SHARE, Problem, singular_values
from unskip.absorption._search import Dual, full_equation, search
from unskip.absorption._verdict import Certificate, Obstruction

MAX_PRODUCTS = 2e10  # the largest cost, in products, of a tighter bound or of singular values


@dataclass(eq=False)
class Outcome:
    """The result of the decision: a replacement, obstructions, or the reason why it is undecided."""

    built: Built | None = None
    error: float | None = None
    worst: float = math.inf  # of the replacement: its error relative to the allowed error
    measured: dict[str, float] = field(default_factory=dict)
    obstructions: list[Obstruction] = field(default_factory=list)
    closest: float | None = None  # distance from the skip of the closest flip set that was rejected
    lossy: bool = False  # a replacement was found for which the dtype of the weights is too coarse
    reason: str = ""  # why neither was found


def decide_by_flips(problem: Problem) -> Outcome:
    """Decides by the flip criterion, and by splits and fresh pairs if there are spare units."""
    out = Outcome()
    keys = canonical_keys(problem)
    dual = None if keys.spares < 0 else _possible(problem, keys, out)
    if out.built is not None:
        return out
    trust = unproved_reason(problem)
    if trust is not None:
        out.reason = f"no replacement was found; {trust}"
        return out
    doubt = count_uncertain(problem, keys)
    if keys.spares + doubt < 0 and problem.block.phi.name != "hardswish":
        sentence = f"The block has {keys.count} different nonlinear units; {problem.width} units cannot reproduce them."
        out.obstructions.append(Obstruction(sentence, Certificate("count", {"keys": keys.count})))
    elif keys.spares < 0:
        out.reason = "an exact replacement needs more units, but some of the units may differ only by rounding"
        if problem.block.phi.name == "hardswish":
            out.reason = "HardSwish units can replace one another, so fewer units may be enough"
    elif keys.spares + doubt == 0:
        out.obstructions += _only_flips(dual)
        if problem.up.numel() + problem.down.numel() <= 2_000_000 and problem.output_bias:
            out.obstructions += _spectral(problem, 0)
        out.reason = _open(problem, keys, out)
    else:
        freer = problem.with_output_bias()
        small = max(part.numel() * min(part.shape) for part in (problem.up, problem.down)) <= MAX_PRODUCTS
        if small:
            out.obstructions += _spectral(freer, keys.spares + doubt)
        proof = "no general proof applies" if small else "the singular values of weights this large are not computed"
        out.reason = f"{keys.spares} spare units could be used in more ways than were tried, and {proof}"
        if doubt:
            out.reason = (
                f"{doubt} units differ from others, or from zero, by no more than rounding of the stored weights: "
                "it may be impossible with exactly these weights, but weights this close could absorb the skip"
            )
        if out.lossy:
            dtype = str(problem.block.dtype).removeprefix("torch.")
            out.reason = f"a replacement was found that loses too many digits stored in {dtype}; try block.double()"
    return out


def unproved_reason(problem: Problem) -> str | None:
    """The reason why an obstruction by flips would not be sound for this problem, or None."""
    phi = problem.block.phi
    if not phi.trusted:
        return f"nothing more is proved for the activation {phi.name!r}"
    if problem.caveat is not None:
        return problem.caveat
    if phi.name == "hardswish":
        if problem.domain is not None:
            return "no result is known for HardSwish on a bounded domain"
        if bool(problem.bias.any()) and problem.max_parallel_rows() > 2:
            return "HardSwish units with parallel rows have relations of their own, so more than flips may be possible"
    return None


def _only_flips(dual: Dual | None) -> list[Obstruction]:
    if dual is None:
        return []
    data = {"matrix": dual.matrix, "rows": dual.rows, "columns": dual.columns, "bound": dual.bound}
    sentence = "A replacement of this width can do no more than flip units, and no choice of units makes up the skip."
    return [Obstruction(sentence, Certificate("dual", data))]


def flip_bound(problem: Problem, bound: float) -> float:
    """A lower bound on the distance of every flip set from the skip (Frobenius norm).

    The `bound` of the certificate may be loose. Unless it is close to the norm of the skip, it is raised to the least
    distance over t in [0, 1]^m where that is cheap, and a second time with all channels scaled to equal norms, because
    of outlier channels.
    """
    enough = 0.9 * problem.skip_norm / abs(problem.odd)
    if bound < enough and problem.width**2 * sum(problem.target.shape) <= MAX_PRODUCTS:
        keys = canonical_keys(problem)
        whole = full_equation(keys.joint, keys.rows, keys.goal)
        above, beside = whole.channel_norms
        even = full_equation(whole.joint / above, whole.rows / beside, whole.goal / above / beside)
        for each, weight in ((whole, torch.ones_like(beside)), (even, above * beside)):
            if bound < enough:
                t = each.box_least_squares(coarse=keys.count > 512)
                bound = max(bound, whole.bound((each.goal - (each.joint * t) @ each.rows) / weight))
    return abs(problem.odd) * bound


def _spectral(problem: Problem, spares: int) -> list[Obstruction]:
    """|c| sigma_i(W_down) sigma_j(W_up) < sigma_rho(A) with i + j - 1 = rho - p."""
    if problem.affine_possible and problem.odd < 1:
        return []  # units that are affine on the domain then have a weight above 1
    skip, down, up = map(singular_values, (problem.skip, problem.down, problem.up))
    unit, margin = abs(problem.odd), 1e-9
    slack = 2 * problem.tolerance
    for rho in range(len(skip), spares, -1):
        want = skip[rho - 1] * (1 - margin)
        if want <= slack:
            continue
        for i in range(1, rho - spares + 1):
            j = rho - spares - i + 1
            left = (down[i - 1] if i <= len(down) else 0.0) + margin * down[0]
            right = (up[j - 1] if j <= len(up) else 0.0) + margin * up[0]
            if unit * left * right + slack < want:
                sentence = (
                    "The weights of the MLP are too small to reproduce the skip: "
                    f"{unit:.3g} * {left:.3g} * {right:.3g} is less than {want:.3g}, singular values of the two "
                    "weights and of the skip."
                )
                return [Obstruction(sentence, Certificate("spectral", {"rank": rho, "i": i, "j": j, "spares": spares}))]
    return []


def _open(problem: Problem, keys: Keys, out: Outcome) -> str:
    if out.closest is not None:
        return (
            f"a flip set comes within {out.closest / problem.skip_norm:.2g} of the skip (relative), which is above "
            "the rounding of the weights' dtype and below that of a coarser dtype that holds them exactly; "
            "absorb(..., tolerance=) accepts it"
        )
    return (
        f"no flip set was found and none could be ruled out; the rank-one terms of the {keys.count} units are "
        "linearly dependent, or the weights are so large that rounding alone could explain a skip"
    )


def _possible(problem: Problem, keys: Keys, out: Outcome) -> Dual | None:
    """Searches for a replacement and puts it into `out`. Returns the dual, if the search finds one instead."""
    if keys.spares > 0:
        _best(problem, keys, _ways(problem, keys), out)
        if out.built is not None:
            return None

    def look(keys: Keys) -> Dual | None:
        whole = full_equation(keys.joint, keys.rows, keys.goal, problem.tolerance / abs(problem.odd))
        return search(whole, lambda flips: _accept(problem, keys, flips, (), out))

    dual = look(keys)
    if out.built is None and bool((keys.sizes > 1).any()) and problem.width >= len(problem.up):
        look(separate_keys(problem))
    return dual


def _ways(problem: Problem, keys: Keys) -> Iterable[tuple[int, ...]]:
    """Yields sets of keys to split, the empty set first. The remaining units are used for fresh pairs."""
    yield ()
    if problem.affine_allowed or not keys.count:
        return
    n, p = keys.rows.shape[1], keys.spares
    if p >= 2 * n - min(keys.count, n):
        order = independent_rows(keys.rows)
        if p >= 2 * n - len(order):
            if p < 2 * n:
                yield tuple(order[: 2 * n - p])  # the fewest that are enough: the last pivots are the worst conditioned
            yield tuple(order)


def _best(problem: Problem, keys: Keys, ways: Iterable[tuple[int, ...]], out: Outcome) -> None:
    """Puts the accepted replacement whose error is least relative to the allowed error into `out`."""
    nothing = torch.zeros(keys.count, dtype=torch.bool, device=keys.rows.device)
    for split in ways:
        this = Outcome()
        if _accept(problem, keys, nothing, split, this) and this.worst < out.worst:
            out.built, out.error, out.worst, out.measured = this.built, this.error, this.worst, this.measured
        out.lossy |= this.lossy


def _may_overflow(problem: Problem) -> bool:
    """Whether a float16 replacement may overflow where the block does not.

    Flipped rows with a slope above 1 may, and outputs with a large mean that a LayerNorm removes.
    """
    block, post = problem.block, problem.block.norms.get("post")
    steep = block.phi.homogeneous and not 0 <= problem.odd <= 2
    hidden = post is not None and post.kind != "rmsnorm"
    return block.dtype == torch.float16 and problem.domain is None and (steep or hidden)


def _accept(problem: Problem, keys: Keys, flips: Tensor, split: tuple[int, ...], out: Outcome) -> bool:
    """Whether a flip set leaves no more of the skip than rounding, and the outputs agree.

    An accepted replacement is put into `out`.
    """
    block = problem.block
    used = flips.to(keys.rows.device) & keys.without(split)
    weights = keys.joint[:, used].norm(dim=0) * keys.rows[used].norm(dim=1)
    bulk = math.hypot(problem.odd * float(weights.norm()), problem.skip_norm)
    most = min(problem.rounding_tolerance(block.roundoff, bulk / 2), problem.tolerance)
    if not split:  # a cheap lower bound for any fresh pairs, which rejects most candidates
        rest = keys.joint[:, used] @ keys.rows[used] - keys.goal
        pairs = max(keys.spares, 0) // (1 if problem.affine_allowed else 2)
        largest = float(rest.abs().sum(0).max() * rest.abs().sum(1).max())  # bounds a squared singular value
        total = (1 - 1e-12) * float(rest.square().sum())
        left = abs(problem.odd) * math.sqrt(max(total - pairs * largest, 0.0))
        if not left <= most:
            if keys.spares == 0 and left <= problem.tolerance:
                out.closest = min(left, math.inf if out.closest is None else out.closest)
            return False
    built = build(problem, keys, used, split)
    if built is None or not float(built.residual.norm()) <= most:
        return False
    gap, skip = linear_gap(block, built.block, problem.domain)
    if _may_overflow(problem) or not gap_is_negligible(block, gap, skip):
        out.lossy = block.dtype != torch.float64
        return False
    seen = compare_outputs(block, built.block, problem.domain, linear=gap)
    if not seen.holds or 2 * block.roundoff * bulk >= MAX_SHARE * problem.skip_norm > 0:
        out.lossy = block.dtype != torch.float64  # or the rounding of such large weights could explain a skip
        return False
    out.built, out.worst, out.measured = built, seen.worst, seen.measured
    left = float((built.residual if built.flips is not None else gap).norm())
    out.error = left / problem.skip_norm if problem.skip_norm else 0.0
    return True
