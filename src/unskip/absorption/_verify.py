"""A second pair of eyes: checks a verdict from the block's weights and the certificate, with nothing of the search.

Everything is computed anew in float64 (numpy) with a bound on its rounding, or in whole numbers. What the activation is
known to be (bounded, class O, ...) is read from the table of activations, because it is proved and not computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._verdict import Certificate, Verdict

Array = NDArray[np.float64]
UNIT = 2.0**-53


@dataclass
class Setting:
    """The question in numbers: the weights after the norms' quotients, and their sizes before them."""

    block: Block
    width: int
    hidden_bias: bool
    output_bias: bool
    skip: Array
    up: Array
    bias: Array
    down: Array
    const: Array
    size_skip: Array  # entry by entry, what rounding is relative to
    size_up: Array
    size_down: Array
    radius: float | None
    sound: bool  # whether an `impossible` here is one of the block

    @property
    def odd(self) -> float:
        odd = self.block.phi.odd
        return float(odd) if odd is not None else math.nan


def verify(verdict: Verdict) -> bool:
    """Whether the verdict stands. All obstructions that it lists have to hold."""
    if verdict.status == "undecided":
        return verdict.weights is None and all(_holds(verdict, each.certificate) for each in verdict.obstructions)
    if verdict.status == "possible":
        return _replaces(verdict)
    if verdict.certificate is None:
        return False
    return all(_holds(verdict, each) for each in (verdict.certificate, *(o.certificate for o in verdict.obstructions)))


def _holds(verdict: Verdict, certificate: Certificate) -> bool:
    check = CHECKS.get(certificate.kind)
    return check is not None and check(_setting(verdict, certificate), certificate.data)


# --- The question -----------------------------------------------------------------------------------------------------


def _numbers(value: Tensor | None, shape: tuple[int, ...]) -> Array:
    return np.zeros(shape) if value is None else value.detach().double().cpu().numpy()


def _setting(verdict: Verdict, certificate: Certificate) -> Setting:
    block = verdict.block
    h, d, o = block.width, block.inputs, block.outputs
    up, down = _numbers(block.up, (h, d)), _numbers(block.down, (o, h))
    bias, const = _numbers(block.up_bias, (h,)), _numbers(block.down_bias, (o,))
    skip = _numbers(block.skip, (o, d)) if isinstance(block.skip, Tensor) else np.eye(o, d) * block.skip
    sizes = [np.abs(skip), np.abs(up), np.abs(down)]
    hidden, output = {
        "as-is": (block.up_bias is not None or block.gate_bias is not None, block.down_bias is not None),
        "allowed": (True, True),
        "none": (False, False),
    }[verdict.biases]
    radius, sound, norms = None, block.phi.trusted, block.norms
    if "input" in norms:
        norm, radius = norms["input"], math.sqrt(d)
        basis = np.asarray(_numbers(certificate.data.get("basis"), (d, d)))
        gain = np.ones(d) if norm.gain is None else _numbers(norm.gain, (d,))
        inner = np.divide(basis, gain[:, None], out=np.zeros_like(basis), where=gain[:, None] != 0)
        sound &= bool(norm.eps) and norm.kind != "other" and "basis" in certificate.data
        sound &= not np.any(basis[gain == 0])
        # The ball of s: directions that sum to zero, and no longer than the search believed.
        if norm.kind == "layernorm" and np.all(gain != 0):  # else the hidden channel makes up the sum
            sound &= bool(np.all(np.abs(inner.sum(0)) <= 1e-9 * (1 + np.abs(inner).sum(0))))
        shift = _numbers(norm.bias, (d,))
        bias, const = bias + up @ shift, const + skip @ shift
        tiny = np.linalg.norm(up @ basis, axis=1) <= 64 * d * UNIT * np.linalg.norm(up, axis=1) * np.linalg.norm(basis)
        sizes[0], sizes[1] = sizes[0] @ np.abs(basis), sizes[1] @ np.abs(basis)
        skip, up = skip @ basis, up @ basis
        up[tiny] = 0
    if "post" in norms:
        norm = norms["post"]
        sound &= bool(norm.eps) and norm.kind != "other"
        sound &= norm.gain is None or bool((norm.gain != 0).all())
        if norm.kind == "layernorm":
            hidden_shift = np.linalg.norm(down - down.mean(0), axis=0) <= 64 * o * UNIT * np.linalg.norm(down, axis=0)
            sizes[0], sizes[2] = sizes[0] + sizes[0].mean(0), sizes[2] + sizes[2].mean(0)
            skip, down, const = skip - skip.mean(0), down - down.mean(0), const - const.mean(0)
            down[:, hidden_shift] = 0
    silent = not bias.any() and not const.any() and (block.phi.at_zero == 0 or bool(np.all(up.any(axis=1))))
    output = output or silent  # no constant to make up
    if not output:
        skip = np.concatenate([skip, const[:, None]], 1)
        sizes[0] = np.concatenate([sizes[0], np.abs(const)[:, None]], 1)
    return Setting(
        block, verdict.width, hidden, output, skip, up, bias, down, const, sizes[0], sizes[1], sizes[2], radius, sound
    )


