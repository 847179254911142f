"""The canonical form: which units really count.

Up to affine functions a block of class O is  sum_k J_k e(u_k.x + b_k)  over distinct keys: +-(u, b), or for ReLU and
LeakyReLU the hyperplane u.x + b = 0. Units of one key merge (J_k is their sum), a key whose J_k is zero counts for
nothing, and neither does a unit with u = 0, nor one whose hinge misses the domain. What is left over is spare: a spare
unit of the replacement can be used for something else. With u_i = s_i r_i u_k, a replacement of m units, one on each
key, needs

    sum_k t_k J_k u_k^T = B,   t in {0, 1}^m,        B = -A / c + sum_i beta_i v_i u_i^T

where beta_i is 0 for a unit that looks the same way as its key, -1 for one that looks the other way, and takes off the
linear part of a unit that counts for nothing.

Units merge only where they are equal up to the rounding of float64. Units that rounding of the stored weights may have
told apart are counted by `doubtful`; they never merge, and are only a reason not to say `impossible`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.absorption._problem import EPS, Problem

KEY_TOLERANCE = 16 * EPS
CHUNK_ENTRIES = 2**22  # entries of rows that are compared in full at a time
COORDINATES = 64  # in which rows are compared first
CHUNK_ROWS = 1024  # rows that are compared with those next to them at a time


@dataclass(frozen=True, eq=False)
class Keys:
    """The active keys of a problem: `joint` (o, m), `rows` (m, d), and the (o, d) `goal` B."""

    joint: Tensor
    rows: Tensor
    goal: Tensor
    first: Tensor  # (m,) the unit that stands for each key
    member: Tensor  # (h,) the key of each unit, -1 where it counts for nothing
    sizes: Tensor  # (m,) how many units a key has
    ratio: Tensor  # (h,) r_i of each unit
    spares: int  # width of the replacement less m

    @property
    def count(self) -> int:
        return len(self.first)

    def without(self, split: tuple[int, ...]) -> Tensor:
        """(m,) which keys are left where these are taken out."""
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
        slopes = torch.where(side > 0, 1.0, problem.odd - 1)  # ReLU: 1 and 0; LeakyReLU: 1 and c - 1
        linear = torch.where(side != 0, slopes.to(linear), linear)
    ratio = lengths if phi.homogeneous else torch.ones_like(lengths)
    units = torch.arange(h, device=up.device)
    lead = _leads(problem, ~idle)
    if not bool(idle.any()) and torch.equal(lead, units):  # every unit counts and stands alone
        return separate_keys(problem)
    member = torch.full_like(lead, -1)
    member[~idle] = torch.unique(lead[~idle], return_inverse=True)[1]
    count = int(member.max()) + 1
    active = member >= 0
    joint = down.new_zeros(len(down), count)
    joint.index_add_(1, member[active], (down * ratio)[:, active])
    bulk = down.new_zeros(count).index_add_(0, member[active], (problem.raw_down_norms * ratio)[active])
    rounding = 16 * EPS * max(4, len(down) if problem.block.norms else 1)  # a quotient rounds as well
    alive = joint.norm(dim=0) > rounding * bulk
    # The last entry serves the units of no key, which have -1.
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
    # A unit alone keeps its column to the bit.
    joint = torch.where(sizes == 1, down[:, first], joint / ratio[first])
    return Keys(joint, rows[first], goal, first, member, sizes, ratio, problem.width - count)


def separate_keys(problem: Problem) -> Keys:
    """Every unit by itself, equal or not: two mirrored ones may both stay as they are, which one key cannot say."""
    h, goal = len(problem.up), -problem.target / problem.odd
    units = torch.arange(h, device=problem.up.device)
    ratio = problem.row_norms if problem.block.phi.homogeneous else torch.ones_like(problem.row_norms)
    return Keys(problem.down, problem.rows, goal, units, units, torch.ones_like(units), ratio, problem.width - h)


def count_uncertain(problem: Problem, keys: Keys) -> int:
    """How many more units than `keys` has may be spare, as far as rounding of the stored weights can tell."""
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
    """(h,) for every unit the first wanted one with the same key: itself, or one that stands for itself.

    Everything stays on the device of the weights, in a number of steps that does not grow with the units.
    """
    units = torch.arange(len(problem.up), device=problem.up.device)
    lead = units.clone()
    for left, right in _pairs(problem, wanted, KEY_TOLERANCE, lambda a, b: lead[b] > a):
        lead.scatter_reduce_(0, right, left, "amin")
    return torch.where(lead[lead] == lead, lead, units)


def _apart(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    """How far two rows are from being equal up to sign (and for ReLU up to a factor), and their biases likewise.

    Rows are compared relative to their lengths, and biases to their own sizes: a hinge that is close to the origin
    against inputs of size 1 is not close to it against smaller ones.
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
    """Pairs of wanted rows, the lower index first, that are equal within the tolerance; only those that still matter
    once the ones before them are dealt with."""
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
    """Pairs of wanted rows that may be equal up to sign and `tolerance` once normed; none that are is left out.

    Neither the distance along one direction nor that in a few coordinates is more than the whole distance: rows are
    sorted by the first, and those next to one another compared by the second.
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
