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

from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.absorption._reduce import EPS, Problem

STRICT = 16 * EPS


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


def canonical(problem: Problem, loose: bool = False, other: Keys | None = None) -> Keys:
    """Groups the units. `loose` also merges what rounding of the stored weights could have told apart.

    Where that comes to the same groups as `other`, it is `other` that comes back.
    """
    up, bias, down = problem.up, problem.bias, problem.down
    tolerance = 32 * problem.block.roundoff if loose else STRICT
    if problem.block.norms:  # quotients round as well
        tolerance = max(tolerance, 16 * max(problem.block.inputs, problem.block.outputs) * EPS)
    h = len(up)
    lengths, columns = up.norm(dim=1), down.norm(dim=0)
    idle = (lengths == 0) | (columns == 0)
    linear = torch.full((h,), problem.odd / 2, dtype=torch.float64, device=up.device)
    if loose:
        idle |= columns * lengths <= problem.tolerance / (abs(problem.odd) * h)
    if problem.radius is not None and problem.bounded:
        # Its kink misses the ball, so it is affine there. (On a ball this is for piecewise linear words only.)
        reach = problem.radius * lengths
        idle |= bias.abs() >= reach * (1 - (1e-6 if loose else -1e-12))
        slopes = torch.where(bias > 0, 1.0, problem.odd - 1)  # ReLU: 1 and 0; LeakyReLU: 1 and c - 1
        linear = torch.where(bias.abs() >= reach, slopes.to(linear), linear)
    member, sign, ratio = _group(up, bias, ~idle, tolerance, problem.spread, problem.block.phi.homogeneous)
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
    up: Tensor, bias: Tensor, wanted: Tensor, tolerance: float, spread: Tensor, homogeneous: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """For every wanted row its group, its sign against the group's first row, and its length (1 if not homogeneous)."""
    h = len(up)
    lengths = torch.hypot(up.norm(dim=1), bias).clamp(min=torch.finfo(torch.float64).tiny)

    def unit(i: int) -> Tensor:
        return torch.cat([up[i], bias[i : i + 1]]) / lengths[i]

    parent: dict[int, int] = {}
    widest = float(spread[wanted].max()) if bool(wanted.any()) else 1.0
    for a, b in _close(up, bias, lengths, wanted, 2 * tolerance * widest):
        one, two = unit(a), unit(b)
        if not homogeneous:
            long = max(float(lengths[a]), float(lengths[b]))
            one, two = one * (float(lengths[a]) / long), two * (float(lengths[b]) / long)
        apart = min(float((one - two).norm()), float((one + two).norm()))
        if apart <= tolerance * max(float(spread[a]), float(spread[b])):
            _join(parent, a, b)
    member = torch.full((h,), -1, dtype=torch.long, device=up.device)
    index = torch.nonzero(wanted).flatten()
    member[index] = torch.arange(len(index), device=up.device)
    sign = torch.ones(h, dtype=torch.float64, device=up.device)
    for i in list(parent):
        root = _root(parent, i)
        member[i] = member[root]
        sign[i] = 1.0 if float(unit(i) @ unit(root)) >= 0 else -1.0
    _, dense = torch.unique(member[index], return_inverse=True)
    member[index] = dense
    return member, sign, lengths if homogeneous else torch.ones_like(lengths)


def _close(up: Tensor, bias: Tensor, lengths: Tensor, wanted: Tensor, tolerance: float) -> list[tuple[int, int]]:
    """Pairs of wanted rows that may be equal up to sign and `tolerance` once normed; none that are is left out."""
    index = torch.nonzero(wanted).flatten()
    count, n = len(index), up.shape[1] + 1
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(n, generator=generator, dtype=torch.float64).to(up.device)
    probe /= probe.norm()
    seen = ((up @ probe[:-1] + bias * probe[-1]) / lengths).abs()[index]
    values, order = seen.sort()
    last = torch.searchsorted(values, values + tolerance + 8 * n * EPS, right=True)
    spans = last - torch.arange(count, device=up.device) - 1
    if int(spans.sum()) <= 64 * count:
        places = index[order]
        return [
            (int(places[i]), int(places[j]))
            for i in torch.nonzero(spans).flatten().tolist()
            for j in range(i + 1, int(last[i]))
        ]
    # A wide tolerance: distances in a few coordinates are never more than the whole distance.
    some = torch.randperm(n - 1, generator=generator)[:512].to(up.device)
    few = (torch.cat([up[:, some], bias[:, None]], 1) / lengths[:, None])[index].float()
    square = few.square().sum(1)
    pairs = []
    for start in range(0, count, 2048):
        part = few[start : start + 2048]
        apart = square[start : start + 2048, None] + square[None, :] - 2 * (part @ few.mT).abs()
        left, right = torch.nonzero(apart <= (tolerance + 1e-5) ** 2 + 1e-6, as_tuple=True)
        left = left + start
        keep = left < right
        pairs += list(zip(index[left[keep]].tolist(), index[right[keep]].tolist(), strict=True))
    return pairs


def _root(parent: dict[int, int], index: int) -> int:
    while parent.get(index, index) != index:
        index = parent[index]
    return index


def _join(parent: dict[int, int], a: int, b: int) -> None:
    parent.setdefault(a, a)
    parent.setdefault(b, b)
    one, two = sorted((_root(parent, a), _root(parent, b)))
    parent[two] = one