def _tolerance(at: Setting, which: NDArray[np.bool_] | None = None) -> float:
    rows = at.up if at.output_bias else np.concatenate([at.up, at.bias[:, None]], 1)
    size = np.linalg.norm(at.down, axis=0) * np.linalg.norm(rows, axis=1)
    norm = float(np.linalg.norm(at.skip))
    total = float(np.sqrt((size if which is None else size[which]) @ (size if which is None else size[which])))
    return max(4 * at.block.roundoff * math.hypot(at.odd * total, norm), 1e-12 * norm)


def _groups(at: Setting, loose: bool = True) -> tuple[list[list[int]], list[int]]:
    """Units that share a key, and the units that count for nothing. Loose: rounding may have told them apart."""
    homogeneous, u = at.block.phi.homogeneous, at.block.roundoff if loose else UNIT / 2
    within = 32 * u
    lengths, columns = np.linalg.norm(at.up, axis=1), np.linalg.norm(at.down, axis=0)
    idle = (lengths == 0) | (columns == 0)
    if loose:
        idle |= lengths * columns <= _tolerance(at) / (abs(at.odd) * len(at.up))
    if at.radius is not None and not at.block.phi.analytic:
        idle |= np.abs(at.bias) >= at.radius * lengths * (1 - 1e-6)
    rows = np.concatenate([at.up, at.bias[:, None]], 1)
    norms = np.maximum(np.linalg.norm(rows, axis=1), np.finfo(float).tiny)
    unit = rows / norms[:, None]
    wanted = np.flatnonzero(~idle)
    leader = {int(i): int(i) for i in wanted}

    def lead(i: int) -> int:
        while leader[i] != i:
            i = leader[i]
        return i

    # Most pairs differ already in a few entries; the rest is looked at in full.
    some = 96 if within < 1e-3 else 512
    spread = np.argsort(-np.abs(unit[wanted]).sum(0))[:some] if len(wanted) else np.arange(0)
    few = unit[wanted][:, spread].astype(np.float32)
    square = (few * few).sum(1)
    for start in range(0, len(wanted), 1024):
        apart = square[start : start + 1024, None] + square - 2 * np.abs(few[start : start + 1024] @ few.T)
        for a, b in zip(*np.nonzero(apart <= (2 * within) ** 2 + 2e-5), strict=True):
            i, j = int(wanted[a + start]), int(wanted[b])
            if i >= j:
                continue
            scale = max(norms[i], norms[j])
            one, two = (unit[i], unit[j]) if homogeneous else (rows[i] / scale, rows[j] / scale)
            if min(np.linalg.norm(one - two), np.linalg.norm(one + two)) <= within:
                leader[max(lead(i), lead(j))] = min(lead(i), lead(j))
    found: dict[int, list[int]] = {}
    for k in wanted.tolist():
        found.setdefault(lead(k), []).append(k)
    spare = [int(i) for i in np.flatnonzero(idle)]
    kept = []
    for members in found.values():
        ratio = norms[members] / norms[members[0]] if homogeneous else np.ones(len(members))
        total = at.down[:, members] @ ratio
        if len(members) > 1 and np.linalg.norm(total) <= 2 * within * (columns[members] @ ratio):
            spare += members
        else:
            kept.append(members)
    return kept, spare


def _equation(at: Setting) -> tuple[Array, Array, Array, Array, Array, Array] | None:
    """J, U, B and their sizes for a replacement without spare units; None where it has some."""
    groups, spare = _groups(at)
    if len(groups) != at.width or (spare and not at.output_bias):
        return None
    rows = at.up if at.output_bias else np.concatenate([at.up, at.bias[:, None]], 1)
    size_rows = at.size_up if at.output_bias else np.concatenate([at.size_up, np.abs(at.bias)[:, None]], 1)
    goal, size = -at.skip / at.odd, at.size_skip / abs(at.odd)
    joint, size_joint, first = at.down.copy(), at.size_down.copy(), [g[0] for g in groups]
    homogeneous = at.block.phi.homogeneous
    for members in groups:
        head = members[0]
        for i in members[1:]:
            towards = 1.0 if rows[i] @ rows[head] + at.bias[i] * at.bias[head] >= 0 else -1.0
            ratio = np.linalg.norm(rows[i]) / np.linalg.norm(rows[head]) if homogeneous else 1.0
            joint[:, head] += ratio * at.down[:, i]
            size_joint[:, head] += ratio * at.size_down[:, i]
            if towards < 0:
                goal -= np.outer(at.down[:, i], rows[i])
                size += np.outer(at.size_down[:, i], size_rows[i])
    for i in spare:
        half = 0.5
        if (
            at.radius is not None
            and not at.block.phi.analytic
            and abs(at.bias[i]) >= at.radius * np.linalg.norm(at.up[i])
        ):
            half = (1.0 if at.bias[i] > 0 else at.odd - 1) / at.odd
        goal -= half * np.outer(at.down[:, i], rows[i])
        size += half * np.outer(at.size_down[:, i], size_rows[i])
    return joint[:, first], rows[first], goal, size_joint[:, first], size_rows[first], size


