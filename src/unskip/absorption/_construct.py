"""Builds replacements: the weights of a block without its skip, from a flip set and a use for the spare units.

Flipping unit i negates its row and bias and keeps its column. For class O, with S the flipped units,

    F(x) - G_S(x) = E_S x + const,     E_S = A + c W_down[:, S] W_up[S, :],

so the error of any flip set is known in closed form. Two units of one key represent any rank-one map along its row
(with columns J + y for the row and -y for its mirror), and a fresh pair represents any rank-one map at all:
a (phi(n.x) - phi(-n.x)) = c a n.x.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._keys import Keys
from unskip.absorption._problem import Biases, Problem

MAX_RANK_ENTRIES = 200_000  # entries of the largest weight whose rank is computed


@dataclass(frozen=True, eq=False)
class Built:
    """A replacement and its remaining linear error, `residual` (o, n), in the coordinates of the problem."""

    block: Block
    residual: Tensor
    flips: Tensor | None  # unit indices, if only flips were used


def build(problem: Problem, keys: Keys, flips: Tensor, split: tuple[int, ...] = ()) -> Built | None:
    """Builds the replacement that flips some keys, splits others, and uses the remaining units for fresh pairs.

    Returns None if it would need more units or a bias that is not allowed.
    """
    block = problem.block
    up = block.up.detach().double()
    bias = up.new_zeros(len(up)) if block.up_bias is None else block.up_bias.detach().to(up)
    flips = flips.to(up.device)
    kept = keys.without(split)
    rest = (keys.joint[:, kept] * flips[kept]) @ keys.rows[kept] - keys.goal
    sign = torch.where(kept, 1 - 2.0 * flips.double(), torch.ones_like(kept, dtype=torch.float64))
    rows, biases = up[keys.first] * sign[:, None], bias[keys.first] * sign
    columns = _joint(problem, keys)
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
    made = _finish(problem, rows, biases, columns, _constant(problem, keys, bias, rows, biases, columns))
    if made is None:
        return None
    only_flips = not split and len(keys.first) == block.width == problem.width
    return Built(made, problem.odd * rest, keys.first[flips] if only_flips else None)


def _constant(problem: Problem, keys: Keys, bias: Tensor, rows: Tensor, biases: Tensor, columns: Tensor) -> Tensor:
    """(o,) the output bias of the replacement."""
    block, half = problem.block.bare().double(), problem.odd / 2
    if problem.affine_possible and problem.domain is not None:  # units may be affine: compare at one point
        point = problem.domain.center[None]
        return (block(point) - block.phi.function(point @ rows.mT + biases) @ columns.mT)[0]
    # The even parts are equal. They are left out, because a large phi(0) would add rounding.
    blind = problem.row_norms == 0
    blind[keys.first] = False  # the units of the keys are kept as they are
    even = block.phi.function(bias[blind]) - half * bias[blind]
    const = half * (block.down @ bias - columns @ biases) + block.down[:, blind] @ even
    return const if block.down_bias is None else const + block.down_bias


def _joint(problem: Problem, keys: Keys) -> Tensor:
    """The summed columns of the keys, before the projection of a norm."""
    down = problem.block.down.detach().double()
    active = keys.member >= 0
    joint = down.new_zeros(len(down), keys.count)
    joint.index_add_(1, keys.member[active], (down * keys.ratio)[:, active])
    return torch.where(keys.sizes == 1, down[:, keys.first], joint / keys.ratio[keys.first])


def _fresh(problem: Problem, rest: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns new units that represent as much of the linear map `rest` as `room` units can, and the remainder."""
    affine = problem.affine_allowed
    count = room if affine else room // 2
    d = problem.block.inputs
    nothing = rest.new_zeros(0, d), rest.new_zeros(0), rest.new_zeros(len(problem.block.down), 0)
    if count <= 0 or float(rest.norm()) <= 1e-14 * problem.skip_norm:
        return *nothing, rest
    left, values, right = torch.linalg.svd(rest, full_matrices=False)
    use = min(count, int((values > 1e-13 * values[0]).sum()))
    root = new_row_norms(problem.block, values[:use], right[:use])
    columns, lines = left[:, :use] * (values[:use] / root), right[:use] * root[:, None]
    remains = rest - columns @ lines
    lines, shifts = (
        (lines, lines.new_zeros(use)) if problem.output_bias else (lines[:, :-1], lines[:, -1] / problem.constant_scale)
    )
    if affine and problem.domain is not None:  # one unit each, with its hinge outside the domain
        shifts = shifts + 1.01 * problem.domain.reach(lines)
        return lines, shifts, problem.odd * columns, remains
    return torch.cat([lines, -lines]), torch.cat([shifts, -shifts]), torch.cat([columns, -columns], 1), remains


