"""Groups the units that share a key for the check of a certificate, independently of the search.

Units are separated by the products of their rows with random vectors: rows that are equal up to sign have products that
are equal up to sign, and other rows almost never do. Each unit of a group is then compared in full with its first one.
If some units remain uncertain, no groups are returned and the certificate fails.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.absorption._problem import EPS, Problem

ROUNDS = 3  # random vectors to separate units with
ROUNDING = 64 * EPS


@dataclass(frozen=True, eq=False)
class Groups:
    """Units that share a key."""

    first: Tensor  # (m,) the first unit of every active group
    group: Tensor  # (h,) the group of every unit, -1 if it is inactive
    sign: Tensor  # (h,) 1 if its row has the same sign as that of the first unit, else -1
    ratio: Tensor  # (h,) the norm of its row relative to that of the first unit
    side: Tensor  # (h,) the sign of a unit that is affine on the domain, else 0


def group_units(problem: Problem) -> Groups | None:
    """Returns the groups, or None if rounding leaves it uncertain which units are equal, affine or zero."""
    up, bias, phi = problem.up, problem.bias, problem.block.phi
    lengths = problem.row_norms
    idle = (lengths == 0) | (problem.column_norms == 0)
    side = torch.zeros_like(bias)
    if problem.affine_possible and problem.domain is not None:
        side = problem.domain.side(up, bias)
        if bool((~idle & (side == 0) & ~problem.domain.cuts(up, bias)).any()):
            return None
        idle = idle | (side != 0)
    size = lengths.clamp(min=1e-300) if phi.homogeneous else torch.ones_like(lengths)
    units = torch.nonzero(~idle).flatten()
    label = torch.zeros_like(units)
    generator = torch.Generator().manual_seed(977)
    for _ in range(ROUNDS if len(units) else 0):
        probe = torch.rand(up.shape[1] + 1, generator=generator, dtype=torch.float64).to(up.device) - 0.5
        value = ((up @ probe[:-1] + bias * probe[-1]) / size)[units].abs()
        scale = (torch.hypot(lengths, bias) / size)[units] * ROUNDING * 4 * up.shape[1] ** 0.5
        label = _refine(label, value, scale)
    if len(units):  # a small bias is lost next to a long row, so it is compared alone, with the signs aligned
        value = (bias * (up @ probe[:-1]).sign() / size)[units]
        label = _refine(label, value, value.abs() * ROUNDING * 4 * up.shape[1] ** 0.5)
    of = torch.full_like(idle, -1, dtype=torch.long)
    of[units] = label
    count = int(label.max()) + 1 if len(units) else 0
    head = torch.full((count,), len(up), device=up.device).scatter_reduce_(0, label, units, "amin")
    head, order = head.sort()
    label = of[units] = order.argsort()[label]
    lead = torch.where(of >= 0, head[of.clamp(min=0)] if count else of, torch.arange(len(up), device=up.device))
    follow = torch.nonzero((of >= 0) & (lead != torch.arange(len(up), device=up.device))).flatten()
    turn, ratio = torch.ones_like(bias), torch.ones_like(bias)
    for at_once in follow.split(max(64, 2**22 // up.shape[1])):
        other = lead[at_once]
        stretch = (size[at_once] / size[other])[:, None]
        turn[at_once] = torch.where((up[at_once] * up[other]).sum(1) >= 0, 1.0, -1.0).to(turn)
        for part in (up, bias[:, None]):
            gap = (part[at_once] - turn[at_once, None] * stretch * part[other]).norm(dim=1)
            if bool((gap > 1e3 * ROUNDING * part[at_once].norm(dim=1)).any()):
                return None
        ratio[at_once] = stretch.flatten()
    if len(follow):  # groups whose columns cancel are inactive too
        joint = _joint(problem, of, ratio, count)
        bulk = problem.raw_down_norms.new_zeros(count).index_add_(0, label, (problem.raw_down_norms * ratio)[units])
        gone = joint.norm(dim=0) <= ROUNDING * (len(problem.down) if problem.block.norms else 1) * bulk
        keep = torch.where(gone, -1, torch.cumsum((~gone).long(), 0) - 1)
        of = torch.where(of >= 0, keep[of.clamp(min=0)], of)
        head = head[~gone]
    return Groups(head, of, turn, ratio, side)


def _refine(label: Tensor, value: Tensor, scale: Tensor) -> Tensor:
    """Splits every group at the gaps between its sorted values."""
    order = value.argsort(stable=True)
    order = order[label[order].argsort(stable=True)]  # by group, then by value
    near = value[order].diff() <= torch.maximum(scale[order][1:], scale[order][:-1])
    new = torch.ones_like(order, dtype=torch.bool)
    new[1:] = ~near | (label[order].diff() != 0)
    out = torch.empty_like(label)
    out[order] = torch.cumsum(new.long(), 0) - 1
    return out


def _joint(problem: Problem, of: Tensor, ratio: Tensor, count: int) -> Tensor:
    active = of >= 0
    joint = problem.down.new_zeros(len(problem.down), count)
    return joint.index_add_(1, of[active], (problem.down * ratio)[:, active])


def flip_equation(problem: Problem, found: Groups, line: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns J, U and B of  sum_k t_k J_k u_k^T = B,  restricted to some of its rows and columns."""
    rows, goal = problem.rows, problem.target
    joint = (
        problem.down if len(found.first) == len(rows) else _joint(problem, found.group, found.ratio, len(found.first))
    )
    if len(line) < len(goal) or len(column) < rows.shape[1]:
        joint, rows, goal = joint[line], rows[:, column], goal[line][:, column]
        down = problem.down[line]
    else:
        down = problem.down
    goal = -goal / problem.odd
    against = torch.nonzero((found.group >= 0) & (found.sign < 0)).flatten()
    goal = goal - down[:, against] @ rows[against]
    spare = torch.nonzero(found.group < 0).flatten()
    if len(spare):
        # An inactive unit still has a linear part, and a unit with a zero row is a constant.
        slope = 0.5 + found.side[spare] * (1 / problem.odd - 0.5)  # in units of c; an affine unit has 1 or c - 1
        seen = slope[:, None] * rows[spare]
        blind = problem.row_norms[spare] == 0
        seen[blind] = 0
        if not problem.output_bias:
            constant = column == problem.up.shape[1]
            value = problem.constant_scale * problem.block.phi.function(problem.bias[spare]) / problem.odd
            seen[:, constant] = torch.where(blind[:, None], value[:, None], seen[:, constant])
        goal = goal - down[:, spare] @ seen
    return joint, rows[found.first] if len(found.first) < len(rows) else rows, goal
