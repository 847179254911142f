"""The check of each kind of obstruction: one function a kind, from the weights and the certificate's data alone.

Everything is computed in float64 with a bound on its rounding, or in whole numbers. What the activation is known to be
(bounded, class O, ...) is read from the table of activations, because it is proved and not computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unskip.absorption._activations import KINKS
from unskip.absorption._question import UNIT, Setting, flip_equation, relaxed, tolerance


def _flips_apply(at: Setting) -> bool:
    """Whether flips are all that a replacement without spare units can do."""
    phi = at.block.phi
    if not at.sound or at.block.gated or phi.family != "odd-linear" or {"pre", "out"} & at.block.norms.keys():
        return False
    if phi.name == "hardswish":
        return at.radius is None and (not bool(at.bias.any()) or _few_parallel(at))
    return True


def _few_parallel(at: Setting) -> bool:
    lengths = at.up.norm(dim=1)
    unit = at.up[lengths > 0] / lengths[lengths > 0, None]
    return all(int(((part @ unit.mT).abs() > 1 - 1e-6).sum(1).max()) <= 2 for part in unit.split(1024) if len(part))


def _rounded(at: Setting, data: Mapping[str, Any]) -> tuple[float, Tensor, float, float] | None:
    """<Y, B>, all g_k, the bound on their rounding, and |Y|_F."""
    y, line, column = (data[name].to(at.up.device) for name in ("matrix", "rows", "columns"))
    y = y.double()
    every = len(line) == at.skip.shape[0] and len(column) == at.skip.shape[1]
    if not _flips_apply(at):
        return None
    equation = flip_equation(at) if every else flip_equation(at, line, column)
    if equation is None or (y.ndim == 1 and not (every and len(line) == len(column))):
        return None
    joint, rows, goal, size_joint, size_rows, size = equation
    terms = at.block.inputs + at.block.outputs + len(rows) + len(line) + len(column) + 32
    # In parts, to keep memory low; a vector is a diagonal.
    parts, large = [], y.abs()
    products = y * (goal.diagonal() if y.ndim == 1 else goal)
    bulk = (large * (size.diagonal() if y.ndim == 1 else size)).sum()
    for start in range(0, len(rows), 2048):
        units = slice(start, start + 2048)
        if y.ndim == 1:
            whole = joint[:, units].mT * rows[units]
            same = size_joint is joint and size_rows is rows
            parts.append(whole @ y)
            bulk = bulk + ((whole if same else size_joint[:, units].mT * size_rows[units]).abs_() @ large).sum()
        else:
            parts.append((joint[:, units] * (y @ rows[units].mT)).sum(0))
            bulk = bulk + (size_joint[:, units].abs() * (large @ size_rows[units].abs().mT)).sum()
    inner = float(products.sum() if y.ndim == 1 else products.sum(1).sum())
    return inner, torch.cat(parts), 4 * terms * UNIT * float(bulk), float(y.norm())


def _dual(at: Setting, data: Mapping[str, Any]) -> bool:
    found = _rounded(at, data)
    if found is None:
        return False
    inner, g, slack, norm = found
    gap = max(inner - float(g.clamp(min=0).sum()), float(g.clamp(max=0).sum()) - inner) - slack
    return bool(gap > 0 and abs(at.odd) * gap > norm * tolerance(at))


def _integrality(at: Setting, data: Mapping[str, Any]) -> bool:
    found = _rounded(at, data)
    if found is None:
        return False
    inner, g, slack, norm = found
    index = int(data["index"])
    own = float(g[index])
    rest = float(g[:index].abs().sum() + g[index + 1 :].abs().sum()) + slack
    return bool(abs(at.odd) * (min(abs(inner), abs(inner - own)) - rest) > norm * tolerance(at))


def _enumeration(at: Setting, data: Mapping[str, Any]) -> bool:
    """Every subset, one low part after another."""
    equation = flip_equation(at) if _flips_apply(at) else None
    if equation is None or len(equation[1]) > 24:
        return False
    joint, rows, goal = _arrays(*equation[:3])
    ones = np.einsum("ik,kj->kij", joint, rows).reshape(len(rows), -1)
    low, least = min(10, len(ones)), math.inf
    table = np.array(list(itertools.product((0.0, 1.0), repeat=low))) @ ones[:low]
    for high in itertools.product((0.0, 1.0), repeat=len(ones) - low):
        least = min(least, float(np.linalg.norm(table + (np.array(high) @ ones[low:] - goal.ravel()), axis=1).min()))
    size = float(np.abs(ones).sum() + np.abs(goal).sum())
    return abs(at.odd) * (least - 64 * len(ones) * UNIT * size) > tolerance(at)


def _arrays(*values: Tensor) -> list[NDArray[np.float64]]:
    """Of few units: what is tried one case after another is faster on the host."""
    return [value.cpu().numpy() for value in values]


def _subset_sum(at: Setting, data: Mapping[str, Any]) -> bool:
    """In whole numbers: no subset solves one equation modulo q, so none solves all of them."""
    block, odd = at.block, at.block.phi.odd
    if not _flips_apply(at) or odd is None or block.norms or len(at.up) > 44:
        return False
    if not len(at.groups.head) == at.width == len(at.up):
        return False
    q, z = int(data["modulus"]), data["functional"]

    def residue(value: float) -> int:
        top, bottom = float(value).as_integer_ratio()
        return top * pow(bottom, -1, q) % q

    rows = at.up if at.output_bias else torch.cat([at.up, at.bias[:, None]], 1)
    u, v, a = ([[residue(x) for x in line] for line in part.tolist()] for part in (rows, at.down.mT, at.skip))
    values = [
        sum(v[k][i] * z[i][j] * u[k][j] for i in range(len(z)) for j in range(len(z[0]))) % q for k in range(len(u))
    ]
    total = sum(z[i][j] * a[i][j] for i in range(len(z)) for j in range(len(z[0])))
    goal = -total * odd.denominator * pow(odd.numerator, -1, q) % q
    halves: list[set[int]] = []
    for part in (values[::2], values[1::2]):
        sums = {0}
        for value in part:
            sums |= {(s + value) % q for s in sums}
        halves.append(sums)
    return not any((goal - s) % q in halves[1] for s in halves[0])


def _exhaustion(at: Setting, data: Mapping[str, Any]) -> bool:
    """Every use of the spare units."""
    at = relaxed(at)
    p = _spares(at)
    biased_hardswish = at.block.phi.name == "hardswish" and bool(at.bias.any())
    if not _flips_apply(at) or p <= 0 or biased_hardswish:
        return False
    equation = flip_equation(replace(at, width=at.width - p))
    if equation is None:
        return False
    joint, rows, goal = _arrays(*equation[:3])
    m = len(rows)
    affine = at.radius is not None and not at.block.phi.analytic
    for size in range((0 if affine else min(p, m)) + 1):
        room = p if affine else size + (p - size) // 2
        for split in itertools.combinations(range(m), size):
            rest = [k for k in range(m) if k not in split]
            held = rows[list(split)]
            held = held * (np.linalg.norm(goal) / np.maximum(np.linalg.norm(held, axis=1, keepdims=True), 1e-300))
            for code in itertools.product((0.0, 1.0), repeat=len(rest)):
                matrix = np.concatenate([(joint[:, rest] * code) @ rows[rest] - goal, held])
                values = np.linalg.svd(matrix, compute_uv=False)
                if room >= len(values) or values[room] <= max(tolerance(at) / abs(at.odd), 1e-9 * values[0]):
                    return False
    return True


def _spares(at: Setting) -> int:
    return at.width - len(at.groups.head)


def _linear_only(at: Setting) -> bool:
    """Whether a replacement that is equal differs from the block by a linear map of the units and few new rank-ones."""
    phi = at.block.phi
    plain = at.sound and not at.block.gated and phi.family == "odd-linear" and at.output_bias
    if {"pre", "out"} & at.block.norms.keys() or not plain:
        return False
    return phi.name != "hardswish" or (at.radius is None and (not bool(at.bias.any()) or _few_parallel(at)))


def _spectral(at: Setting, data: Mapping[str, Any]) -> bool:
    at = relaxed(at)
    rho, i, j = (int(data[name]) for name in ("rank", "i", "j"))
    p = max(_spares(at), 0)
    if at.radius is not None and not at.block.phi.analytic and at.odd < 1:
        return False
    if not _linear_only(at) or rho <= p or i < 1 or j < 1 or i + j - 1 != rho - p:
        return False
    skip, down, up = (torch.linalg.svdvals(part).tolist() for part in (at.skip, at.down, at.up))
    if rho > len(skip):
        return False
    margin = 1e-10
    left = (down[i - 1] if i <= len(down) else 0.0) + margin * down[0]
    right = (up[j - 1] if j <= len(up) else 0.0) + margin * up[0]
    return bool(abs(at.odd) * left * right + tolerance(at) < skip[rho - 1] * (1 - margin))


def _kernel(at: Setting, data: Mapping[str, Any]) -> bool:
    """Directions that no unit sees, checked in whole numbers; the skip acts on them with rank r > p / 2."""
    at = relaxed(at)
    basis = data["kernel"].to(at.up)
    if not _linear_only(at) or at.block.norms or at.radius is not None:
        return False
    columns = [[Fraction(value) for value in column] for column in basis.mT.tolist()]
    for row in at.up.tolist():
        seen = [(place, Fraction(value)) for place, value in enumerate(row) if value]
        if any(sum(value * column[place] for place, value in seen) for column in columns):
            return False
    values = torch.linalg.svdvals(at.skip @ basis)
    size = float((at.size_skip.abs() @ basis.abs()).norm()) * 1e-10
    return _spares(at) < 2 * int((values > size).sum())


def _count(at: Setting, data: Mapping[str, Any]) -> bool:
    return _flips_apply(at) and at.block.phi.name != "hardswish" and _spares(at) < 0


def _hidden_bias(at: Setting, data: Mapping[str, Any]) -> bool:
    """A key with a bias, where the replacement has none."""
    if not _flips_apply(at) or at.hidden_bias or at.radius is not None or at.block.phi.name == "hardswish":
        return False
    unit, of = int(data["unit"]), at.groups.of
    group = int(of[unit])
    alone = group >= 0 and int((of == group).sum()) == 1
    return alone and abs(float(at.bias[unit])) > 64 * at.block.roundoff * float(at.up[unit].norm())


def _moves(data: Mapping[str, Any], matrix: Tensor, size: Tensor) -> bool:
    """Whether the matrix moves the certificate's direction, beyond rounding."""
    x = data["direction"].to(matrix)
    return bool((matrix @ x).norm() > 1e-10 * (size.abs() @ x.abs()).norm())


