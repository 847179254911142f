"""Class O: certificates that a skip cannot be absorbed, where there are units to spare or biases are missing.

`_checks` tests what is found here.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from unskip.absorption._keys import Keys
from unskip.absorption._problem import Problem
from unskip.absorption._verdict import Certificate, Obstruction


def where(problem: Problem) -> dict[str, Tensor]:
    """In which basis of the inputs a certificate speaks, where a norm comes before the block."""
    return {} if problem.basis is None else {"basis": problem.basis}


def needs_bias(problem: Problem, keys: Keys) -> list[Obstruction]:
    """A unit that bends away from the origin, where the replacement may not have hidden biases."""
    alone = keys.first[keys.sizes == 1]
    if problem.domain is not None or problem.block.phi.name == "hardswish" or not len(alone):
        return []
    size = problem.bias[alone].abs() / problem.up[alone].norm(dim=1).clamp(min=1e-300)
    if not float(size.max()) > 64 * problem.block.grain:
        return []
    unit = int(alone[size.argmax()])
    sentence = f"Unit {unit} bends the input away from the origin, and the replacement may not have hidden biases."
    return [Obstruction(sentence, Certificate("hidden-bias", {"unit": unit, **where(problem)}))]


def spectral(problem: Problem, spares: int) -> list[Obstruction]:
    """|c| sigma_i(W_down) sigma_j(W_up) < sigma_rho(A) with i + j - 1 = rho - p: the units are too weak."""
    if problem.bounded and problem.odd < 1:
        return []  # units that are affine on the domain then weigh more than 1
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
                return [Obstruction(sentence, Certificate("spectral", data))]
    return []


def kernel(problem: Problem, spares: int) -> list[Obstruction]:
    """Directions that no unit sees: p < 2 rank(A on them) is not enough. In exact arithmetic, for small blocks."""
    if problem.block.norms or problem.domain is not None or problem.up.numel() > 4096 or problem.up.shape[1] > 48:
        return []
    unseen = problem.up.shape[1] - int(torch.linalg.matrix_rank(problem.up))
    basis = _null(problem.up) if spares < 2 * unseen else None
    if basis is None:
        return []
    values = torch.linalg.svdvals(problem.skip @ basis)
    size = float((problem.skip.abs() @ basis.abs()).norm()) * 1e-9
    rank = int((values > size).sum())
    if spares >= 2 * rank:
        return []
    sentence = (
        f"On {basis.shape[1]} directions that no unit sees the skip has rank {rank}; it takes {2 * rank} spare "
        f"units to make that up, and there are at most {spares}."
    )
    return [Obstruction(sentence, Certificate("kernel", {"kernel": basis, "rank": rank, "spares": spares}))]


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