# --- Impossible -------------------------------------------------------------------------------------------------------


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
    equation = _equation(at) if _flips_apply(at) else None
    if equation is None:
        return None
    joint, rows, goal, size_joint, size_rows, size = equation
    y = data["matrix"].double().cpu().numpy()
    cut = np.ix_(data["rows"].cpu().numpy(), data["columns"].cpu().numpy())
    line, column = cut[0].ravel(), cut[1].ravel()
    g = np.einsum("ik,ik->k", joint[line], y @ rows[:, column].T)
    inner = math.fsum(float(a @ b) for a, b in zip(y, goal[cut], strict=True))
    bulk = float((size_joint[line] * (np.abs(y) @ size_rows[:, column].T)).sum() + (np.abs(y) * size[cut]).sum())
    terms = at.block.inputs + at.block.outputs + len(rows) + y.shape[0] + y.shape[1] + 32
    return inner, g, 4 * terms * UNIT * bulk, float(np.linalg.norm(y))


def _dual(at: Setting, data: Mapping[str, Any]) -> bool:
    found = _rounded(at, data)
    if found is None:
        return False
    inner, g, slack, norm = found
    gap = max(inner - g[g > 0].sum(), g[g < 0].sum() - inner) - slack
    return bool(gap > 0 and abs(at.odd) * gap > norm * _tolerance(at))


def _integrality(at: Setting, data: Mapping[str, Any]) -> bool:
    found = _rounded(at, data)
    if found is None:
        return False
    inner, g, slack, norm = found
    own = g[int(data["index"])]
    rest = np.abs(np.delete(g, int(data["index"]))).sum() + slack
    return bool(abs(at.odd) * (min(abs(inner), abs(inner - own)) - rest) > norm * _tolerance(at))


def _enumeration(at: Setting, data: Mapping[str, Any]) -> bool:
    """Every subset, one low part after another."""
    equation = _equation(at) if _flips_apply(at) else None
    if equation is None or len(equation[1]) > 24:
        return False
    joint, rows, goal, *_ = equation
    ones = np.einsum("ik,kj->kij", joint, rows).reshape(len(rows), -1)
    low, least = min(10, len(ones)), math.inf
    table = np.array(list(itertools.product((0.0, 1.0), repeat=low))) @ ones[:low]
    for high in itertools.product((0.0, 1.0), repeat=len(ones) - low):
        least = min(least, float(np.linalg.norm(table + (np.array(high) @ ones[low:] - goal.ravel()), axis=1).min()))
    size = float(np.abs(ones).sum() + np.abs(goal).sum())
    return abs(at.odd) * (least - 64 * len(ones) * UNIT * size) > _tolerance(at)


def _subset_sum(at: Setting, data: Mapping[str, Any]) -> bool:
    """In whole numbers: no subset solves one equation modulo q, so none solves all of them."""
    block, odd = at.block, at.block.phi.odd
    groups, spare = _groups(at)
    if not _flips_apply(at) or odd is None or block.norms or spare or len(groups) != at.width != at.up.shape[0]:
        return False
    if len(groups) != len(at.up) or len(at.up) > 44:
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
    groups, _ = _groups(at)
    p = at.width - len(groups)
    if not _flips_apply(at) or not at.output_bias or p <= 0 or (at.block.phi.name == "hardswish" and np.any(at.bias)):
        return False
    full = Setting(**{**at.__dict__, "width": len(groups)})
    equation = _equation(full)
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
                if room >= len(values) or values[room] <= max(_tolerance(at) / abs(at.odd), 1e-9 * values[0]):
                    return False
    return True


def _spares(at: Setting) -> int:
    return at.width - len(_groups(at)[0])


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
    return bool(abs(at.odd) * left * right + _tolerance(at) < skip[rho - 1] * (1 - margin))


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
    size = np.linalg.norm(at.size_skip @ np.abs(basis)) * 1e-10
    return _spares(at) < 2 * int((values > size).sum())


def _fraction(value: float) -> Any:
    from fractions import Fraction

    return Fraction(float(value))


def _count(at: Setting, data: Mapping[str, Any]) -> bool:
    return _flips_apply(at) and at.block.phi.name != "hardswish" and len(_groups(at)[0]) > at.width


