"""Checks a verdict from the block's weights and the certificates alone, independently of the search.

There is one function for each kind of obstruction. Everything is computed in float64 with a bound on the rounding. The
properties of the activation (bounded, class O, ...) come from the table of activations, because they are proved and not
computed. The problem is reduced again, and units are grouped by `_check_keys`, not by the search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unskip.absorption._check_keys import Groups, flip_equation, group_units
from unskip.absorption._measure import compare_outputs, gap_is_negligible, linear_gap
from unskip.absorption._problem import EPS, Problem, problem_of, singular_values
from unskip.absorption._verdict import Certificate, Verdict

SEED = 20260426  # of inputs that the search does not use
Data = Mapping[str, Any]


def verify(verdict: Verdict) -> bool:
    """Whether the verdict and all obstructions that it lists hold."""
    listed = [each.certificate for each in verdict.obstructions]
    if verdict.status == "undecided":
        return verdict.weights is None and all(valid_certificates(verdict, listed))
    if verdict.status == "possible":
        return _replaces(verdict)
    if verdict.certificate is None:
        return False
    return all(valid_certificates(verdict, list({id(each): each for each in (verdict.certificate, *listed)}.values())))


def valid_certificates(verdict: Verdict, certificates: Sequence[Certificate]) -> list[bool]:
    """Which of the certificates hold."""
    problem = problem_of(verdict.block, verdict.width, verdict.biases, verdict.inputs)
    return [each.kind in CHECKS and CHECKS[each.kind](problem, each.data) for each in certificates]


def _replaces(verdict: Verdict) -> bool:
    """Compares block and replacement on new inputs of several sizes, and checks the form of the replacement."""
    block, other = verdict.block, verdict.weights
    if other is None or other.width != verdict.width or isinstance(other.skip, Tensor) or other.skip != 0:
        return False
    if other.activation != block.activation or other.norms != block.norms or other.gated != block.gated:
        return False
    allowed = {
        "as-is": (block.up_bias is not None, block.gate_bias is not None, block.down_bias is not None),
        "allowed": (True, True, True),
        "none": (False, False, False),
    }[verdict.biases]
    for may, bias in zip(allowed, (other.up_bias, other.gate_bias, other.down_bias), strict=True):
        if bias is not None and not may and bool(bias.any()):
            return False
    tolerance, linear = verdict.tolerance or 0.0, None
    if not block.gated and block.phi.odd is not None and not {"pre", "out"} & block.norms.keys():
        linear, skip = linear_gap(block, other, verdict.inputs)
        if not gap_is_negligible(block, linear, skip, tolerance):
            return False
    return compare_outputs(block, other, verdict.inputs, SEED, 4 * tolerance, linear).holds


def _flips_apply(problem: Problem) -> bool:
    """Whether a replacement without spare units can do no more than flip."""
    phi, block = problem.block.phi, problem.block
    if problem.caveat is not None or not phi.trusted or block.gated or phi.family != "odd-linear" or block.extreme:
        return False
    if {"pre", "out"} & block.norms.keys():
        return False
    if phi.name == "hardswish":
        return problem.domain is None and (not bool(problem.bias.any()) or problem.max_parallel_rows() <= 2)
    return True


def _spares(problem: Problem, found: Groups) -> int:
    return problem.width - len(found.first)


def _dual(problem: Problem, data: Data) -> bool:
    """Every t in [0, 1]^m misses the skip by more than rounding: <Y, B> is outside the range of sum_k t_k g_k."""
    y, line, column = (data[name].to(problem.up.device) for name in ("matrix", "rows", "columns"))
    y = y.double()
    found = group_units(problem) if _flips_apply(problem) else None
    if found is None or _spares(problem, found) != 0:
        return False
    joint, rows, goal = flip_equation(problem, found, line, column)
    if y.ndim == 1 and not (len(line) == len(column) == len(problem.skip) == problem.rows.shape[1]):
        return False
    parts = []
    for start in range(0, len(rows), 2048):  # in parts, to keep memory low; a vector is a diagonal
        units = slice(start, start + 2048)
        if y.ndim == 1:
            parts.append((joint[:, units].mT * rows[units]) @ y)
        else:
            parts.append((joint[:, units] * (y @ rows[units].mT)).sum(0))
    g = torch.cat(parts) if parts else y.new_zeros(0)
    inner, norm = float((y * (goal.diagonal() if y.ndim == 1 else goal)).sum()), float(y.norm())
    # |g_k| is at most |Y|_F |J_k| |u_k|, and so is the sum of the sizes of its terms.
    bulk = float(problem.rank_one_norms.sum()) + (
        problem.raw_skip_norm + problem.constant_scale * float(problem.const.norm())
    ) / abs(problem.odd)
    terms = problem.block.inputs + problem.block.outputs + problem.block.width + len(line) + len(column) + 32
    slack = 4 * terms * EPS * bulk * norm
    gap = max(inner - float(g.clamp(min=0).sum()), float(g.clamp(max=0).sum()) - inner) - slack
    return bool(gap > 0 and abs(problem.odd) * gap > 0.99 * norm * problem.tolerance)


def _spectral(problem: Problem, data: Data) -> bool:
    """By singular values the units are too small to reproduce the skip, for any use of the spare ones."""
    problem = problem.with_output_bias()
    rho, i, j, p = (int(data[name]) for name in ("rank", "i", "j", "spares"))
    if problem.affine_possible and problem.odd < 1:
        return False
    found = group_units(problem) if _flips_apply(problem) else None
    if found is None or p < _spares(problem, found) or rho <= p or i < 1 or j < 1 or i + j - 1 != rho - p:
        return False
    skip, down, up = map(singular_values, (problem.skip, problem.down, problem.up))
    if rho > len(skip):
        return False
    margin = 1e-10
    left = (down[i - 1] if i <= len(down) else 0.0) + margin * down[0]
    right = (up[j - 1] if j <= len(up) else 0.0) + margin * up[0]
    return bool(abs(problem.odd) * left * right + problem.tolerance < skip[rho - 1] * (1 - margin))


def _count(problem: Problem, data: Data) -> bool:
    """There are more keys than units."""
    found = group_units(problem) if _flips_apply(problem) and problem.block.phi.name != "hardswish" else None
    return found is not None and _spares(problem, found) < 0


def _moves(data: Data, matrix: Tensor, size: float) -> bool:
    """Whether the matrix does not map the certificate's direction to 0, beyond rounding."""
    x = data["direction"].to(matrix)
    return bool((matrix @ x).norm() > 1e-10 * size * x.norm())


