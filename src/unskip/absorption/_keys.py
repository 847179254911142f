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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._problem import EPS, Problem

STRICT = 16 * EPS
PROBES = 4  # random directions in which rows have to agree before they are compared in full
AT_ONCE = 2**22  # entries of rows that are compared in full at a time
COORDINATES = 64  # in which rows are compared first where the probes tell too few apart


@dataclass(frozen=True, eq=False)
class Keys:
    """The active keys of a problem: `joint` (o, m), `rows` (m, n), and the (o, n) `goal` B."""

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


def canonical(problem: Problem) -> Keys:
    """Groups the units that are equal up to the rounding of float64."""
    up, bias, down, phi = problem.up, problem.bias, problem.down, problem.block.phi
    h = len(up)
    lengths, columns = problem.lengths, problem.columns
    idle = (lengths == 0) | (columns == 0)
    linear = torch.full((h,), problem.odd / 2, dtype=torch.float64, device=up.device)
    if problem.bounded and problem.domain is not None:
        side = problem.domain.side(up, bias, problem.bend)
        idle |= side != 0
        slopes = torch.where(side > 0, 1.0, problem.odd - 1)  # ReLU, HardSwish: 1 and 0; LeakyReLU: 1 and c - 1
        linear = torch.where(side != 0, slopes.to(linear), linear)
    label, sign = _group(problem, ~idle)
    ratio = lengths if phi.homogeneous else torch.ones_like(lengths)
    units = torch.arange(h, device=up.device)
    if not bool(idle.any()) and torch.equal(label, units):  # every unit counts and stands alone
        ones = torch.ones_like(units)
        goal = -problem.target / problem.odd
        return Keys(down, problem.rows, goal, units, units, ones, ratio, problem.width - h)
    member = torch.full_like(label, -1)
    member[~idle] = torch.unique(label[~idle], return_inverse=True)[1]
    count = int(member.max()) + 1
    active = member >= 0
    joint = down.new_zeros(len(down), count)
    joint.index_add_(1, member[active], (down * ratio)[:, active])
    bulk = down.new_zeros(count).index_add_(0, member[active], (problem.long_down * ratio)[active])
    alive = joint.norm(dim=0) > max(strict(problem), 64 * EPS) * bulk
    # The last entry serves the units of no key, which have -1.
    renumber = torch.where(alive, torch.cumsum(alive.long(), 0) - 1, -1)
    member = torch.cat([renumber, renumber.new_full((1,), -1)])[member]
    active = member >= 0
    joint, count = joint[:, alive], int(alive.sum())
    first = torch.full((count,), h, device=up.device).scatter_reduce_(0, member[active], units[active], "amin")
    sizes = torch.bincount(member[active], minlength=count)
    beta = torch.where(active, (sign - 1) / 2, -linear / problem.odd)
    beta = torch.where(lengths == 0, torch.zeros_like(beta), beta)
    target, rows = problem.target, problem.rows
    zero = lengths == 0
    if not problem.output_bias and bool(zero.any()):
        target = target.clone()
        target[:, -1] += down[:, zero] @ phi.function(bias[zero])
    moved = beta != 0
    goal = -target / problem.odd
    if bool(moved.any()):
        goal = goal + (down[:, moved] * beta[moved]) @ rows[moved]
    # A unit alone keeps its column to the bit.
    joint = torch.where(sizes == 1, down[:, first], joint / ratio[first])
    return Keys(joint, rows[first], goal, first, member, sizes, ratio, problem.width - count)


def strict(problem: Problem) -> float:
    """The relative difference that is rounding of float64; quotients round as well."""
    norms = problem.block.norms
    return max(STRICT, 16 * max(problem.block.inputs, problem.block.outputs) * EPS) if norms else STRICT


