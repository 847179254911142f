"""Replacements: the weights of a block without its skip, built from a flip set and a use for the spare units.

Flipping unit i turns its row and bias around and keeps its column. For class O, with S the flipped units,

    F(x) - G_S(x) = E_S x + const,     E_S = A + c W_down[:, S] W_up[S, :],

so the error of any flip set is known in closed form. Two units of one key give any rank-one along its row (J + y on the
row, -y on its mirror), and a fresh pair any rank-one at all: a (phi(n.x) - phi(-n.x)) = c a n.x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._canonical import Keys
from unskip.absorption._reduce import Problem


@dataclass(frozen=True, eq=False)
class Built:
    """A replacement with the linear error that is left, (o, n), in the coordinates of the problem."""

    block: Block
    left: Tensor
    flips: Tensor | None  # unit indices, where flips are all that was done


def build(problem: Problem, keys: Keys, flips: Tensor, split: tuple[int, ...] = ()) -> Built | None:
    """The replacement that flips some keys, splits others, and spends what is left on fresh pairs."""
    block = problem.block
    up, down = block.up.detach().double(), block.down.detach().double()
    bias = up.new_zeros(len(up)) if block.up_bias is None else block.up_bias.detach().to(up)
    flips = flips.to(up.device)
    kept = keys.without(split)
    rest = (keys.joint[:, kept] * flips[kept]) @ keys.rows[kept] - keys.goal
    plain = bool((keys.sizes == 1).all()) and keys.count == block.width == problem.width
    if plain and not split:
        sign = 1 - 2.0 * flips.double()
        order = keys.first
        rows, biases, columns = up.clone(), bias.clone(), down
        rows[order] = up[order] * sign[:, None]
        biases[order] = bias[order] * sign
        chosen = order[flips]
        const = None if block.down_bias is None else block.down_bias.detach().to(up)
        shift = problem.odd * down[:, chosen] @ bias[chosen]
        if problem.offset is not None:  # along it the flips need not add up; it is a constant
            shift = shift + (block.matrix + problem.odd * down[:, chosen] @ up[chosen]) @ problem.offset
        if bool(shift.any()):
            const = shift if const is None else const + shift
        made = _finish(problem, rows, biases, columns, const)
        return None if made is None else Built(made, problem.odd * rest, chosen.sort().values)
    joint = _joint(problem, keys)
    sign = torch.where(kept, 1 - 2.0 * flips.double(), torch.ones_like(kept, dtype=torch.float64))
    rows, biases = up[keys.first] * sign[:, None], bias[keys.first] * sign
    columns = joint.clone()
    room = problem.width - keys.count - len(split)
    if split:
        at = torch.tensor(split).to(up.device)
        share = rest @ torch.linalg.pinv(keys.rows[at])  # (o, |T|)
        columns[:, at] += share
        rows = torch.cat([rows, -up[keys.first[at]]])
        biases = torch.cat([biases, -bias[keys.first[at]]])
        columns = torch.cat([columns, -share], 1)
        rest = rest - share @ keys.rows[at]
    made_rows, made_biases, made_columns, rest = _fresh(problem, rest, room)
    rows = torch.cat([rows, made_rows])
    biases = torch.cat([biases, made_biases])
    columns = torch.cat([columns, made_columns], 1)
    spare = problem.width - len(rows)
    if spare < 0:
        return None
    rows = torch.cat([rows, rows.new_zeros(spare, rows.shape[1])])
    biases = torch.cat([biases, biases.new_zeros(spare)])
    columns = torch.cat([columns, columns.new_zeros(len(columns), spare)], 1)
    # One point settles the constant.
    point = up.new_zeros(1, up.shape[1]) if problem.offset is None else problem.offset[None]
    bare = block.bare().double()
    there = block.phi.function(point @ rows.mT + biases) @ columns.mT
    const = (bare(point) - there)[0]
    made = _finish(problem, rows, biases, columns, const)
    return None if made is None else Built(made, problem.odd * rest, None)


def _joint(problem: Problem, keys: Keys) -> Tensor:
    """The columns of the keys before any quotient."""
    block = problem.block
    down, up = block.down.detach().double(), problem.up
    ratio = up.new_ones(len(up))
    if block.phi.homogeneous:
        ratio = torch.cat([up, problem.bias[:, None]], 1).norm(dim=1)
    active = keys.member >= 0
    joint = down.new_zeros(len(down), keys.count)
    joint.index_add_(1, keys.member[active], (down * ratio)[:, active])
    return torch.where(keys.sizes == 1, down[:, keys.first], joint / ratio[keys.first])


def _fresh(problem: Problem, rest: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Units that carry as much of the linear map `rest` as there is room for, and what is left of it."""
    affine = problem.one_each
    count = room if affine else room // 2
    d = problem.block.inputs
    nothing = rest.new_zeros(0, d), rest.new_zeros(0), rest.new_zeros(len(problem.block.down), 0)
    if count <= 0 or float(rest.norm()) <= 1e-14 * problem.size:
        return *nothing, rest
    left, values, right = torch.linalg.svd(rest, full_matrices=False)
    use = min(count, int((values > 1e-13 * values[0]).sum()))
    root = values[:use].sqrt()
    columns, lines = left[:, :use] * root, right[:use] * root[:, None]
    remains = rest - columns @ lines
    lines, shifts = (lines, lines.new_zeros(use)) if problem.output_bias else (lines[:, :-1], lines[:, -1])
    if problem.basis is not None and problem.offset is not None:
        lines = lines @ torch.linalg.pinv(problem.basis)
        shifts = shifts - lines @ problem.offset
    if affine:
        seen = lines if problem.basis is None else lines @ problem.basis
        reach = 1.01 * (problem.radius or 0.0) * seen.norm(dim=1) + problem.bend
        return lines, shifts + reach, problem.odd * columns, remains
    return torch.cat([lines, -lines]), torch.cat([shifts, -shifts]), torch.cat([columns, -columns], 1), remains


