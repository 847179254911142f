"""The check of each kind of obstruction: one function a kind, from the weights and the certificate's data alone.

Everything is computed in float64 with a bound on its rounding, or in whole numbers. What the activation is known to be
(bounded, class O, ...) is read from the table of activations, because it is proved and not computed. The problem is
reduced anew, with the basis that the certificate names, and units are grouped by `_check_keys`, not by the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unskip.absorption._check_keys import Groups, flip_equation, groups
from unskip.absorption._problem import EPS, Problem

Data = Mapping[str, Any]


def _flips_apply(at: Problem) -> bool:
    """Whether a replacement without spare units can do no more than flip."""
    phi, block = at.block.phi, at.block
    if at.caveat is not None or not phi.trusted or block.gated or phi.family != "odd-linear" or block.extreme:
        return False
    if {"pre", "out"} & block.norms.keys():
        return False
    if phi.name == "hardswish":
        return at.domain is None and (not bool(at.bias.any()) or at.parallel_rows() <= 2)
    return True


def _spares(at: Problem, found: Groups) -> int:
    return at.width - len(found.head)


def _seen(at: Problem, data: Data) -> tuple[float, Tensor, float, float] | None:
    """<Y, B>, all g_k, the bound on their rounding, and |Y|_F."""
    y, line, column = (data[name].to(at.up.device) for name in ("matrix", "rows", "columns"))
    y = y.double()
    found = groups(at) if _flips_apply(at) else None
    if found is None or _spares(at, found) != 0:
        return None
    joint, rows, goal = flip_equation(at, found, line, column)
    if y.ndim == 1 and not (len(line) == len(column) == len(at.skip) == at.rows.shape[1]):
        return None
    parts = []
    for start in range(0, len(rows), 2048):  # in parts, to keep memory low; a vector is a diagonal
        units = slice(start, start + 2048)
        if y.ndim == 1:
            parts.append((joint[:, units].mT * rows[units]) @ y)
        else:
            parts.append((joint[:, units] * (y @ rows[units].mT)).sum(0))
    inner = float((y * (goal.diagonal() if y.ndim == 1 else goal)).sum(-1).sum())
    # |g_k| is at most |Y|_F |J_k| |u_k|, and so is what its terms add up to.
    lengths = at.long_up if at.output_bias else torch.hypot(at.long_up, at.long_bias)
    bulk = float((at.long_down * lengths).sum()) + (at.long_skip + float(at.const.norm())) / abs(at.odd)
    terms = at.block.inputs + at.block.outputs + at.block.width + len(line) + len(column) + 32
    norm = float(y.norm())
    return inner, torch.cat(parts) if parts else y.new_zeros(0), 4 * terms * EPS * bulk * norm, norm


def _dual(at: Problem, data: Data) -> bool:
    """No t in [0, 1]^m comes closer to the skip than rounding."""
    found = _seen(at, data)
    if found is None:
        return False
    inner, g, slack, norm = found
    gap = max(inner - float(g.clamp(min=0).sum()), float(g.clamp(max=0).sum()) - inner) - slack
    return bool(gap > 0 and abs(at.odd) * gap > 0.99 * norm * at.tolerance)


def _integrality(at: Problem, data: Data) -> bool:
    """One t_i is pinned to what is neither 0 nor 1."""
    found = _seen(at, data)
    if found is None:
        return False
    inner, g, slack, norm = found
    index = int(data["index"])
    own = float(g[index])
    rest = float(g[:index].abs().sum() + g[index + 1 :].abs().sum()) + slack
    return bool(abs(at.odd) * (min(abs(inner), abs(inner - own)) - rest) > 0.99 * norm * at.tolerance)


def _spectral(at: Problem, data: Data) -> bool:
    """Singular values: the units are too weak, whatever the spare ones do."""
    at = at.with_constant()
    rho, i, j, p = (int(data[name]) for name in ("rank", "i", "j", "spares"))
    if at.bounded and at.odd < 1:
        return False
    found = groups(at) if _flips_apply(at) else None
    if found is None or p < _spares(at, found) or rho <= p or i < 1 or j < 1 or i + j - 1 != rho - p:
        return False
    skip, down, up = (torch.linalg.svdvals(part).tolist() for part in (at.skip, at.down, at.up))
    if rho > len(skip):
        return False
    margin = 1e-10
    left = (down[i - 1] if i <= len(down) else 0.0) + margin * down[0]
    right = (up[j - 1] if j <= len(up) else 0.0) + margin * up[0]
    return bool(abs(at.odd) * left * right + at.tolerance < skip[rho - 1] * (1 - margin))


def _count(at: Problem, data: Data) -> bool:
    """More keys than units."""
    found = groups(at) if _flips_apply(at) and at.block.phi.name != "hardswish" else None
    return found is not None and _spares(at, found) < 0


def _hidden_bias(at: Problem, data: Data) -> bool:
    """A key with a bias, where the replacement has none."""
    if at.hidden_bias or at.domain is not None or at.block.phi.name == "hardswish" or not _flips_apply(at):
        return False
    found, unit = groups(at), int(data["unit"])
    if found is None or int(found.of[unit]) < 0 or int((found.of == found.of[unit]).sum()) != 1:
        return False
    return abs(float(at.bias[unit])) > 32 * at.block.grain * float(at.up[unit].norm())


def _moves(data: Data, matrix: Tensor, size: float) -> bool:
    """Whether the matrix moves the certificate's direction, beyond rounding."""
    x = data["direction"].to(matrix)
    return bool((matrix @ x).norm() > 1e-10 * size * x.norm())


