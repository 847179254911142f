"""The canonical form: which units are active, and the equation that a flip set has to solve.

Up to affine functions a block of class O is  sum_k J_k e(u_k.x + b_k)  over distinct keys: +-(u, b), or for ReLU and
LeakyReLU the hyperplane u.x + b = 0. Units of one key merge (J_k is the sum of their columns). A key with J_k = 0, a
unit with u = 0 and a unit whose hinge misses the domain are inactive. All units beyond one for each active key are
spare: the replacement can use them for something else. With u_i = s_i r_i u_k, a replacement of m units, one for each
key, needs

    sum_k t_k J_k u_k^T = B,   t in {0, 1}^m,        B = -A / c + sum_i beta_i v_i u_i^T

where beta_i is 0 for a unit with s_i = 1, -1 for a unit with s_i = -1, and removes the linear part of an inactive unit.

Units are merged only if they are equal up to the rounding of float64. Units that differ by no more than the rounding of
the stored weights are counted by `count_uncertain`. They are never merged, but they rule out the verdict `impossible`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.absorption._problem import EPS, Problem

KEY_TOLERANCE = 16 * EPS
CHUNK_ENTRIES = 2**22  # entries of rows that are compared in full at a time
COORDINATES = 64  # coordinates in which rows are compared first
CHUNK_ROWS = 1024  # rows that are compared with their neighbours at a time


@dataclass(frozen=True, eq=False)
class Keys:
    """The active keys of a problem: `joint` (o, m), `rows` (m, d), and the (o, d) `goal` B."""

    joint: Tensor
    rows: Tensor
    goal: Tensor
    first: Tensor  # (m,) the first unit of each key
    member: Tensor  # (h,) the key of each unit, -1 if it is inactive
    sizes: Tensor  # (m,) the number of units of each key
    ratio: Tensor  # (h,) r_i of each unit
    spares: int  # the width of the replacement minus m

    @property
    def count(self) -> int:
        return len(self.first)

    def without(self, split: tuple[int, ...]) -> Tensor:
        """(m,) which keys remain without these."""
        kept = torch.ones_like(self.first, dtype=torch.bool)
        if split:
            kept[torch.tensor(split).to(kept.device)] = False
        return kept


def canonical_keys(problem: Problem) -> Keys:
    """Groups the units that are equal up to the rounding of float64."""
    up, bias, down, phi = problem.up, problem.bias, problem.down, problem.block.phi
    h = len(up)
    lengths = problem.row_norms
    idle = (lengths == 0) | (problem.column_norms == 0)
    linear = torch.full((h,), problem.odd / 2, dtype=torch.float64, device=up.device)
    if problem.affine_possible and problem.domain is not None:
        side = problem.domain.side(up, bias)
        idle |= side != 0
        linear[side > 0] = 1.0
        linear[side < 0] = problem.odd - 1  # the slope of a LeakyReLU; 0 for ReLU
    ratio = lengths if phi.homogeneous else torch.ones_like(lengths)
    units = torch.arange(h, device=up.device)
    lead = _leads(problem, ~idle)
    if not bool(idle.any()) and torch.equal(lead, units):  # every unit is active and has its own key
        return separate_keys(problem)
    member = torch.full_like(lead, -1)
    member[~idle] = torch.unique(lead[~idle], return_inverse=True)[1]
    count = int(member.max()) + 1
    active = member >= 0
    joint = down.new_zeros(len(down), count)
    joint.index_add_(1, member[active], (down * ratio)[:, active])
    bulk = down.new_zeros(count).index_add_(0, member[active], (problem.raw_down_norms * ratio)[active])
    rounding = 16 * EPS * max(4, len(down) if problem.block.norms else 1)  # the projection of a norm rounds as well
    alive = joint.norm(dim=0) > rounding * bulk
    # The last entry is for units without a key, whose index is -1.
    renumber = torch.where(alive, torch.cumsum(alive.long(), 0) - 1, -1)
    member = torch.cat([renumber, renumber.new_full((1,), -1)])[member]
    active = member >= 0
    joint, count = joint[:, alive], int(alive.sum())
    first = torch.full((count,), h, device=up.device).scatter_reduce_(0, member[active], units[active], "amin")
    sizes = torch.bincount(member[active], minlength=count)
    against = (up * up[lead]).sum(1) + bias * bias[lead] < 0
    beta = torch.where(active, -1.0 * against, -linear / problem.odd)
    zero = lengths == 0
    beta = torch.where(zero, torch.zeros_like(beta), beta)
    target, rows = problem.target, problem.rows
    if not problem.output_bias and bool(zero.any()):
        target = target.clone()
        target[:, -1] += problem.constant_scale * down[:, zero] @ phi.function(bias[zero])
    moved = beta != 0
    goal = -target / problem.odd
    if bool(moved.any()):
        goal = goal + (down[:, moved] * beta[moved]) @ rows[moved]
    # The column of a single unit is kept bit for bit.
    joint = torch.where(sizes == 1, down[:, first], joint / ratio[first])
    return Keys(joint, rows[first], goal, first, member, sizes, ratio, problem.width - count)


def separate_keys(problem: Problem) -> Keys:
    """One key for every unit, even for equal ones. With it two mirrored units may both stay unflipped."""
    h, goal = len(problem.up), -problem.target / problem.odd
    units = torch.arange(h, device=problem.up.device)
    ratio = problem.row_norms if problem.block.phi.homogeneous else torch.ones_like(problem.row_norms)
    return Keys(problem.down, problem.rows, goal, units, units, torch.ones_like(units), ratio, problem.width - h)


def count_uncertain(problem: Problem, keys: Keys) -> int:
    """How many more units may be spare if the stored weights are exact only up to rounding."""
    roundoff = problem.block.roundoff
    member = keys.member
    active = member >= 0
    small = 2 * roundoff * problem.rounding_scale / (abs(problem.odd) * len(member))
    weak = active & (problem.column_norms * problem.row_norms <= small)
    if problem.affine_possible and problem.domain is not None:
        weak |= active & ~problem.domain.cuts(problem.up, problem.bias)
    heads = torch.zeros_like(active)
    heads[keys.first] = True
    for left, right in _pairs(problem, heads, max(4 * roundoff, 4 * KEY_TOLERANCE), lambda a, b: ~(weak[a] & weak[b])):
        weak[left] = weak[right] = True  # one of the two may be enough, and both may cancel
    big = keys.sizes > 1
    if bool(big.any()):  # columns of one key that almost cancel
        bulk = problem.raw_down_norms.new_zeros(keys.count)
        bulk.index_add_(0, member[active], (problem.raw_down_norms * keys.ratio)[active])
        cancel = keys.joint.norm(dim=0) * keys.ratio[keys.first] <= 8 * roundoff * bulk
        weak[keys.first[big & cancel]] = True
    return int((weak & heads).sum())


def _leads(problem: Problem, wanted: Tensor) -> Tensor:
    """(h,) for every unit the first wanted unit with the same key, which may be the unit itself.

    Everything stays on the device of the weights, and the number of operations does not grow with the units.
    """
    units = torch.arange(len(problem.up), device=problem.up.device)
    lead = units.clone()
    for left, right in _pairs(problem, wanted, KEY_TOLERANCE, lambda a, b: lead[b] > a):
        lead.scatter_reduce_(0, right, left, "amin")
    return torch.where(lead[lead] == lead, lead, units)


def _apart(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    """The distance of two rows, and of their biases, from being equal up to sign (for ReLU also up to a factor).

    Rows are compared relative to their norms, and biases relative to their own sizes: a hinge that is close to the
    origin for inputs of size 1 is not close to it for smaller ones.
    """
    up, bias, lengths = problem.up, problem.bias, problem.row_norms
    one, two = lengths[a], lengths[b]
    if not problem.block.phi.homogeneous:
        one = two = torch.maximum(one, two)
    left, right = up[a] / one[:, None], up[b] / two[:, None]
    shift, other = bias[a] / one, bias[b] / two
    scale = torch.maximum(shift.abs(), other.abs()).clamp(min=torch.finfo(torch.float64).tiny)
    same = torch.maximum((left - right).norm(dim=1), (shift - other).abs() / scale)
    return torch.minimum(same, torch.maximum((left + right).norm(dim=1), (shift + other).abs() / scale))


def _pairs(
    problem: Problem, wanted: Tensor, tolerance: float, matters: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields pairs of wanted rows that are equal within the tolerance, the lower index first.

    `matters` is called between chunks, and pairs for which it is False are left out.
    """
    some = min(max(64, CHUNK_ENTRIES // problem.up.shape[1]), 2**15)
    for left, right in _close(problem, wanted, 4 * tolerance):
        while len(left):
            a, b = left[:some], right[:some]
            same = _apart(problem, a, b) <= tolerance
            yield a[same], b[same]
            left, right = left[some:], right[some:]
            still = matters(left, right)
            left, right = left[still], right[still]


def _close(problem: Problem, wanted: Tensor, tolerance: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields all pairs of wanted rows that are equal up to sign and `tolerance` after normalisation, and some others.

    The distance along one direction, and that in a few coordinates, are lower bounds on the distance: rows are sorted
    by the first, and neighbours are compared by the second.
    """
    up, bias, d = problem.up, problem.bias, problem.up.shape[1]
    lengths = torch.hypot(problem.row_norms, bias).clamp(min=torch.finfo(torch.float64).tiny)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(d + 1, generator=generator, dtype=torch.float64).to(up.device)
    index = torch.nonzero(wanted).flatten()
    value = ((up @ probe[:-1] + bias * probe[-1]) / (lengths * probe.norm()))[index].abs()
    value, order = value.sort()
    index = index[order]
    last = torch.searchsorted(value, value + tolerance + 8 * (d + 1) * EPS, right=True)[
        CHUNK_ROWS - 1 :: CHUNK_ROWS
    ].tolist()
    some = torch.randperm(d, generator=generator)[:COORDINATES].to(up.device)
    few = (torch.cat([up[:, some], bias[:, None]], 1)[index] / lengths[index, None]).float()
    square = few.square().sum(1)
    for start, end in zip(range(0, len(index), CHUNK_ROWS), [*last, len(index)], strict=False):
        these, those = slice(start, start + CHUNK_ROWS), slice(start, end)
        apart = square[these, None] + square[None, those] - 2 * (few[these] @ few[those].mT).abs()
        left, right = torch.nonzero(apart <= tolerance**2 + 1e-6, as_tuple=True)
        left, right = index[left[left < right] + start], index[right[left < right] + start]
        yield torch.minimum(left, right), torch.maximum(left, right)