def _finish(problem: Problem, rows: Tensor, biases: Tensor, columns: Tensor, const: Tensor | None) -> Block | None:
    """The block in the dtypes it came in, or None where it would need a bias that is not allowed."""
    block = problem.block
    if bool(biases.any()) and not problem.hidden_bias:
        return None
    dtype = block.up.dtype if block.up_bias is None else block.up_bias.dtype
    up_bias = biases.to(dtype) if bool(biases.any()) or (block.up_bias is not None and problem.hidden_bias) else None
    down_bias = None
    if const is not None:
        dtype = block.down.dtype if block.down_bias is None else block.down_bias.dtype
        if not problem.drop_constant:
            down_bias = const.to(dtype) if bool(const.any()) or block.down_bias is not None else None
        # Otherwise the search has already made the constant vanish, within rounding.
    return replace(
        block,
        up=rows.to(block.up.dtype),
        down=columns.to(block.down.dtype),
        up_bias=up_bias,
        down_bias=down_bias,
        skip=0.0,
    )


def stored_error(problem: Problem, made: Block) -> Tensor | None:
    """The linear map between a block and its replacement as stored, (o, n); None where units may be affine.

    A replacement that is equal has the same A + (c / 2) W_down W_up. New weights are rounded, and that shows here.
    """
    if problem.bounded:
        return None
    block, half = problem.block, problem.odd / 2
    ours, theirs = (half * each.down.detach().double() @ each.up.detach().double() for each in (block, made))
    left: Tensor = block.matrix + ours - theirs
    left = left if problem.basis is None else left @ problem.basis
    norm = block.norms.get("post")
    return left - left.mean(0, keepdim=True) if norm is not None and norm.kind == "layernorm" else left


def output_errors(block: Block, other: Block, samples: int = 64, seed: int = 0) -> dict[str, float]:
    """Relative errors of the outputs on random inputs, in float64 and in the dtype of the weights, and what rounding
    explains of them."""
    block, other = block.known(), other.known()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, block.inputs, generator=generator, dtype=torch.float64).to(block.up.device)
    if "input" in block.norms:
        x = block.norms["input"](x)
    truth = block.double()(x)
    size = max(float(truth.norm()), 1e-300)
    plain = float((other.double()(x) - truth).norm()) / size
    stored = x.to(block.dtype)
    same = block.double()(stored.double())
    ours, theirs = other(stored).double(), block(stored).double()
    return {
        "float64": plain,
        "stored": float((ours - same).norm()) / size,
        "original_stored": float((theirs - same).norm()) / size,
        "explained": _explained(block, other, x) / size,
    }


def _explained(block: Block, other: Block, x: Tensor) -> float:
    """50 u times the sum of what every unit adds up, |v| |z|, in both blocks."""
    bare = block.bare().double()
    total = float((x.abs() @ bare.matrix.abs().mT).norm())
    for each in (bare, other.bare().double()):
        z = x.abs() @ each.up.abs().mT + (0 if each.up_bias is None else each.up_bias.abs())
        z = z + (abs(each.phi.at_zero) if math.isfinite(each.phi.at_zero) else 0)  # softplus is not 0 at 0
        total += float((z @ each.down.abs().mT).norm())
        total += 0.0 if each.down_bias is None else float(each.down_bias.norm()) * len(x) ** 0.5
    if "post" in block.norms:
        before = bare(x)
        norm = block.norms["post"]
        if norm.kind == "layernorm":
            before = before - before.mean(-1, keepdim=True)
        total *= float((before.square().mean(-1) + (norm.eps or 0.0)).rsqrt().max())
        total *= 1.0 if norm.gain is None else float(norm.gain.double().abs().max())
    return 50 * max(block.roundoff, 2.0**-50) * total
