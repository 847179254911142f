"""Class O: the search for certificates that a skip cannot be swallowed. `_obstructions` checks what is found here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor

from unskip.absorption import _enumerate
from unskip.absorption._canonical import Keys, canonical
from unskip.absorption._construct import Built
from unskip.absorption._exact import hashed, no_subset
from unskip.absorption._reduce import Problem
from unskip.absorption._search import Dual
from unskip.absorption._verdict import Certificate, Obstruction


@dataclass(eq=False)
class Outcome:
    """What is known at the end: a replacement, obstructions, or a reason to stay undecided."""

    built: Built | None = None
    error: float | None = None
    exact: bool = False
    measured: dict[str, float] = field(default_factory=dict)
    obstructions: list[Obstruction] = field(default_factory=list)
    bound: float | None = None  # on |E_S|_F over all flip sets
    none_near: bool = False  # no flip set is within rounding of the skip
    why: str = ""  # where neither holds


def where(problem: Problem) -> dict[str, Tensor]:
    """In which basis of the inputs a certificate speaks, where a norm comes before the block."""
    return {} if problem.basis is None else {"basis": problem.basis}


def needs_bias(problem: Problem, keys: Keys, out: Outcome) -> None:
    if problem.radius is not None or problem.block.phi.name == "hardswish":
        return
    alone = keys.first[keys.sizes == 1]
    size = problem.bias[alone].abs() / problem.up[alone].norm(dim=1).clamp(min=1e-300)
    if len(alone) and float(size.max()) > 64 * problem.block.roundoff:
        unit = int(alone[size.argmax()])
        sentence = f"Unit {unit} bends the input away from the origin, and the replacement may not have hidden biases."
        out.obstructions.append(Obstruction(sentence, Certificate("hidden-bias", {"unit": unit, **where(problem)})))


def without_spares(problem: Problem, keys: Keys, dual: Dual | None, tolerance: float, out: Outcome) -> None:
    """Where only flips can help: what was proved of them, or a look at every choice of units if they are few."""
    if dual is not None:
        kind = "dual" if dual.index is None else "integrality"
        data = {"matrix": dual.matrix, "rows": dual.rows, "columns": dual.columns, "bound": dual.bound}
        data |= where(problem)
        if dual.index is None:
            sentence = (
                "Flipping units is all that a replacement of this width can do, and no choice of units comes closer to "
                f"the skip than {abs(problem.odd) * dual.bound:.3g} (Frobenius norm)."
            )
        else:
            data["index"] = dual.index
            sentence = f"The only way to make up the skip takes a fraction of unit {int(keys.first[dual.index])}."
        out.obstructions.append(Obstruction(sentence, Certificate(kind, data)))
    if problem.up.numel() + problem.down.numel() <= 2_000_000 and problem.output_bias:
        _spectral(problem, 0, out)
    if dual is not None:
        return
    if keys.count == 0:
        out.why = "no unit counts, and the skip is within rounding of nothing"
        return
    if keys.count <= _enumerate.ALL:
        _, gap = _enumerate.closest(keys.joint, keys.rows, keys.goal)
        size = float(keys.joint.norm() * keys.rows.norm() + keys.goal.norm())
        if gap - 1e-12 * size > tolerance:
            out.bound = abs(problem.odd) * gap
            sentence = (
                f"All {2**keys.count} choices of units were tried; the closest misses the skip by "
                f"{abs(problem.odd) * gap:.3g} (Frobenius norm)."
            )
            data = {"bound": gap, **where(problem)}
            out.obstructions.append(Obstruction(sentence, Certificate("enumeration", data)))
        else:
            out.why = "the closest flip set is within rounding of the skip, but not close enough to be taken"
        return
    _in_halves(problem, keys, out)


def _in_halves(problem: Problem, keys: Keys, out: Outcome) -> None:
    odd = problem.block.phi.odd
    plain = bool((keys.sizes == 1).all()) and keys.count == len(problem.up) and not problem.block.norms
    if problem.tolerance >= problem.size / 20:
        out.why = (
            "its weights are so large against the skip that rounding of their dtype alone could hide or make a skip; "
            "ask with the weights in a finer dtype"
        )
        return
    if keys.count > _enumerate.HALVES or not plain or odd is None:
        out.why = (
            f"the rank-ones of its {keys.count} units are dependent, and then the question is as hard as SUBSET-SUM; "
            "neither a flip set nor a proof was found"
        )
        return
    modulus, z, values, goal = hashed(keys.joint, keys.rows, odd, problem.target)
    if out.none_near and no_subset(values, goal, modulus):
        sentence = "In whole numbers no choice of units adds up to the skip (decided in two halves, modulo a prime)."
        data = {"modulus": modulus, "functional": z}
        out.obstructions.append(Obstruction(sentence, Certificate("subset-sum", data)))
    else:
        out.why = "no flip set is exact, but one within rounding could not be excluded"


def with_spares(problem: Problem, strict: Keys, loose: Keys, out: Outcome) -> None:
    if not problem.output_bias:  # what is impossible with output biases is impossible without them
        problem = replace(problem, output_bias=True)
        strict = canonical(problem)
        loose = canonical(problem, loose=True, other=strict)
    spares, tolerance = loose.spares, problem.tolerance / abs(problem.odd)
    _spectral(problem, spares, out)
    _kernel(problem, loose, out)
    affine = problem.bounded
    biased_hardswish = problem.block.phi.name == "hardswish" and bool(problem.bias.any())
    few = _enumerate.cases(strict.count, 0 if affine else spares) <= _enumerate.CASES
    if strict.spares == spares > 0 and few and not biased_hardswish:
        joint, rows, goal = (value.cpu() for value in (strict.joint, strict.rows, strict.goal))
        size = float(joint.norm() * rows.norm() + goal.norm())
        way, gap = _enumerate.exhaust(joint, rows, goal, spares, affine, max(tolerance, 1e-9 * size))
        if way is None:
            sentence = f"Every use of the {spares} spare units was tried; none makes up the skip."
            data = {"spares": spares, "bound": gap, **where(problem)}
            out.obstructions.append(Obstruction(sentence, Certificate("exhaustion", data)))
    if not out.obstructions:
        out.why = f"{spares} spare units could be used in more ways than were tried, and no general obstruction applies"


def _spectral(problem: Problem, spares: int, out: Outcome) -> None:
    """|c| sigma_i(W_down) sigma_j(W_up) < sigma_rho(A) with i + j - 1 = rho - p: the units are too weak."""
    if problem.bounded and problem.odd < 1:
        return  # units that are affine on the domain then weigh more than 1
    skip, down, up = (torch.linalg.svdvals(part).tolist() for part in (problem.skip, problem.down, problem.up))
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
                    "The MLP is too weak to stand in for its skip: "
                    f"{unit:.3g} * {left:.3g} * {right:.3g} is less than {want:.3g}, singular values of the two "
                    "weights and of the skip."
                )
                data = {"rank": rho, "i": i, "j": j, "spares": spares, **where(problem)}
                out.obstructions.append(Obstruction(sentence, Certificate("spectral", data)))
                return


def _kernel(problem: Problem, keys: Keys, out: Outcome) -> None:
    """Directions that no unit sees: p < 2 rank(A on them) is not enough. In exact arithmetic, for small blocks."""
    if problem.block.norms or problem.up.numel() > 4096 or problem.up.shape[1] > 48:
        return
    unseen = problem.up.shape[1] - int(torch.linalg.matrix_rank(problem.up))
    if keys.spares >= 2 * unseen:
        return
    basis = _null(problem.up)
    if basis is None:
        return
    values = torch.linalg.svdvals(problem.skip @ basis)
    size = float((problem.skip.abs() @ basis.abs()).norm()) * 1e-9
    rank = int((values > size).sum())
    if keys.spares < 2 * rank:
        sentence = (
            f"On {basis.shape[1]} directions that no unit sees the skip has rank {rank}; it takes {2 * rank} spare "
            f"units to make that up, and there are at most {keys.spares}."
        )
        data = {"kernel": basis, "rank": rank, "spares": keys.spares}
        out.obstructions.append(Obstruction(sentence, Certificate("kernel", data)))


def _null(up: Tensor) -> Tensor | None:
    """A basis of the kernel in whole numbers that floats hold exactly, or None."""
    rows = [[Fraction(value) for value in row] for row in up.tolist() if any(row)]
    n, done, heads = up.shape[1], 0, list[int]()
    for column in range(n):
        pivot = next((i for i in range(done, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[done], rows[pivot] = rows[pivot], rows[done]
        head = rows[done][column]
        rows[done] = [value / head for value in rows[done]]
        for i in range(len(rows)):
            if i != done and rows[i][column]:
                factor = rows[i][column]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[done], strict=True)]
        heads.append(column)
        done += 1
    free = [column for column in range(n) if column not in heads]
    basis = []
    for column in free:
        vector = [Fraction(0)] * n
        vector[column] = Fraction(1)
        for i, head_column in enumerate(heads):
            vector[head_column] = -rows[i][column]
        common = math.lcm(*(value.denominator for value in vector))
        whole = [int(value * common) for value in vector]
        if max(abs(value) for value in whole) >= 2**53:
            return None
        basis.append(whole)
    return torch.tensor(basis, dtype=torch.float64).mT.to(up.device) if basis else None