def doubtful(problem: Problem, keys: Keys) -> int:
    """How many more units than `keys` has may be spare, as far as rounding of the stored weights can tell."""
    roundoff = problem.block.roundoff
    member, lengths = keys.member, problem.lengths
    active = member >= 0
    weak = active & (problem.columns * lengths <= 2 * roundoff * problem.bulk / (abs(problem.odd) * len(member)))
    if problem.bounded and problem.domain is not None:
        weak |= active & ~problem.domain.cuts(problem.up, problem.bias)
    heads = torch.zeros_like(active)
    heads[keys.first] = True
    within = max(4 * roundoff, 4 * strict(problem))
    for left, right in _pairs(problem, heads, within, lambda a, b: ~(weak[a] & weak[b])):
        weak[left] = weak[right] = True  # one of the two may be enough, and both may cancel
    big = keys.sizes > 1
    if bool(big.any()):  # columns of one key that almost cancel
        bulk = problem.long_down.new_zeros(keys.count)
        bulk.index_add_(0, member[active], (problem.long_down * keys.ratio)[active])
        small = keys.joint.norm(dim=0) * keys.ratio[keys.first] <= 8 * roundoff * bulk
        weak[keys.first[big & small]] = True
    return int((weak & heads).sum())


def snapped(problem: Problem, tolerance: float) -> Block | None:
    """The block with units that share a key within the tolerance moved onto it, and units that add next to nothing
    taken out; None where nothing moves."""
    block, up, bias = problem.block, problem.up, problem.bias
    if problem.basis is not None:
        return None
    h = len(up)
    sizes = problem.columns * problem.lengths
    dead = (sizes > 0) & (sizes <= tolerance * problem.bulk / (abs(problem.odd) * h))
    units = torch.arange(h, device=up.device)
    lead = units.clone()
    for left, right in _pairs(problem, (sizes > 0) & ~dead, tolerance, lambda a, b: lead[b] > a):
        lead.scatter_reduce_(0, right, left, "amin")
    onto = torch.where(lead[lead] == lead, lead, units)  # a unit that stays where it is
    if not bool(dead.any()) and torch.equal(onto, units):
        return None
    turn = torch.where((up * up[onto]).sum(1) + bias * bias[onto] >= 0, 1.0, -1.0).to(bias)
    stretch = (
        problem.lengths / problem.lengths[onto].clamp(min=1e-300) if block.phi.homogeneous else torch.ones_like(bias)
    )
    factor = torch.where(onto == units, torch.ones_like(bias), turn * stretch)
    down = block.down.detach().clone()
    down[:, dead] = 0
    new_bias = None if block.up_bias is None else (factor * bias[onto]).to(block.up_bias.dtype)
    return replace(block, up=(factor[:, None] * up[onto]).to(block.up.dtype), up_bias=new_bias, down=down)


