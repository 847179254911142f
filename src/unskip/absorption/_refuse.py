"""Class O: certificates that a skip cannot be absorbed, where there are units to spare or biases are missing.

`_checks` tests what is found here.
"""

from __future__ import annotations

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
