"""What a verdict is about, worked out once more for its check: in numpy, with nothing of the search.

The weights after the norms' quotients, the sizes that rounding is relative to, the units that share a key, and the
equation that flips would have to solve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._verdict import Certificate, Verdict

Array = NDArray[np.float64]
Index = slice | NDArray[np.int64]
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
    size_skip: Array  # entry by entry, up to its sign, what rounding is relative to
    size_up: Array
    size_down: Array
    long_skip: float  # norms before the quotients
    long_up: Array
    long_bias: Array
    long_down: Array
    radius: float | None
    sound: bool  # whether an `impossible` here is one of the block

    @property
    def odd(self) -> float:
        odd = self.block.phi.odd
        return float(odd) if odd is not None else math.nan


def _numbers(value: Tensor | None, shape: tuple[int, ...]) -> Array:
    return np.zeros(shape) if value is None else value.detach().double().cpu().numpy()


def setting(verdict: Verdict, certificate: Certificate) -> Setting:
    block = verdict.block
    h, d, o = block.width, block.inputs, block.outputs
    up, down = _numbers(block.up, (h, d)), _numbers(block.down, (o, h))
    bias, const = _numbers(block.up_bias, (h,)), _numbers(block.down_bias, (o,))
    skip = _numbers(block.skip, (o, d)) if isinstance(block.skip, Tensor) else np.eye(o, d) * block.skip
    sizes = [skip, up, down]  # their signs do not matter, and copies cost memory
    hidden, output = {
        "as-is": (block.up_bias is not None or block.gate_bias is not None, block.down_bias is not None),
        "allowed": (True, True),
        "none": (False, False),
    }[verdict.biases]
    radius, sound, norms = None, block.phi.trusted and not (block.phi.odd is not None and block.extreme), block.norms
    long_skip, long_bias = float(np.linalg.norm(skip)), np.abs(bias)
    long_up, long_down = np.sqrt(np.einsum("ij,ij->i", up, up)), np.sqrt(np.einsum("ij,ij->j", down, down))
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
        if not block.phi.analytic:
            sound &= _within_ball(inner, int((gain == 0).sum()) if norm.kind == "layernorm" else 0)
        shift = _numbers(norm.bias, (d,))
        long_skip, long_up = float(np.linalg.norm(skip * gain)), np.linalg.norm(up * gain, axis=1)
        long_bias = np.hypot(long_bias, np.linalg.norm(up * shift, axis=1))
        bias, const = bias + up @ shift, const + skip @ shift
        tiny = np.linalg.norm(up @ basis, axis=1) <= 64 * d * UNIT * np.linalg.norm(up, axis=1) * np.linalg.norm(basis)
        sizes[0], sizes[1] = np.abs(sizes[0]) @ np.abs(basis), np.abs(sizes[1]) @ np.abs(basis)
        skip, up = skip @ basis, up @ basis
        up[tiny] = 0
    if "post" in norms:
        norm = norms["post"]
        sound &= bool(norm.eps) and norm.kind != "other"
        sound &= norm.gain is None or bool((norm.gain != 0).all())
        if norm.kind == "layernorm":
            hidden_shift = np.linalg.norm(down - down.mean(0), axis=0) <= 64 * o * UNIT * np.linalg.norm(down, axis=0)
            sizes[0], sizes[2] = (np.abs(size) + np.abs(size).mean(0) for size in (sizes[0], sizes[2]))
            skip, down, const = skip - skip.mean(0), down - down.mean(0), const - const.mean(0)
            down[:, hidden_shift] = 0
    if norms and np.linalg.norm(skip) <= 64 * max(d, o) * UNIT * long_skip:
        skip = np.zeros_like(skip)  # the norms hide all of it
    silent = not bias.any() and not const.any() and (block.phi.at_zero == 0 or bool(np.all(up.any(axis=1))))
    output = output or silent  # no constant to make up
    if not output:
        long_skip = math.hypot(long_skip, float(np.linalg.norm(const)))
        skip = np.concatenate([skip, const[:, None]], 1)
        sizes[0] = np.concatenate([sizes[0], np.abs(const)[:, None]], 1)
    return Setting(
        block=block,
        width=verdict.width,
        hidden_bias=hidden,
        output_bias=output,
        skip=skip,
        up=up,
        bias=bias,
        down=down,
        const=const,
        size_skip=sizes[0],
        size_up=sizes[1],
        size_down=sizes[2],
        long_skip=long_skip,
        long_up=long_up,
        long_bias=long_bias,
        long_down=long_down,
        radius=radius,
        sound=bool(sound),
    )


def _within_ball(inner: Array, hidden: int) -> bool:
    """Whether |s| < 1 is all that `inner` needs to stay in the unit ball. Hidden channels make up the sum."""
    square = inner.T @ inner
    if hidden:
        square = square + np.outer(inner.sum(0), inner.sum(0)) / hidden
    reach = float(np.abs(square).sum(1).max(initial=0.0))
    return reach <= 1 + 1e-9 or float(np.linalg.eigvalsh(square)[-1]) <= 1 + 1e-9


def norms_of(at: Setting) -> tuple[Array, Array]:
    """|u_i| and |v_i|, without a copy of the weights."""
    return np.sqrt(np.einsum("ij,ij->i", at.up, at.up)), np.sqrt(np.einsum("ij,ij->j", at.down, at.down))


def tolerance(at: Setting) -> float:
    """What rounding of the stored weights may move, if every unit were flipped."""
    size = at.long_down * (at.long_up if at.output_bias else np.hypot(at.long_up, at.long_bias))
    norm = at.long_skip
    return max(4 * at.block.roundoff * math.hypot(at.odd * float(np.linalg.norm(size)), norm), 1e-12 * norm)


def group_units(at: Setting, loose: bool = True) -> tuple[list[list[int]], list[int]]:
    """Units that share a key, and the units that count for nothing. Loose: rounding may have told them apart."""
    homogeneous, u = at.block.phi.homogeneous, at.block.roundoff if loose else UNIT / 2
    within, grown = 32 * u, np.ones(len(at.up))
    lengths, columns = norms_of(at)
    idle = (lengths == 0) | (columns == 0)
    if loose:
        idle |= lengths * columns <= tolerance(at) / (abs(at.odd) * len(at.up))
    if at.radius is not None and not at.block.phi.analytic:
        idle |= np.abs(at.bias) >= at.radius * lengths * (1 - 1e-6)
    norms = np.maximum(np.hypot(lengths, at.bias), np.finfo(float).tiny)
    if at.block.norms:  # what a quotient took away has left its rounding behind
        within = max(within, 16 * max(at.block.inputs, at.block.outputs) * UNIT)
    if at.radius is not None:
        grown = np.maximum(np.hypot(at.long_up, at.long_bias) / np.maximum(norms, 1e-150), 1.0)
    wanted = np.flatnonzero(~idle)
    leader = {int(i): int(i) for i in wanted}

    def lead(i: int) -> int:
        while leader[i] != i:
            i = leader[i]
        return i

    # Most pairs differ already in a few entries; the rest is looked at in full.
    some = 96 if within < 1e-3 else 512
    spread = np.linspace(0, at.up.shape[1] - 1, min(some, at.up.shape[1])).astype(int)
    few = (np.concatenate([at.up[:, spread], at.bias[:, None]], 1) / norms[:, None])[wanted].astype(np.float32)
    square, reach = (few * few).sum(1), within * float(grown[wanted].max(initial=1.0))
    for start in range(0, len(wanted), 1024):
        apart = np.abs(few[start : start + 1024] @ few[start:].T)
        apart *= -2
        apart += square[start:]
        apart += square[start : start + 1024, None]
        for a, b in zip(*np.nonzero(apart <= (2 * reach) ** 2 + 2e-5), strict=True):
            i, j = int(wanted[a + start]), int(wanted[b + start])
            if i >= j:
                continue
            one, two = (np.append(at.up[k], at.bias[k]) for k in (i, j))
            long = max(norms[i], norms[j])
            one, two = (one / norms[i], two / norms[j]) if homogeneous else (one / long, two / long)
            if min(np.linalg.norm(one - two), np.linalg.norm(one + two)) <= within * max(grown[i], grown[j]):
                leader[max(lead(i), lead(j))] = min(lead(i), lead(j))
    found: dict[int, list[int]] = {}
    for k in wanted.tolist():
        found.setdefault(lead(k), []).append(k)
    spare = [int(i) for i in np.flatnonzero(idle)]
    kept = []
    for members in found.values():
        ratio = norms[members] / norms[members[0]] if homogeneous else np.ones(len(members))
        total = at.down[:, members] @ ratio
        if len(members) > 1 and np.linalg.norm(total) <= 2 * within * (at.long_down[members] @ ratio):
            spare += members
        else:
            kept.append(members)
    return kept, spare


def flip_equation(
    at: Setting, line: Index = slice(None), column: Index = slice(None)
) -> tuple[Array, Array, Array, Array, Array, Array] | None:
    """J, U, B and their sizes (up to sign) on some rows and columns; None where there are spare units."""
    groups, spare = group_units(at)
    if len(groups) != at.width or (spare and not at.output_bias):
        return None
    down, size_down = at.down[line], at.size_down[line]
    rows, size_rows = at.up, at.size_up
    if not at.output_bias:
        rows, size_rows = (np.concatenate([part, at.bias[:, None]], 1) for part in (rows, size_rows))
    rows, size_rows = rows[:, column], size_rows[:, column]
    goal, size = -at.skip[line][:, column] / at.odd, np.abs(at.size_skip[line][:, column]) / abs(at.odd)
    first = [members[0] for members in groups]
    if first == list(range(at.down.shape[1])):
        return down, rows, goal, size_down, size_rows, size
    size_down, size_rows = np.abs(size_down), np.abs(size_rows)
    joint, size_joint = down.copy(), size_down.copy()
    for members in groups:
        head = members[0]
        for i in members[1:]:
            towards = 1.0 if at.up[i] @ at.up[head] + at.bias[i] * at.bias[head] >= 0 else -1.0
            lengths = [math.hypot(float(np.linalg.norm(at.up[k])), at.bias[k]) for k in (i, head)]
            ratio = lengths[0] / lengths[1] if at.block.phi.homogeneous else 1.0
            joint[:, head] += ratio * down[:, i]
            size_joint[:, head] += ratio * size_down[:, i]
            if towards < 0:
                goal -= np.outer(down[:, i], rows[i])
                size += np.outer(size_down[:, i], size_rows[i])
    for i in spare:
        half = 0.5
        misses = at.radius is not None and abs(at.bias[i]) >= at.radius * np.linalg.norm(at.up[i])
        if misses and not at.block.phi.analytic:
            half = (1.0 if at.bias[i] > 0 else at.odd - 1) / at.odd
        goal -= half * np.outer(down[:, i], rows[i])
        size += abs(half) * np.outer(size_down[:, i], size_rows[i])
    return joint[:, first], rows[first], goal, size_joint[:, first], size_rows[first], size