def _group(problem: Problem, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """For every row the first wanted one that shares its key, and its sign against that one.

    Everything stays on the device of the weights, in a number of steps that does not grow with the units.
    """
    up, bias, tolerance = problem.up, problem.bias, strict(problem)
    units = torch.arange(len(up), device=up.device)
    label, sign = units.clone(), torch.ones_like(bias)
    for left, right in _pairs(problem, wanted, tolerance, lambda a, b: label[a] != label[b]):
        label.copy_(_join(label, left, right))
    followers = torch.nonzero(label != units).flatten()
    for at in followers.split(_some(up)):
        same = _apart(problem, at, label[at]) <= tolerance
        label[at[~same]] = at[~same]  # joined by a chain of others only
        lead = label[at]
        sign[at] = torch.where((up[at] * up[lead]).sum(1) + bias[at] * bias[lead] >= 0, 1.0, -1.0).to(sign)
    return label, sign


def _some(up: Tensor) -> int:
    return min(max(64, AT_ONCE // up.shape[1]), 2**15)


def _apart(problem: Problem, a: Tensor, b: Tensor) -> Tensor:
    """How far two rows are from being equal up to sign (and for ReLU up to a factor), and their biases likewise.

    The rows are compared relative to their own lengths, whatever their biases are.
    """
    up, bias, lengths = problem.up, problem.bias, problem.lengths
    one, two = lengths[a], lengths[b]
    if not problem.block.phi.homogeneous:
        one = two = torch.maximum(one, two)
    left, right = up[a] / one[:, None], up[b] / two[:, None]
    shift, other = bias[a] / one, bias[b] / two
    scale = torch.maximum(shift.abs(), other.abs()).clamp(min=1.0)
    found = [
        torch.maximum((left - turn * right).norm(dim=1), (shift - turn * other).abs() / scale) for turn in (1.0, -1.0)
    ]
    return torch.minimum(*found) / torch.maximum(problem.spread[a], problem.spread[b])


def _pairs(
    problem: Problem, wanted: Tensor, tolerance: float, matters: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of wanted rows, the lower index first, that are equal within the tolerance; only those that still matter
    once the ones before them are dealt with."""
    some = _some(problem.up)
    widest = float(problem.spread[wanted].max()) if bool(wanted.any()) else 1.0
    for left, right in _close(problem, wanted, 4 * tolerance * widest):
        while len(left):
            a, b = left[:some], right[:some]
            same = _apart(problem, a, b) <= tolerance
            yield a[same], b[same]
            left, right = left[some:], right[some:]
            left_open = matters(left, right)
            left, right = left[left_open], right[left_open]


def _close(problem: Problem, wanted: Tensor, tolerance: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of wanted rows that may be equal up to sign and `tolerance` once normed; none that are is left out."""
    up, bias = problem.up, problem.bias
    index = torch.nonzero(wanted).flatten()
    count, n = len(index), up.shape[1] + 1
    if not count:
        return
    lengths = torch.hypot(problem.lengths, bias).clamp(min=torch.finfo(torch.float64).tiny)
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(PROBES, n, generator=generator, dtype=torch.float64).to(up.device)
    probes /= probes.norm(dim=1, keepdim=True)
    seen = torch.stack([up @ probe[:-1] + bias * probe[-1] for probe in probes], 1)[index] / lengths[index, None]
    values, order = seen[:, 0].abs().sort()
    reach = tolerance + 8 * n * EPS
    last = torch.searchsorted(values, values + reach, right=True)
    spans = last - torch.arange(count, device=up.device) - 1
    if int(spans.sum()) <= 64 * count:
        first = torch.repeat_interleave(torch.arange(count, device=up.device), spans)
        second = first + 1 + torch.arange(len(first), device=up.device) - (spans.cumsum(0) - spans)[first]
        a, b = order[first], order[second]
        near = torch.minimum((seen[a] - seen[b]).abs().amax(1), (seen[a] + seen[b]).abs().amax(1)) <= reach
        a, b = index[a[near]], index[b[near]]
        yield torch.minimum(a, b), torch.maximum(a, b)
        return
    # A wide tolerance: distances in a few coordinates are never more than the whole distance.
    some = torch.randperm(n - 1, generator=generator)[:COORDINATES].to(up.device)
    few = (torch.cat([up[:, some], bias[:, None]], 1)[index] / lengths[index, None]).float()
    square = few.square().sum(1)
    for start in range(0, count, 2048):
        part = few[start : start + 2048]
        apart = square[start : start + 2048, None] + square[None, start:] - 2 * (part @ few[start:].mT).abs()
        left, right = torch.nonzero(apart <= reach**2 + 1e-6, as_tuple=True)
        keep = left < right
        yield index[left[keep] + start], index[right[keep] + start]


def _join(label: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The labels once each of these pairs shares one: the least that it is joined to."""
    while True:
        low, high = torch.minimum(label[left], label[right]), torch.maximum(label[left], label[right])
        if not bool((low < high).any()):
            return label
        link = torch.arange(len(label), device=label.device).scatter_reduce_(0, high, low, "amin")
        while not torch.equal(link, link[link]):
            link = link[link]
        label = link[label]