def _growth(problem: Problem, data: Data) -> bool:
    """The replacement is bounded and the block is not; on an open set both extend to inputs where this shows."""
    block, norms = problem.block, problem.block.norms
    bounded = not block.gated and block.phi.family == "bounded"
    placed = [norms[place] for place in ("pre", "out") if place in norms]
    if any(norm.kind == "other" for norm in placed) or not block.phi.trusted or not (bounded or placed):
        return False
    if ("post" in norms or problem.domain is not None) and problem.caveat is not None:
        return False
    if problem.domain is not None and not (placed or block.phi.analytic):
        return False
    return _moves(data, problem.skip, problem.raw_skip_norm)


def _family(problem: Problem, data: Data) -> bool:
    """No sum of units of this activation is linear."""
    phi = problem.block.phi
    if (
        problem.caveat is not None
        or not phi.trusted
        or problem.block.gated
        or phi.family not in ("elu", "even", "mish")
    ):
        return False
    if (problem.domain is not None and not phi.analytic) or {"pre", "out"} & problem.block.norms.keys():
        return False
    return _moves(data, problem.skip, problem.raw_skip_norm)


def _linearisation(problem: Problem, data: Data) -> bool:
    """Without hidden biases the hidden layer vanishes faster than x at 0, and the skip does not."""
    block, phi = problem.block, problem.block.phi
    flat = phi.at_zero == 0 if block.gated else phi.family == "power"
    if problem.caveat is not None or not phi.trusted or not flat or {"pre", "out"} & block.norms.keys():
        return False
    if problem.hidden_bias or block.up_bias is not None or block.gate_bias is not None:
        return False
    if (
        problem.domain is not None
        and not phi.analytic
        and not bool(problem.domain.holds(torch.zeros_like(problem.domain.center)))
    ):
        return False
    return _moves(data, problem.skip, problem.raw_skip_norm)


def _rank(problem: Problem, data: Data) -> bool:
    """The block is linear, and its rank is above the width."""
    block, phi = problem.block, problem.block.phi
    if not phi.trusted or phi.family != "linear" or block.gated or block.norms or phi.odd is None or block.extreme:
        return False
    values = torch.linalg.svdvals(problem.skip + problem.odd / 2 * problem.down @ problem.up)
    return len(values) > problem.width and float(values[problem.width]) > max(
        1e-10 * problem.rounding_scale, problem.tolerance
    )


CHECKS: dict[str, Callable[[Problem, Data], bool]] = {
    "dual": _dual,
    "spectral": _spectral,
    "count": _count,
    "growth": _growth,
    "family": _family,
    "linearisation": _linearisation,
    "rank": _rank,
}
