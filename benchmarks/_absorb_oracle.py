"""The oracle of `absorb_campaign.py`: what is true of a block, without a line of the library's decision.

`absorbable` decides in `fractions.Fraction` for class O whether flips, splits and fresh pairs make up the skip (on a
box: flips and affine units). `within_rounding` measures a replacement by the rule that `possible` promises;
`equal_exactly` computes it at rational points without rounding.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from unskip.absorption import Block, Domain

Matrix = list[list[Fraction]]

EXACT = {
    "relu": lambda z: max(z, Fraction(0)),
    "leaky_relu:0.5": lambda z: z if z > 0 else z / 2,
    "leaky_relu:-3": lambda z: z if z > 0 else -3 * z,
    "leaky_relu:0.01": lambda z: z if z > 0 else Fraction(0.01) * z,
    "leaky_relu:0.2": lambda z: z if z > 0 else Fraction(0.2) * z,
    "identity": lambda z: z,
    "abs": abs,
}


def exact(values: np.ndarray) -> Matrix:
    return [[Fraction(float(x)) for x in row] for row in np.atleast_2d(values)]


def rank(matrix: Matrix) -> int:
    """By elimination, without rounding."""
    rows, done = [list(row) for row in matrix], 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((i for i in range(done, len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        rows[done], rows[pivot] = rows[pivot], rows[done]
        for i in range(done + 1, len(rows)):
            if rows[i][column]:
                factor = rows[i][column] / rows[done][column]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[done], strict=True)]
        done += 1
    return done


@dataclass(frozen=True)
class Canonical:
    """Active keys with their row and joint column, and the linear part of the block."""

    rows: Matrix  # m x n
    joint: Matrix  # m x o
    linear: Matrix  # o x n: A + (c / 2) W_down W_up, or what the affine units leave on a box


def canonical(weights: dict[str, np.ndarray], odd: Fraction, homogeneous: bool, box: Any = None) -> Canonical:
    up, bias, down, skip = (exact(weights[name]) for name in ("up", "bias", "down", "skip"))
    n, o = len(up[0]), len(skip)
    groups: dict[tuple[Fraction, ...], list[Fraction]] = {}
    linear = [list(row) for row in skip]
    for i, row in enumerate(up):
        column = [down[k][i] for k in range(o)]
        shift = bias[0][i]
        slope = odd / 2
        if box is not None:  # a hinge that misses the box leaves an affine unit
            reach = sum(abs(u) * box for u in row)
            if abs(shift) >= reach and any(row):
                slope = Fraction(1) if shift > 0 else odd - 1
                row_counts = False
            else:
                row_counts = True
        else:
            row_counts = True
        for k in range(o):
            for j in range(n):
                linear[k][j] += slope * column[k] * row[j]
        if not any(row) or not row_counts:
            continue
        lead = next(x for x in row if x)
        scale = abs(lead) if homogeneous else Fraction(1)
        sign = 1 if lead > 0 else -1
        name = tuple(sign * x / scale for x in (*row, shift))
        joint = groups.setdefault(name, [Fraction(0)] * o)
        for k in range(o):
            joint[k] += scale * column[k]
    kept = {name: joint for name, joint in groups.items() if any(joint)}
    return Canonical([list(name[:-1]) for name in kept], list(kept.values()), linear)


def absorbable(form: Canonical, odd: Fraction, width: int, box: bool) -> bool:
    """Whether flips, splits of some keys and fresh pairs (on a box: affine units) make up the linear part."""
    m = len(form.rows)
    spares = width - m
    if spares < 0:
        return False
    o, n = len(form.linear), len(form.linear[0])
    half = odd / 2
    ones = [
        [[half * joint[k] * row[j] for j in range(n)] for k in range(o)]
        for row, joint in zip(form.rows, form.joint, strict=True)
    ]
    rough = np.array([[[float(x) for x in line] for line in one] for one in ones]).reshape(m, o, n)
    whole = np.array([[float(x) for x in line] for line in form.linear])
    for size in range((0 if box else min(spares, m)) + 1):
        room = spares if box else (spares - size) // 2
        for split in itertools.combinations(range(m), size):
            rest = [k for k in range(m) if k not in split]
            held = [form.rows[k] for k in split]
            base = rank(held) if held else 0
            signs = np.array(list(itertools.product((1, -1), repeat=len(rest)))).reshape(2 ** len(rest), len(rest))
            left = whole - np.einsum("sk,kij->sij", signs, rough[rest])
            most = base + room
            stack = left
            if held:
                lines = np.array([[float(x) for x in line] for line in held])
                size_of = max(float(np.abs(whole).max()), 1e-30) / float(np.abs(lines).max())
                stack = np.concatenate([left, np.broadcast_to(size_of * lines, (len(left), *lines.shape))], 1)
            if most >= min(stack.shape[1:]):
                return True
            # Floats say which choices are worth a look; fractions decide.
            values = np.linalg.svd(stack, compute_uv=False)
            for at in np.nonzero(values[:, most] <= 1e-6 * np.maximum(values[:, 0], 1e-300))[0]:
                result = [list(line) for line in form.linear]
                for sign, k in zip(signs[at], rest, strict=True):
                    for i in range(o):
                        for j in range(n):
                            result[i][j] -= int(sign) * ones[k][i][j]
                if rank(result + held) <= most:
                    return True
    return False


def within_rounding(block: Block, other: Block, domain: Domain | None, random: np.random.Generator) -> bool:
    """The rule, measured here: 1e-10 of the block's terms in float64, else 4 times what the block itself loses.

    The block's loss is at least one rounding of its output and of each term that it sums, each with the standard
    deviation u / sqrt(3): where the terms cancel a block may compute exactly on a few inputs by chance. Where inputs 8
    times as large would overflow, smaller ones are taken. Below the least number of the dtype there is nothing to lose.
    Inputs are Gaussian, or lie along an axis or a right singular vector of W_up.
    """
    made, like = other.bare(), block.bare()
    limit = torch.finfo(block.dtype).max / 8
    least = torch.finfo(block.dtype).smallest_normal * torch.finfo(block.dtype).eps
    up, down, skip = block.up.double().abs(), block.down.double().abs(), block.matrix.abs()
    shift = torch.zeros(len(up)) if block.up_bias is None else block.up_bias.double().abs()
    const = torch.zeros(len(down)) if block.down_bias is None else block.down_bias.double().abs()
    flat = float(like.phi.function(torch.zeros(1, dtype=torch.float64)).abs())  # softplus(0)
    ways = np.concatenate([np.eye(block.inputs), np.linalg.svd(block.up.double().numpy())[2]])

    def holds(size: float, way: np.ndarray | None = None) -> bool:
        x = torch.tensor(size * random.standard_normal((48, block.inputs)))
        if domain is not None:  # a box around the origin
            inner = 1e-2 if block.dtype == torch.float64 else 1e-6
            x = min(max(size, inner), 1.0) * torch.tensor(random.uniform(-1, 1, x.shape)) * domain.factor
        if way is not None:
            x = x[:, :1] * torch.tensor(way)
        for _ in range(12):
            low = x.to(block.dtype)
            hidden = 4 * (low.double().abs() @ up.mT + shift) + flat  # more than any activation here makes of it
            terms = low.double().abs() @ skip.mT + hidden @ down.mT + const
            if max(float(hidden.max()), float(terms.max())) < limit and bool(torch.isfinite(like(8 * low)).all()):
                break
            x = x / 8
        else:
            return True  # its biases alone come close to overflow
        truth = seen(block, like.double()(low.double()))
        gap = seen(block, made.double()(low.double())) - truth
        if block.dtype == torch.float64:
            least_terms = 0.0
            # A unit that is affine on the box has a constant of the box's size, which rounds.
            if domain is not None and block.activation.partition(":")[0] in ("relu", "leaky_relu"):
                corner = torch.tensor(random.uniform(-1, 1, x.shape)) * domain.factor
                bulk = corner.abs() @ skip.mT + (4 * (corner.abs() @ up.mT + shift) + flat) @ down.mT + const
                least_terms = 0.01 * float(bulk.norm())
            return float(gap.norm()) <= 1e-10 * max(float(terms.norm()), least_terms)
        summed = like.double().hidden(low.double())[:, None, :] * down, low.double()[:, None, :] * skip
        squares = sum(float(part.square().sum()) for part in summed) + len(low) * float(const.square().sum())
        own = float((seen(block, like(low).double()) - truth).norm())
        own = max(own, torch.finfo(block.dtype).eps / 2 * ((squares + float(truth.square().sum())) / 3) ** 0.5)
        own = max(own, least * len(low) ** 0.5 * (1 + float(down.sum(1).norm())))
        stored = seen(block, made(low).double()) - truth
        return max(float(gap.norm()), float(stored.norm())) <= 4 * own

    for size in (1e-6, 1e-3, 0.05, 0.3, 3.0, 30.0, 3e3, 1e5, *(own_size(block) * part for part in (0.1, 1.0, 10.0))):
        if not all(holds(size, way) for way in (None, *random.permutation(ways)[:2])):
            return False
    return block.dtype != torch.float16 or domain is not None or overflows_later(like, made, random)


def own_size(block: Block) -> float:
    """Of inputs: where the units of the block bend."""
    length = block.up.double().norm(dim=1)
    shift = torch.zeros_like(length) if block.up_bias is None else block.up_bias.double().abs()
    bend = (shift if block.activation in EXACT else shift + 1) / length
    bend = bend[torch.isfinite(bend) & (bend > 0)]
    return float(bend.median()) if len(bend) else 1.0


def overflows_later(block: Block, other: Block, random: np.random.Generator) -> bool:
    """Whether the replacement is finite wherever no number in the block overflows: rows, hidden layer, sum and skip."""
    x = random.standard_normal((96, block.inputs))
    x[:48] = np.sign(x[:48])
    x *= 65504 / np.abs(x).max(1, keepdims=True)
    for _ in range(100):
        low = torch.tensor(np.concatenate([x, 1.06 * x])).half()  # not always monotone
        rows = torch.nn.functional.linear(low, block.up, block.up_bias)
        parts = (rows, block.hidden(low), replace(block, skip=0.0)(low), block(low))
        over = ~torch.stack([part.isfinite().all(1) for part in (low, *parts)]).all(0).reshape(2, -1).all(0).numpy()
        if not over.any():
            break
        x[over] *= 0.9
    return bool(other(torch.tensor(x[~over]).half()).isfinite().all())


def seen(block: Block, out: torch.Tensor) -> torch.Tensor:
    """Outputs (n, o) as far as a LayerNorm after the sum sees them."""
    post = block.norms.get("post")
    return out - out.mean(1, keepdim=True) if post is not None and post.kind == "layernorm" else out


def keeps_channels(block: Block, other: Block, domain: Domain | None) -> bool:
    """Whether the block and its replacement differ by a small share of the skip in every output, input and direction,
    and in every output by no more than the rounding of the units that write to it (in float64 1e-10 of them).

    Only where the difference of the two is linear, or on a box affine. Read off in float64 from a step along each axis,
    both ways and past every kink. Rounding is allowed where the skip is zero.
    """
    one, two = block.bare().double(), other.bare().double()
    shift = torch.zeros_like(one.up[:, 0]) if one.up_bias is None else one.up_bias.abs()
    beyond = (shift + (0.0 if block.activation in EXACT else 10.0))[:, None] / one.up.abs()  # (h, d) where units bend
    far = 4 * torch.where(torch.isfinite(beyond), beyond, 0.0).amax(0)
    far = torch.where(far > 0, far, far.max() if bool(far.max() > 0) else 1.0)  # along others, as large an input
    step = torch.diag(far if domain is None else 0.99 * domain.factor)
    gap = [seen(block, two(x)) - seen(block, one(x)) for x in (step, -step)]
    left = ((gap[0] - gap[1]) / (2 * step.diagonal()[:, None])).mT
    skip = seen(block, block.matrix.mT).mT
    units = 4 * one.down.abs() @ one.up.abs() + block.matrix.abs()
    eps = torch.finfo(block.dtype).eps
    for dim in (0, 1):
        share = skip.norm(dim=dim)
        allowed = torch.where(share > 1e-9, 0.1 * share, 8 * eps * units.norm())
        if bool((left.norm(dim=dim) > allowed + 1e-9 * units.norm()).any()):
            return False
    if not block.norms:
        size = units.sum(1) + 4 * one.down.abs() @ (shift + 1) / step.diagonal().min()
        size += 0 if one.down_bias is None else one.down_bias.abs() / step.diagonal().min()
        rounding = 1e-10 if block.dtype == torch.float64 else 8 * eps
        if bool((left.norm(dim=1) > rounding * units.sum(1) + 1e-12 * size + 1e-13 * units.norm()).any()):
            return False
    return not _well_conditioned(skip) or _share(left, skip) <= 0.25


def _well_conditioned(skip: torch.Tensor) -> bool:
    return skip.shape[0] == skip.shape[1] and float(np.linalg.cond(skip.numpy())) < 1e6


def _share(left: torch.Tensor, skip: torch.Tensor) -> float:
    """The most that the gap is of the skip: the largest |left x| / |skip x|, and the same of the transposes."""
    pairs = ((left, skip), (left.mT, skip.mT))
    return max(float(np.linalg.norm(np.linalg.solve(b.numpy().T, a.numpy().T), 2)) for a, b in pairs)


def equal_exactly(block: Block, other: Block, random: np.random.Generator) -> bool:
    """At rational points, without rounding: the difference is at most 1e-9 of the block's terms (float64 weights)."""
    phi = EXACT[block.activation]

    def run(one: Block, x: list[Fraction]) -> tuple[list[Fraction], Fraction]:
        up, down = exact(one.up.double().numpy()), exact(one.down.double().numpy())
        bias = [Fraction(0)] * len(up) if one.up_bias is None else exact(one.up_bias.double().numpy())[0]
        const = [Fraction(0)] * len(down) if one.down_bias is None else exact(one.down_bias.double().numpy())[0]
        skip = exact(one.matrix.numpy())
        z = [sum(a * b for a, b in zip(row, x, strict=True)) + shift for row, shift in zip(up, bias, strict=True)]
        size = [
            sum(abs(a * b) for a, b in zip(row, x, strict=True)) + abs(shift)
            for row, shift in zip(up, bias, strict=True)
        ]
        hidden = [phi(each) for each in z]
        out, total = [], Fraction(0)
        for k in range(len(down)):
            out.append(
                sum(a * b for a, b in zip(skip[k], x, strict=True))
                + sum(a * b for a, b in zip(down[k], hidden, strict=True))
                + const[k]
            )
            total += sum(abs(a * b) for a, b in zip(skip[k], x, strict=True)) + abs(const[k])
            total += sum(abs(a) * 4 * b for a, b in zip(down[k], size, strict=True))
        return out, total

    for size in (Fraction(1, 100), 1, 100_000, Fraction(own_size(block))):
        x = [Fraction(int(random.integers(-99, 100)), 7) * size for _ in range(block.inputs)]
        (ours, terms), (theirs, _) = run(block, x), run(other, x)
        if sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) > Fraction(1, 10**9) * terms:
            return False
    return True