def _growth(at: Problem, data: Data) -> bool:
    """The replacement is bounded and the block is not; or on an open set both continue to where that shows."""
    block, norms = at.block, at.block.norms
    bounded = not block.gated and block.phi.family == "bounded"
    placed = [norms[place] for place in ("pre", "out") if place in norms]
    if any(norm.kind == "other" for norm in placed) or not block.phi.trusted or not (bounded or placed):
        return False
    if ("post" in norms or at.domain is not None) and at.caveat is not None:
        return False
    if at.domain is not None and not (placed or block.phi.analytic):
        return False
    return _moves(data, at.skip, at.long_skip)


def _family(at: Problem, data: Data) -> bool:
    """No sum of its units is linear."""
    phi = at.block.phi
    if at.caveat is not None or not phi.trusted or at.block.gated or phi.family not in ("elu", "even", "mish"):
        return False
    if (at.domain is not None and not phi.analytic) or {"pre", "out"} & at.block.norms.keys():
        return False
    return _moves(data, at.skip, at.long_skip)


def _at_zero(at: Problem, data: Data) -> bool:
    """The replacement is flat at 0: its hidden layer has no bias and vanishes faster than x. The block is not flat."""
    block, phi = at.block, at.block.phi
    flat = phi.at_zero == 0 and math.isfinite(phi.lipschitz) if block.gated else phi.family == "power"
    if at.caveat is not None or not phi.trusted or not flat or at.hidden_bias:
        return False
    if {"pre", "out", "input"} & block.norms.keys():
        return False
    point = torch.zeros(block.inputs, dtype=torch.float64, device=block.up.device)
    if at.domain is not None and not phi.analytic and not bool(at.domain.holds(point)):
        return False
    if block.up_bias is None and block.gate_bias is None:
        return _moves(data, at.skip, at.long_skip)
    if not phi.analytic:  # away from kinks the derivative is what autograd says
        inner = block.gate_bias if block.gated else block.up_bias
        if inner is None or any(bool((inner == kink).any()) for kink in phi.kinks):
            return False
    jacobian = block.derivative(point)
    shifts = "post" in block.norms and block.norms["post"].kind == "layernorm"
    return _moves(data, jacobian - jacobian.mean(0) if shifts else jacobian, 100 * block.derivative_size(point))


def _rank(at: Problem, data: Data) -> bool:
    """A linear block of a rank that the width cannot carry."""
    block, phi = at.block, at.block.phi
    if not phi.trusted or phi.family != "linear" or block.gated or block.norms or phi.odd is None or block.extreme:
        return False
    values = torch.linalg.svdvals(at.skip + at.odd / 2 * at.down @ at.up)
    return len(values) > at.width and float(values[at.width]) > max(1e-10 * at.bulk, at.tolerance)


def _bottleneck(at: Problem, data: Data) -> bool:
    """At one point the block's derivative has a rank above the width of the replacement."""
    block = at.block
    if block.norms or not block.phi.trusted:
        return False
    point = data["point"].double().to(block.up.device)
    if at.domain is not None and not bool(at.domain.holds(point)):
        return False
    if not block.phi.analytic:
        weight, bias = (block.up, block.up_bias) if block.gate is None else (block.gate, block.gate_bias)
        z = weight.double() @ point + (0 if bias is None else bias.double())
        z = z[weight.double().abs().sum(1) > 0]
        if any(bool(((z - kink).abs() < 1e-9).any()) for kink in block.phi.kinks):
            return False
    values = torch.linalg.svdvals(block.derivative(point))
    scale = block.derivative_size(point)
    return len(values) > at.width and float(values[at.width]) > (1e-9 + 8 * block.grain) * scale


CHECKS: dict[str, Callable[[Problem, Data], bool]] = {
    "dual": _dual,
    "integrality": _integrality,
    "spectral": _spectral,
    "count": _count,
    "hidden-bias": _hidden_bias,
    "growth": _growth,
    "family": _family,
    "degree": _at_zero,
    "linearisation": _at_zero,
    "rank": _rank,
    "bottleneck": _bottleneck,
}