def _growth(at: Setting, data: Mapping[str, Any]) -> bool:
    """The replacement is bounded and the block is not; or on an open set both continue to where that shows."""
    block, norms = at.block, at.block.norms
    bounded = not block.gated and block.phi.family == "bounded"
    placed = [norms[place] for place in ("pre", "out") if place in norms]
    normed = any(norm.kind in ("layernorm", "rmsnorm") for norm in placed)
    if any(norm.kind == "other" for norm in placed):
        return False
    if not block.phi.trusted or not (bounded or normed) or ("post" in norms and not at.sound):
        return False
    if at.radius is not None and not (at.sound and (normed or block.phi.analytic)):
        return False
    return _moves(data, *_skip(at))


def _skip(at: Setting) -> tuple[Tensor, Tensor]:
    columns = at.up.shape[1]
    return at.skip[:, :columns], at.size_skip[:, :columns]


def _family(at: Setting, data: Mapping[str, Any]) -> bool:
    phi = at.block.phi
    known = phi.family in ("elu", "even") or phi.family == "mish"
    if not at.sound or at.block.gated or not known or (at.radius is not None and not phi.analytic):
        return False
    return not ({"pre", "out"} & at.block.norms.keys()) and _moves(data, *_skip(at))


def _at_zero(at: Setting, data: Mapping[str, Any]) -> bool:
    """The replacement is flat at 0: its hidden layer has no bias and vanishes faster than x. The block is not flat."""
    block = at.block
    phi = block.phi
    flat = phi.at_zero == 0 and math.isfinite(phi.lipschitz) if block.gated else phi.family == "power"
    if not at.sound or not flat or at.hidden_bias or {"pre", "out", "input"} & block.norms.keys():
        return False
    matrix, size = _skip(at)
    if block.up_bias is not None or block.gate_bias is not None:
        point = torch.zeros(block.inputs, dtype=torch.float64, device=block.up.device)
        if not phi.analytic:  # away from kinks the derivative is what autograd says
            inner = block.gate_bias if block.gated else block.up_bias
            if inner is None or bool((inner == 0).any()):
                return False
        jacobian = block.derivative(point)
        shifts = "post" in block.norms and block.norms["post"].kind == "layernorm"
        matrix = jacobian - jacobian.mean(0) if shifts else jacobian
        size = torch.full_like(jacobian, 100 * block.derivative_size(point))
    return _moves(data, matrix, size)