def new_row_norms(block: Block, values: Tensor, right: Tensor) -> Tensor:
    """The norms of new rows: those of their columns, but in float16 no row overflows unless an input does."""
    root = values.sqrt()
    return root.minimum(1 / right.abs().sum(1)) if block.dtype == torch.float16 else root


def _finish(problem: Problem, rows: Tensor, biases: Tensor, columns: Tensor, const: Tensor | None) -> Block | None:
    """Returns the block in its original dtypes, or None if it overflows or needs a bias that is not allowed."""
    block = problem.block
    if bool(biases.any()) and not problem.hidden_bias:
        return None
    dtype = block.up.dtype if block.up_bias is None else block.up_bias.dtype
    up_bias = biases.to(dtype) if bool(biases.any()) or (block.up_bias is not None and problem.hidden_bias) else None
    down_bias = None
    if const is not None and not problem.no_output_bias:
        dtype = block.down.dtype if block.down_bias is None else block.down_bias.dtype
        down_bias = const.to(dtype) if bool(const.any()) or block.down_bias is not None else None
    # Without an output bias the search has already made the constant vanish, up to rounding.
    up, down = rows.to(block.up.dtype), columns.to(block.down.dtype)
    if not all(bool(torch.isfinite(each).all()) for each in (up, down, up_bias, down_bias) if each is not None):
        return None  # the weights overflow their dtype
    return replace(block, up=up, down=down, up_bias=up_bias, down_bias=down_bias, skip=0.0)


def independent_rows(rows: Tensor) -> list[int]:
    """Indices of independent rows, best conditioned first: the pivots of an LU decomposition in a random basis."""
    h, n = rows.shape
    if not h or not bool(rows.any()):
        return []
    basis = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(rows)
    factor, swaps, _ = torch.linalg.lu_factor_ex(rows / rows.abs().max() @ basis)
    diagonal = factor.diagonal().abs()
    small = torch.nonzero(diagonal <= 1e-10 * diagonal[0]).flatten()
    count = int(small[0]) if len(small) else len(diagonal)
    order = list(range(h))
    for place, other in enumerate(swaps.tolist()):
        order[place], order[other - 1] = order[other - 1], order[place]
    return order[:count]


def allows_gate_bias(block: Block, biases: Biases) -> bool:
    """Whether the replacement may have a bias in its gate."""
    return biases == "allowed" or (biases == "as-is" and block.gate_bias is not None)


def extra_width(problem: Problem, biases: Biases) -> int | None:
    """A number of additional units that is enough; None if none is known or none exists.

    The rows of large blocks are assumed to be in general position: their rank would cost more than the verdict.
    """
    block, phi = problem.block, problem.block.phi
    if {"pre", "out"} & block.norms.keys() or not phi.trusted:
        return None
    short = max(block.width - problem.width, 0)
    rank, n = skip_rank(block.matrix), problem.up.shape[1]
    if block.gated:  # units with a constant gate
        return rank + short if phi.at_zero or allows_gate_bias(block, biases) else None
    if phi.family == "linear":
        whole = min(block.inputs, block.outputs, rank + block.width)
        return max(0, whole - problem.width)
    bent = block.up_bias is not None and bool(block.up_bias.any())
    if phi.family != "odd-linear" or (not problem.hidden_bias and (bent or not problem.output_bias)):
        return None
    rank = skip_rank(problem.skip)
    if problem.affine_allowed:
        return rank + short
    if not problem.output_bias:  # fresh pairs reproduce the constant as well
        return 2 * min(rank + 1, block.outputs) + short
    small = problem.up.numel() <= MAX_RANK_ENTRIES
    rows = int(torch.linalg.matrix_rank(problem.up, rtol=1e-10)) if small else min(block.width, n)
    return min(2 * rank, 2 * n - rows) + short


def skip_rank(skip: Tensor) -> int:
    """The rank of a skip; a multiple of the identity needs no decomposition."""
    o, n = skip.shape
    if o == n and bool((skip == torch.diag(skip.diagonal())).all()):
        return int((skip.diagonal() != 0).sum())
    return int(torch.linalg.matrix_rank(skip))
