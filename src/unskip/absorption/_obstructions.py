"""The check of each kind of obstruction: one function a kind, from the weights and the certificate's data alone.

Everything is computed in float64 with a bound on its rounding, or in whole numbers. What the activation is known to be
(bounded, class O, ...) is read from the table of activations, because it is proved and not computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from unskip.absorption._question import UNIT, Array, Setting, flip_equation, group_units, tolerance


def _flips_apply(at: Setting) -> bool:
    """Whether flips are all that a replacement without spare units can do."""
    phi = at.block.phi
    if not at.sound or at.block.gated or phi.family != "odd-linear" or {"pre", "out"} & at.block.norms.keys():
        return False
    if phi.name == "hardswish":
        if at.radius is not None:
            return False
        return not np.any(at.bias) or _few_parallel(at)
    return True


def _few_parallel(at: Setting) -> bool:
    lengths = np.linalg.norm(at.up, axis=1)
    unit = at.up[lengths > 0] / lengths[lengths > 0, None]
    return all(
        (np.abs(unit[s : s + 1024] @ unit.T) > 1 - 1e-6).sum(1).max(initial=0) <= 2 for s in range(0, len(unit), 1024)
    )


def _rounded(at: Setting, data: Mapping[str, Any]) -> tuple[float, Array, float, float] | None:
    """<Y, B>, all g_k, the bound on their rounding, and |Y|_F."""
    y = data["matrix"].double().cpu().numpy()
    line, column = (data[name].cpu().numpy() for name in ("rows", "columns"))
    every = len(line) == at.skip.shape[0] and len(column) == at.skip.shape[1]
    if not _flips_apply(at):
        return None
    equation = flip_equation(at) if every else flip_equation(at, line, column)
    if equation is None:
        return None
    joint, rows, goal, size_joint, size_rows, size = equation
    terms = at.block.inputs + at.block.outputs + len(rows) + len(line) + len(column) + 32
    if y.ndim == 1:  # a diagonal
        if not every or len(line) != len(column):
            return None
        inner, bulk, parts = math.fsum(y * goal.diagonal()), float(np.abs(y) @ size.diagonal()), []
        for start in range(0, len(rows), 512):
            units = slice(start, start + 512)
            parts.append((joint[:, units].T * rows[units]) @ y)
            bulk += float((np.abs(size_joint[:, units].T * size_rows[units]) @ np.abs(y)).sum())
        g = np.concatenate(parts)
    else:
        g = np.einsum("ik,ik->k", joint, y @ rows.T)
        inner = math.fsum(float(a @ b) for a, b in zip(y, goal, strict=True))
        bulk = float((np.abs(size_joint) * (np.abs(y) @ np.abs(size_rows).T)).sum() + (np.abs(y) * size).sum())
    return inner, g, 4 * terms * UNIT * bulk, float(np.linalg.norm(y))


def _dual(at: Setting, data: Mapping[str, Any]) -> bool:
    found = _rounded(at, data)
    if found is None:
        return False
    inner, g, slack, norm = found
    gap = max(inner - g[g > 0].sum(), g[g < 0].sum() - inner) - slack
    return bool(gap > 0 and abs(at.odd) * gap > norm * tolerance(at))


def _integrality(at: Setting, data: Mapping[str, Any]) -> bool:
    found = _rounded(at, data)
    if found is None:
        return False
    inner, g, slack, norm = found
    own = g[int(data["index"])]
    rest = np.abs(np.delete(g, int(data["index"]))).sum() + slack
    return bool(abs(at.odd) * (min(abs(inner), abs(inner - own)) - rest) > norm * tolerance(at))


def _enumeration(at: Setting, data: Mapping[str, Any]) -> bool:
    """Every subset, one low part after another."""
    equation = flip_equation(at) if _flips_apply(at) else None
    if equation is None or len(equation[1]) > 24:
        return False
    joint, rows, goal, *_ = equation
    ones = np.einsum("ik,kj->kij", joint, rows).reshape(len(rows), -1)
    low, least = min(10, len(ones)), math.inf
    table = np.array(list(itertools.product((0.0, 1.0), repeat=low))) @ ones[:low]
    for high in itertools.product((0.0, 1.0), repeat=len(ones) - low):
        least = min(least, float(np.linalg.norm(table + (np.array(high) @ ones[low:] - goal.ravel()), axis=1).min()))
    size = float(np.abs(ones).sum() + np.abs(goal).sum())
    return abs(at.odd) * (least - 64 * len(ones) * UNIT * size) > tolerance(at)


def _subset_sum(at: Setting, data: Mapping[str, Any]) -> bool:
    """In whole numbers: no subset solves one equation modulo q, so none solves all of them."""
    block, odd = at.block, at.block.phi.odd
    groups, spare = group_units(at)
    if not _flips_apply(at) or odd is None or block.norms or spare or len(at.up) > 44:
        return False
    if not len(groups) == at.width == len(at.up):
        return False
    q, z = int(data["modulus"]), data["functional"]

    def residue(value: float) -> int:
        top, bottom = float(value).as_integer_ratio()
        return top * pow(bottom, -1, q) % q

    rows = at.up if at.output_bias else np.concatenate([at.up, at.bias[:, None]], 1)
    u, v, a = ([[residue(x) for x in line] for line in part] for part in (rows, at.down.T, at.skip))
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
    groups, _ = group_units(at)
    p = at.width - len(groups)
    if not _flips_apply(at) or not at.output_bias or p <= 0 or (at.block.phi.name == "hardswish" and np.any(at.bias)):
        return False
    full = Setting(**{**at.__dict__, "width": len(groups)})
    equation = flip_equation(full)
    if equation is None:
        return False
    joint, rows, goal, *_ = equation
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
    return at.width - len(group_units(at)[0])


def _linear_only(at: Setting) -> bool:
    """Whether a replacement that is equal differs from the block by a linear map of the units and few new rank-ones."""
    phi = at.block.phi
    plain = at.sound and not at.block.gated and phi.family == "odd-linear" and at.output_bias
    if {"pre", "out"} & at.block.norms.keys() or not plain:
        return False
    return phi.name != "hardswish" or (at.radius is None and (not np.any(at.bias) or _few_parallel(at)))


def _spectral(at: Setting, data: Mapping[str, Any]) -> bool:
    rho, i, j = (int(data[name]) for name in ("rank", "i", "j"))
    p = max(_spares(at), 0)
    if at.radius is not None and not at.block.phi.analytic and at.odd < 1:
        return False
    if not _linear_only(at) or rho <= p or i < 1 or j < 1 or i + j - 1 != rho - p:
        return False
    skip, down, up = (np.linalg.svd(part, compute_uv=False) for part in (at.skip, at.down, at.up))
    if rho > len(skip):
        return False
    margin = 1e-10
    left = (down[i - 1] if i <= len(down) else 0.0) + margin * down[0]
    right = (up[j - 1] if j <= len(up) else 0.0) + margin * up[0]
    return bool(abs(at.odd) * left * right + tolerance(at) < skip[rho - 1] * (1 - margin))


def _kernel(at: Setting, data: Mapping[str, Any]) -> bool:
    """Directions that no unit sees, checked in whole numbers; the skip acts on them with rank r > p / 2."""
    basis = data["kernel"].double().cpu().numpy()
    if not _linear_only(at) or at.block.norms or at.radius is not None:
        return False
    for row in at.up:
        for column in basis.T:
            if sum((_fraction(a) * _fraction(b) for a, b in zip(row, column, strict=True) if a and b), _fraction(0.0)):
                return False
    values = np.linalg.svd(at.skip @ basis, compute_uv=False)
    size = np.linalg.norm(np.abs(at.size_skip) @ np.abs(basis)) * 1e-10
    return _spares(at) < 2 * int((values > size).sum())


def _fraction(value: float) -> Any:
    from fractions import Fraction

    return Fraction(float(value))


def _count(at: Setting, data: Mapping[str, Any]) -> bool:
    return _flips_apply(at) and at.block.phi.name != "hardswish" and len(group_units(at)[0]) > at.width


def _hidden_bias(at: Setting, data: Mapping[str, Any]) -> bool:
    """A key with a bias, where the replacement has none."""
    if not _flips_apply(at) or at.hidden_bias or at.radius is not None or at.block.phi.name == "hardswish":
        return False
    unit = int(data["unit"])
    groups, _ = group_units(at)
    alone = any(members == [unit] for members in groups)
    return alone and abs(at.bias[unit]) > 64 * at.block.roundoff * float(np.linalg.norm(at.up[unit]))


def _moves(at: Setting, data: Mapping[str, Any], matrix: Array, size: Array) -> bool:
    """Whether the matrix moves the certificate's direction, beyond rounding."""
    x = data["direction"].double().cpu().numpy()
    return bool(np.linalg.norm(matrix @ x) > 1e-10 * np.linalg.norm(np.abs(size) @ np.abs(x)))


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
    columns = at.up.shape[1]
    return _moves(at, data, at.skip[:, :columns], at.size_skip[:, :columns])