def _rank(at: Setting, data: Mapping[str, Any]) -> bool:
    """A linear block of a rank that the width cannot carry."""
    phi = at.block.phi
    if not at.sound or phi.family != "linear" or at.block.gated or at.block.norms or phi.odd is None:
        return False
    skip, bulk = _skip(at)
    values = torch.linalg.svdvals(skip + at.odd / 2 * at.down @ at.up)
    size = float(bulk.norm() + abs(at.odd) * (at.size_down.abs() @ at.size_up.abs()).norm())
    return len(values) > at.width and float(values[at.width]) > max(1e-10 * size, tolerance(at))


def _bottleneck(at: Setting, data: Mapping[str, Any]) -> bool:
    """At one point the block's derivative has a rank above the width of the replacement."""
    block = at.block
    if block.norms or not block.phi.trusted:
        return False
    point = data["point"].double().to(block.up.device)
    if not block.phi.analytic:
        weight, bias = (block.up, block.up_bias) if block.gate is None else (block.gate, block.gate_bias)
        z = weight.double() @ point + (0 if bias is None else bias.double())
        z = z[weight.double().abs().sum(1) > 0]
        if any(bool(((z - kink).abs() < 1e-9).any()) for kink in KINKS.get(block.phi.name, (0.0,))):
            return False
    values = torch.linalg.svdvals(block.derivative(point))
    scale = block.derivative_size(point)
    return len(values) > at.width and float(values[at.width]) > 1e-9 * scale + 8 * block.roundoff * scale


CHECKS: dict[str, Callable[[Setting, Mapping[str, Any]], bool]] = {
    "dual": _dual,
    "integrality": _integrality,
    "enumeration": _enumeration,
    "subset-sum": _subset_sum,
    "exhaustion": _exhaustion,
    "spectral": _spectral,
    "kernel": _kernel,
    "count": _count,
    "hidden-bias": _hidden_bias,
    "growth": _growth,
    "family": _family,
    "degree": _at_zero,
    "linearisation": _at_zero,
    "rank": _rank,
    "bottleneck": _bottleneck,
}
