"""The canonical form: which units really count.

Up to affine functions a block of class O is  sum_k J_k e(u_k.x + b_k)  over distinct keys: +-(u, b), or for ReLU and
LeakyReLU the hyperplane u.x + b = 0. Units of one key merge (J_k is their sum), a key whose J_k is zero counts for
nothing, and neither does a unit with u = 0. What is left over is spare: a spare unit of the replacement can be used for
something else. With u_i = s_i r_i u_k, a replacement of m units, one on each key, needs

    sum_k t_k J_k u_k^T = B,   t in {0, 1}^m,        B = -A / c + sum_i beta_i v_i u_i^T

where beta_i is 0 for a unit that looks the same way as its key, -1 for one that looks the other way, and takes off the
linear part of a unit that counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.absorption._reduce import EPS, Problem

STRICT = 16 * EPS
PROBES = 4  # random directions in which rows have to agree before they are compared in full
AT_ONCE = 2**22  # entries of rows that are compared in full at a time


@dataclass(frozen=True, eq=False)
class Keys:
    """The active keys of a problem: `joint` (o, m), `rows` (m, n), and the (o, n) `goal` B."""

    joint: Tensor
    rows: Tensor
    goal: Tensor
    first: Tensor  # (m,) the unit that stands for each key
    member: Tensor  # (h,) the key of each unit, -1 where it counts for nothing
    sizes: Tensor  # (m,) how many units a key has
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


def canonical(problem: Problem, loose: bool = False, other: Keys | None = None) -> Keys:
    """Groups the units. `loose` also merges what rounding of the stored weights could have told apart.

    Where that comes to the same groups as `other`, it is `other` that comes back.
    """
    up, bias, down = problem.up, problem.bias, problem.down
    tolerance = 32 * problem.block.roundoff if loose else STRICT
    if problem.block.norms:  # quotients round as well
        tolerance = max(tolerance, 16 * max(problem.block.inputs, problem.block.outputs) * EPS)
    h = len(up)
    lengths, columns = problem.lengths, problem.columns
    idle = (lengths == 0) | (columns == 0)
    linear = torch.full((h,), problem.odd / 2, dtype=torch.float64, device=up.device)
    if loose:
        idle |= columns * lengths <= problem.tolerance / (abs(problem.odd) * h)
    if problem.radius is not None and problem.bounded:
        # Its kinks miss the ball, so it is affine there.
        reach = problem.radius * lengths + problem.bend
        idle |= bias.abs() >= reach * (1 - (1e-6 if loose else -1e-12))
        slopes = torch.where(bias > 0, 1.0, problem.odd - 1)  # ReLU, HardSwish: 1 and 0; LeakyReLU: 1 and c - 1
        linear = torch.where(bias.abs() >= reach, slopes.to(linear), linear)
    whole = torch.hypot(lengths, bias).clamp(min=torch.finfo(torch.float64).tiny)
    label, sign = _group(up, bias, whole, ~idle, tolerance, problem.spread, problem.block.phi.homogeneous)
    ratio = whole if problem.block.phi.homogeneous else torch.ones_like(whole)
    member = torch.full_like(label, -1)
    member[~idle] = torch.unique(label[~idle], return_inverse=True)[1]
    if int(member.min()) >= 0 and int(member.max()) + 1 == h:  # every unit counts and stands alone
        if other is not None and other.count == h:
            return other
        units = torch.arange(h, device=up.device)
        ones = torch.ones_like(units)
        return Keys(down, problem.rows, -problem.target / problem.odd, units, units, ones, problem.width - h)
    count = int(member.max()) + 1
    active = member >= 0
    joint = down.new_zeros(len(down), count)
    joint.index_add_(1, member[active], (down * ratio)[:, active])
    bulk = down.new_zeros(count).index_add_(0, member[active], (problem.long_down * ratio)[active])
    small = max(tolerance, 64 * EPS) if loose or problem.block.norms else 64 * EPS
    alive = joint.norm(dim=0) > small * bulk
    # The last entry serves the units of no key, which have -1.
    renumber = torch.where(alive, torch.cumsum(alive.long(), 0) - 1, -1)
    member = torch.cat([renumber, renumber.new_full((1,), -1)])[member]
    if other is not None and torch.equal(member, other.member):
        return other
    active = member >= 0
    joint, count = joint[:, alive], int(alive.sum())
    units = torch.arange(h, device=up.device)
    first = torch.full((count,), h, device=up.device).scatter_reduce_(0, member[active], units[active], "amin")
    sizes = torch.bincount(member[active], minlength=count)
    beta = torch.where(active, (sign - 1) / 2, -linear / problem.odd)
    beta = torch.where(lengths == 0, torch.zeros_like(beta), beta)
    target, rows = problem.target, problem.rows
    const = _constants(problem, lengths == 0)
    if not problem.output_bias and const is not None:
        target = target.clone()
        target[:, -1] += const
    moved = beta != 0
    goal = -target / problem.odd
    if bool(moved.any()):
        goal = goal + (down[:, moved] * beta[moved]) @ rows[moved]
    # A unit alone keeps its column to the bit.
    joint = torch.where(sizes == 1, down[:, first], joint / ratio[first])
    return Keys(joint, rows[first], goal, first, member, sizes, problem.width - count)


def _constants(problem: Problem, zero: Tensor) -> Tensor | None:
    if not bool(zero.any()):
        return None
    return problem.down[:, zero] @ problem.block.phi.function(problem.bias[zero])


def _group(
    up: Tensor, bias: Tensor, lengths: Tensor, wanted: Tensor, tolerance: float, spread: Tensor, homogeneous: bool
) -> tuple[Tensor, Tensor]:
    """For every row the first wanted one that shares its key, and its sign against that one.

    Everything stays on the device of the weights, in a number of steps that does not grow with the units.
    """
    label = torch.arange(len(up), device=up.device)
    sign = torch.ones_like(lengths)
    some = min(max(64, AT_ONCE // up.shape[1]), 2**15)  # pairs whose rows are held at a time

    def unit(at: Tensor) -> Tensor:
        return torch.cat([up[at], bias[at, None]], 1) / lengths[at, None]

    widest = float(spread[wanted].max()) if bool(wanted.any()) else 1.0
    for left, right in _close(up, bias, lengths, wanted, 2 * tolerance * widest):
        while len(left):
            a, b = left[:some], right[:some]
            one, two = unit(a), unit(b)
            if not homogeneous:
                long = torch.maximum(lengths[a], lengths[b])
                one, two = one * (lengths[a] / long)[:, None], two * (lengths[b] / long)[:, None]
            apart = torch.minimum((one - two).norm(dim=1), (one + two).norm(dim=1))
            same = apart <= tolerance * torch.maximum(spread[a], spread[b])
            label = _join(label, a[same], b[same])
            left, right = left[some:], right[some:]
            open_yet = label[left] != label[right]
            left, right = left[open_yet], right[open_yet]
    followers = torch.nonzero(label != torch.arange(len(up), device=up.device)).flatten()
    for at in followers.split(some):
        sign[at] = torch.where((unit(at) * unit(label[at])).sum(1) >= 0, 1.0, -1.0).to(sign)
    return label, sign


def _close(
    up: Tensor, bias: Tensor, lengths: Tensor, wanted: Tensor, tolerance: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of wanted rows that may be equal up to sign and `tolerance` once normed; none that are is left out."""
    index = torch.nonzero(wanted).flatten()
    count, n = len(index), up.shape[1] + 1
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
    some = torch.randperm(n - 1, generator=generator)[:256].to(up.device)
    few = torch.cat([up[:, some], bias[:, None]], 1)[index] / lengths[index, None]
    square = few.square().sum(1)
    for start in range(0, count, 2048):
        part = few[start : start + 2048]
        apart = square[start : start + 2048, None] + square[None, start:] - 2 * (part @ few[start:].mT).abs()
        left, right = torch.nonzero(apart <= reach**2 + 1e-12, as_tuple=True)
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