def _family(at: Setting, data: Mapping[str, Any]) -> bool:
    phi = at.block.phi
    known = phi.family in ("elu", "even") or phi.family == "mish"
    if not at.sound or at.block.gated or not known or (at.radius is not None and not phi.analytic):
        return False
    columns = at.up.shape[1]
    return not ({"pre", "out"} & at.block.norms.keys()) and _moves(
        at, data, at.skip[:, :columns], at.size_skip[:, :columns]
    )


def _at_zero(at: Setting, data: Mapping[str, Any]) -> bool:
    """The replacement is flat at 0: its hidden layer has no bias and vanishes faster than x. The block is not flat."""
    block = at.block
    phi = block.phi
    flat = phi.at_zero == 0 and math.isfinite(phi.lipschitz) if block.gated else phi.family == "power"
    if not at.sound or not flat or at.hidden_bias or {"pre", "out", "input"} & block.norms.keys():
        return False
    columns = at.up.shape[1]
    matrix, size = at.skip[:, :columns], at.size_skip[:, :columns]
    if block.up_bias is not None or block.gate_bias is not None:
        point = torch.zeros(block.inputs, dtype=torch.float64, device=block.up.device)
        if not phi.analytic:  # away from kinks the derivative is what autograd says
            inner = block.gate_bias if block.gated else block.up_bias
            if inner is None or bool((inner == 0).any()):
                return False
        jacobian = block.derivative(point).cpu().numpy()
        shifts = "post" in block.norms and block.norms["post"].kind == "layernorm"
        matrix = jacobian - jacobian.mean(0) if shifts else jacobian
        size = np.full_like(jacobian, 100 * block.derivative_size(point))
    return _moves(at, data, matrix, size)


def _rank(at: Setting, data: Mapping[str, Any]) -> bool:
    """A linear block of a rank that the width cannot carry."""
    phi = at.block.phi
    if not at.sound or phi.family != "linear" or at.block.gated or at.block.norms or phi.odd is None:
        return False
    columns = at.up.shape[1]
    total = at.skip[:, :columns] + at.odd / 2 * at.down @ at.up
    values = np.linalg.svd(total, compute_uv=False)
    size = np.linalg.norm(at.size_skip[:, :columns]) + abs(at.odd) * np.linalg.norm(
        np.abs(at.size_down) @ np.abs(at.size_up)
    )
    return len(values) > at.width and bool(values[at.width] > max(1e-10 * size, tolerance(at)))


KINKS = {"hardswish": (-3.0, 3.0), "hardsigmoid": (-3.0, 3.0), "hardtanh": (-1.0, 1.0), "relu6": (0.0, 6.0)}


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
    jacobian = block.derivative(point).cpu().numpy()
    values = np.linalg.svd(jacobian, compute_uv=False)
    scale = block.derivative_size(point)
    return len(values) > at.width and bool(values[at.width] > 1e-9 * scale + 8 * block.roundoff * scale)


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