def _hidden_bias(at: Setting, data: Mapping[str, Any]) -> bool:
    """A key with a bias, where the replacement has none."""
    if not _flips_apply(at) or at.hidden_bias or at.radius is not None or at.block.phi.name == "hardswish":
        return False
    unit = int(data["unit"])
    groups, _ = _groups(at)
    alone = any(members == [unit] for members in groups)
    return alone and abs(at.bias[unit]) > 64 * at.block.roundoff * float(np.linalg.norm(at.up[unit]))


def _moves(at: Setting, data: Mapping[str, Any], matrix: Array, size: Array) -> bool:
    """Whether the matrix moves the certificate's direction, beyond rounding."""
    x = data["direction"].double().cpu().numpy()
    return bool(np.linalg.norm(matrix @ x) > 1e-10 * np.linalg.norm(size @ np.abs(x)))


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
        matrix = jacobian - jacobian.mean(0) if "post" in block.norms else jacobian
        size = np.abs(jacobian) + float(np.abs(at.size_down).sum() * np.abs(at.size_up).max()) * 1e-3
    return _moves(at, data, matrix, size)


def _rank(at: Setting, data: Mapping[str, Any]) -> bool:
    """A linear block of a rank that the width cannot carry."""
    phi = at.block.phi
    if not at.sound or phi.family != "linear" or at.block.gated or at.block.norms or phi.odd is None:
        return False
    columns = at.up.shape[1]
    total = at.skip[:, :columns] + at.odd / 2 * at.down @ at.up
    values = np.linalg.svd(total, compute_uv=False)
    size = np.linalg.norm(at.size_skip[:, :columns]) + abs(at.odd) * np.linalg.norm(at.size_down @ at.size_up)
    return len(values) > at.width and bool(values[at.width] > max(1e-10 * size, _tolerance(at)))


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
    scale = np.linalg.norm(at.size_skip) + np.linalg.norm(at.size_down) * np.linalg.norm(at.size_up)
    scale *= 1 + float(point.norm()) * (1 if block.gate is None else float(block.gate.double().norm()))
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


# --- Possible ---------------------------------------------------------------------------------------------------------


def _replaces(verdict: Verdict) -> bool:
    """Runs block and replacement in float64 on new inputs of several sizes, and looks at what the replacement is."""
    block, other = verdict.block, verdict.weights
    if other is None or other.width != verdict.width or isinstance(other.skip, Tensor) or other.skip != 0:
        return False
    allowed = {
        "as-is": (block.up_bias is not None, block.gate_bias is not None, block.down_bias is not None),
        "allowed": (True, True, True),
        "none": (False, False, False),
    }[verdict.biases]
    for may, bias in zip(allowed, (other.up_bias, other.gate_bias, other.down_bias), strict=True):
        if bias is not None and not may and bool(bias.any()):
            return False
    generator = torch.Generator().manual_seed(20260426)
    ours, theirs = block.double(), other.double()
    for size in (0.1, 1.0, 10.0):
        x = size * torch.randn(64, block.inputs, generator=generator, dtype=torch.float64)
        norms = block.norms
        if "input" in norms:
            x = norms["input"](x)
        x = x.to(block.up.device)
        f, g = ours(x), theirs(x)
        if not bool((f - g).norm() <= allowance(block, other, x) + 1e-30):
            return False
    return True


def allowance(block: Block, other: Block, x: Tensor) -> float:
    """How far rounding of the stored weights may move the outputs on x: a multiple of the sizes of all terms."""
    u = max(block.roundoff, 2.0**-50)
    total = 0.0
    for each in (block, other):
        inner = each.norms["pre"](x) if "pre" in each.norms else x
        hidden = inner.abs() @ each.up.double().abs().mT
        hidden = hidden + (0 if each.up_bias is None else each.up_bias.double().abs())
        if each.gate is not None:
            gate = inner.abs() @ each.gate.double().abs().mT
            hidden = hidden * (1 + gate + (0 if each.gate_bias is None else each.gate_bias.double().abs()))
        spread = hidden.square() @ each.down.double().square().mT  # errors of different units add as squares
        total += float(spread.sum().sqrt()) + float((x @ each.matrix.mT).norm())
        total += 0.0 if each.down_bias is None else float(each.down_bias.double().norm()) * len(x) ** 0.5
    scale = 1.0
    if "post" in block.norms:  # a norm divides by the size of what it gets
        norm = block.norms["post"]
        plain = block.double()
        before = plain.branch(x) + x @ plain.matrix.mT
        if norm.kind == "layernorm":
            before = before - before.mean(-1, keepdim=True)
        scale = float((before.square().mean(-1) + (norm.eps or 0.0)).rsqrt().max())
        scale *= 1.0 if norm.gain is None else float(norm.gain.double().abs().max())
    return 50 * u * total * scale
