"""Class O: decides by the flip criterion, the canonical form, and the certificates that go with them.

A block without spare units can swallow its skip if and only if some set S of units has

    W_down[:, S] W_up[S, :] = -A / c        ("Can an MLP Absorb Its Own Skip Connection?", arXiv 2604.23705)

With p spare units (dead, duplicate, or added by a wider replacement) more is possible: splits and fresh pairs. A
`possible` is relative to the rounding of the stored weights; an `impossible` needs a certificate that still stands when
units that rounding may have told apart are merged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip.absorption import _enumerate
from unskip.absorption._canonical import Keys, canonical
from unskip.absorption._construct import build, output_errors, stored_error
from unskip.absorption._exact import flips_exactly
from unskip.absorption._reduce import Problem
from unskip.absorption._refuse import Outcome, needs_bias, where, with_spares, without_spares
from unskip.absorption._search import Dual, search
from unskip.absorption._verdict import Certificate, Obstruction

SHARE = 0.05  # of the skip, that a replacement may leave over at most


def decide(problem: Problem) -> Outcome:
    """The flip criterion and what spare units add to it."""
    out = Outcome()
    strict = canonical(problem)
    loose = canonical(problem, loose=True, other=strict)
    unit = abs(problem.odd)
    tolerance = problem.tolerance / unit
    dual = None  # of the units as they are
    for keys in [strict] + ([loose] if loose is not strict else []):
        if keys.spares < 0 or out.built is not None:
            continue
        proved = _possible(problem, keys, tolerance, out)
        dual = proved if keys is strict else dual
    if out.built is not None:
        return out
    if dual is not None and strict.spares == 0:
        out.bound = unit * dual.bound
    trust = _trust(problem)
    if trust is not None:
        out.why = trust
        return out
    if not problem.hidden_bias:
        needs_bias(problem, loose, out)
    if loose.spares < 0 and problem.block.phi.name == "hardswish":
        out.why = "HardSwish units can stand in for one another, so fewer may do"
    elif loose.spares < 0:
        data = {"keys": loose.count, **where(problem)}
        sentence = f"{loose.count} units each bend the input in their own place; {problem.width} units cannot do that."
        out.obstructions.append(Obstruction(sentence, Certificate("count", data)))
    elif strict.spares < 0:
        out.why = "it takes more units than that exactly, but rounding may have told some of the units apart"
    elif strict.spares == 0 and loose.spares == 0:
        without_spares(problem, strict, dual, tolerance, out)
    else:
        with_spares(problem, strict, loose, out)
        if not out.obstructions and dual is not None and strict.spares == 0:
            out.why = (
                "exactly it is impossible, but units that rounding of the stored weights may have told apart, or that "
                "add next to nothing, could make it possible within rounding"
            )
    return out


def _trust(problem: Problem) -> str | None:
    """Why an impossible would not be sound here, or None."""
    phi = problem.block.phi
    if not phi.trusted:
        return f"no flip set was found, and more is not proved for the activation {phi.name!r}"
    if problem.caveat is not None:
        return problem.caveat
    if phi.name == "hardswish":
        if problem.radius is not None:
            return "no flip set was found; HardSwish on a bounded domain is not settled"
        if bool(problem.bias.any()) and _parallel(problem.up) > 2:
            return (
                "no flip set was found; HardSwish units whose rows are parallel have relations of their own, so more "
                "than flips may be possible"
            )
    return None


def _parallel(up: Tensor) -> int:
    """The most rows that share a direction."""
    lengths = up.norm(dim=1)
    unit = up[lengths > 0] / lengths[lengths > 0, None]
    most = 0
    for part in unit.split(1024):
        most = max(most, int(((part @ unit.mT).abs() > 1 - 1e-6).sum(1).max()))
    return most


# --- Possible ---------------------------------------------------------------------------------------------------------


def _possible(problem: Problem, keys: Keys, tolerance: float, out: Outcome) -> Dual | None:
    """Looks for a replacement; what the search for flips proved on the way comes back."""

    def accept(flips: Tensor, split: tuple[int, ...] = ()) -> bool:
        return _accept(problem, keys, flips, split, out)

    if keys.spares > 0 and _enough(problem, keys, out):
        return None
    found = search(keys.joint, keys.rows, keys.goal, tolerance, accept)
    if found.flips is not None or out.built is not None:
        return None
    if keys.spares > 0:
        _use_spares(problem, keys, tolerance, out)
    elif found.dual is None and 0 < keys.count <= _enumerate.ALL:
        mask, _ = _enumerate.closest(keys.joint, keys.rows, keys.goal)
        accept(mask)
    elif found.dual is None and found.independent is not True and 0 < keys.count <= _enumerate.PROGRAM:
        near = None
        if keys.count <= _enumerate.HALVES:
            near = _enumerate.in_halves(keys.joint, keys.rows, keys.goal, tolerance)
        if near is not None:
            out.none_near = near[1] == math.inf
            accept(near[0])
        elif keys.goal.numel() <= 4096:
            fits = _enumerate.program(keys.joint, keys.rows, keys.goal, tolerance)
            if fits is not None:
                accept(fits.to(keys.rows.device))
    return found.dual


def _enough(problem: Problem, keys: Keys, out: Outcome) -> bool:
    """Whether the spare units make up any skip: p >= 2 n - rank of the rows, or p >= 2 rank(B)."""
    n, p = keys.rows.shape[1], keys.spares
    nothing = torch.zeros(keys.count, dtype=torch.bool, device=keys.rows.device)
    affine = problem.one_each
    if not affine and keys.count and p >= 2 * n - min(keys.count, n):
        order = pivots(keys.rows)
        if p >= 2 * n - len(order) and _accept(problem, keys, nothing, tuple(order), out):
            return True
    return p >= (1 if affine else 2) and _accept(problem, keys, nothing, (), out)


def _use_spares(problem: Problem, keys: Keys, tolerance: float, out: Outcome) -> None:
    """Tries the ways to spend spare units that cost little to find, then all of them if there are few."""
    m, p, device = keys.count, keys.spares, keys.rows.device
    nothing = torch.zeros(m, dtype=torch.bool, device=device)
    affine = problem.one_each
    splits: list[tuple[int, ...]] = [()]
    if not affine and m:
        twins = tuple(torch.nonzero(keys.sizes > 1).flatten().tolist())
        if twins and len(twins) <= p:
            splits.append(twins)
        if keys.rows.numel() <= 20_000_000:
            order = pivots(keys.rows)
            for room in range(min(p, len(order)), 0, -1) if p <= 16 else (min(p, len(order)), p % 2):
                if 0 < room <= len(order):
                    splits.append(tuple(order[:room]))
    for split in dict.fromkeys(splits):
        if _accept(problem, keys, nothing, split, out):
            return
        if split and len(split) < m:
            kept = keys.without(split)
            held = keys.rows[~kept]
            away = torch.eye(held.shape[1], dtype=held.dtype, device=device) - torch.linalg.pinv(held) @ held

            def accept(flips: Tensor, kept: Tensor = kept, split: tuple[int, ...] = split) -> bool:
                every = nothing.clone()
                every[kept] = flips
                return _accept(problem, keys, every, split, out)

            # The 2 q rank-ones that fresh pairs could add are left out of this search.
            search(keys.joint[:, kept], keys.rows[kept] @ away, keys.goal @ away, tolerance, accept)
            if out.built is not None:
                return
    if _enumerate.cases(m, 0 if problem.bounded else p) <= _enumerate.CASES:
        joint, rows, goal = (value.cpu() for value in (keys.joint, keys.rows, keys.goal))
        way, _ = _enumerate.exhaust(joint, rows, goal, p, problem.bounded, tolerance)
        if way is not None:
            _accept(problem, keys, way.flips.to(device), way.split, out)


def pivots(rows: Tensor) -> list[int]:
    """Rows in the order of a QR with pivoting, as many as are independent."""
    from scipy.linalg import qr

    _, triangle, order = qr(rows.mT.cpu().numpy(), mode="economic", pivoting=True)
    diagonal = abs(triangle.diagonal())
    return [int(i) for i in order[: int((diagonal > 1e-10 * max(diagonal[0], 1e-300)).sum())]]


def _accept(problem: Problem, keys: Keys, flips: Tensor, split: tuple[int, ...], out: Outcome) -> bool:
    """The safe rule: over the flipped units only, capped by the size of the skip, and the outputs have to agree."""
    block, size = problem.block, problem.size
    used = flips.to(keys.rows.device) & keys.without(split)
    if not split and keys.spares == 0:  # cheap, and most candidates end here
        left = abs(problem.odd) * float((keys.joint[:, used] @ keys.rows[used] - keys.goal).norm())
        if not left <= min(_within(problem, keys, used), cap(block.roundoff) * size):
            return False
    built = build(problem, keys, used, split)
    if built is None:
        return False
    left = float(built.left.norm())
    if not left <= min(_within(problem, keys, used), cap(block.roundoff) * size):
        return False
    exact = built.flips is not None and flips_exactly(problem, _units(built.flips, block.width))
    vacuous = problem.tolerance >= size / 20
    if vacuous and size and not exact:
        return False
    made = stored_error(problem, built.block) if built.flips is None else None
    if made is not None and not float(made.norm()) <= SHARE * size + 1e-12 * problem.tolerance / block.roundoff:
        return False  # the dtype cannot hold the new weights well enough
    measured = output_errors(block, built.block)
    if measured["float64"] > measured["explained"]:
        return False
    if measured["stored"] > measured["explained"] + 4 * measured["original_stored"]:
        return False
    norm, whole = spectral_norm(built.left if made is None else made), spectral_norm(problem.target)
    out.built, out.error, out.exact, out.measured = built, norm / whole if whole else 0.0, exact, measured
    return True


def spectral_norm(matrix: Tensor) -> float:
    """|matrix|_2: by decomposition where it is small, else by power iteration, which is right to a few digits."""
    if matrix.numel() <= 65_536:
        return float(torch.linalg.matrix_norm(matrix, 2)) if matrix.numel() else 0.0
    x = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0), dtype=matrix.dtype).to(matrix.device)
    value = 0.0
    for _ in range(60):
        x = matrix.mT @ (matrix @ (x / x.norm().clamp(min=1e-300)))
        value = float(x.norm()) ** 0.5
    return value


def _units(flips: Tensor, width: int) -> Tensor:
    mask = torch.zeros(width, dtype=torch.bool)
    mask[flips.cpu()] = True
    return mask


def cap(roundoff: float) -> float:
    """The share of the skip that may be left over at most."""
    return min(SHARE, math.sqrt(roundoff))


def _within(problem: Problem, keys: Keys, used: Tensor) -> float:
    weights = keys.joint[:, used].norm(dim=0) * keys.rows[used].norm(dim=1)
    size = problem.size
    u = problem.block.roundoff
    return max(4 * u * math.hypot(problem.odd * float(weights.norm()), size), 1e-12 * size)
