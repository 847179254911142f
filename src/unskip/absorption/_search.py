"""The flip equation, the lower bound that a matrix Y gives, and the search for a flip set or such a Y.

    sum_k t_k J_k u_k^T = B,   t in {0, 1}^m

For any matrix Y let g_k = J_k^T Y u_k. For all t in [0, 1]^m the distance of the left side from B is at least

    LB(Y) = max( <Y, B> - sum_k max(g_k, 0),  sum_k min(g_k, 0) - <Y, B> ) / |Y|_F

so one Y with LB(Y) > 0 rules out all flip sets. The residual of least squares over t is a natural Y, and with t in the
box 0 <= t <= 1 it is the best one. A Y on a few rows and columns is enough, so a smaller problem may be solved instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.absorption._problem import EPS

MAX_DENSE = 3_000_000  # the largest number of entries of the matrix of rank-one terms to write out
Accept = Callable[[Tensor], bool]  # whether flipping these keys is accurate enough
CHUNK_UNITS = 2048  # units whose terms are in memory at a time
MAX_FREE = 1500  # the largest number of unknowns inside the box to solve for


@dataclass(frozen=True, eq=False)
class Dual:
    """A matrix Y on some rows and columns that rules out all flip sets; a vector is a diagonal matrix."""

    matrix: Tensor
    rows: Tensor
    columns: Tensor
    bound: float


@dataclass(frozen=True, eq=False)
class Equation:
    """sum_k t_k J_k u_k^T = B on some rows and columns of the whole equation, and the tolerance of a solution."""

    joint: Tensor  # (o, m)
    rows: Tensor  # (m, n)
    goal: Tensor  # (o, n)
    row_index: Tensor  # (o,) its rows in the whole equation
    column_index: Tensor  # (n,) its columns in the whole equation
    tolerance: float

    def part(self, at: Tensor, by: Tensor) -> Equation:
        """Some rows and columns of the whole equation."""
        return Equation(self.joint[at], self.rows[:, by].contiguous(), self.goal[at][:, by], at, by, self.tolerance)

    @property
    def channel_norms(self) -> tuple[Tensor, Tensor]:
        """(o, 1) and (n,) the norms of the rows of J and of the columns of U; 1 where they are 0."""
        norms = self.joint.norm(dim=1, keepdim=True), self.rows.norm(dim=0)
        above, beside = (torch.where(norm > 0, norm, 1.0) for norm in norms)
        return above, beside

    def bound(self, matrix: Tensor) -> float:
        """LB(Y) minus a bound on its rounding. A vector Y is a diagonal matrix."""
        parts, size, large = [], self.goal.new_zeros(()), matrix.abs()
        for start in range(0, len(self.rows), CHUNK_UNITS):  # in parts, to keep memory low
            joint, rows = self.joint[:, start : start + CHUNK_UNITS], self.rows[start : start + CHUNK_UNITS]
            if matrix.ndim == 1:  # entry by entry, without a product of matrices
                terms = joint.mT * rows * matrix
                parts.append(terms.sum(1))
                size = size + terms.abs_().sum()
            else:
                parts.append((joint * (matrix @ rows.mT)).sum(0))
                size = size + (joint.abs() * (large @ rows.abs().mT)).sum()
        g = torch.cat(parts) if parts else self.goal.new_zeros(0)
        terms = matrix * (self.goal.diagonal() if matrix.ndim == 1 else self.goal)
        inner, norm = float(terms.sum()), float(matrix.norm())
        slack = (sum(self.goal.shape) + len(self.rows) + 16) * 2 * EPS * float(size + terms.abs().sum())
        gap = max(inner - float(g.clamp(min=0).sum()), float(g.clamp(max=0).sum()) - inner)
        return (gap - slack) / norm if gap > 0 and norm else -math.inf

    def dual(self, matrix: Tensor) -> Dual | None:
        """The dual with this Y, if LB(Y) exceeds the tolerance."""
        bound = self.bound(matrix)
        return (
            Dual(matrix / float(matrix.norm()), self.row_index, self.column_index, bound)
            if bound > self.tolerance
            else None
        )

    def box_least_squares(self, coarse: bool = False) -> Tensor:
        """(m,) a t in [0, 1]^m with almost the least distance; `coarse` takes fewer steps, in float32."""
        dtype = torch.float32 if coarse else torch.float64
        joint, rows, goal = (value.to(dtype) for value in (self.joint, self.rows, self.goal))
        gram = joint.mT @ joint
        for part, lines in zip(gram.split(CHUNK_UNITS), rows.split(CHUNK_UNITS), strict=True):
            part.mul_(lines @ rows.mT)
        return minimise_in_box(gram, ((joint.mT @ goal) * rows).sum(1), 30 if coarse else 800).double()


def minimise_in_box(gram: Tensor, slope: Tensor, steps: int) -> Tensor:
    """Approximately minimises t^T G t / 2 - s^T t over [0, 1]^m.

    Accelerated projected gradient steps, with a restart when the momentum points uphill (arXiv 1204.3982). Then the
    entries inside the box are solved for, with the others fixed at 0 or 1.
    """
    size = gram.diagonal().clamp(min=0).sqrt()
    size = torch.where(size > 0, size, 1.0)
    gram, slope = gram / (size * size[:, None]), slope / size  # t times size is in [0, size]
    x = torch.ones_like(slope)
    for _ in range(12):  # a lower estimate of the largest eigenvalue
        x = gram @ (x / x.norm().clamp(min=1e-300))
    rate = 1 / max(1.05 * float(x.norm()), 1e-300)
    t = ahead = size / 2
    momentum = slope.new_ones(())
    for step in range(1, steps + 1):
        downhill = slope - gram @ ahead
        before, t = t, torch.minimum((ahead + rate * downhill).clamp(min=0), size)
        uphill = downhill @ (t - before) < 0
        momentum = torch.where(uphill, 1.0, momentum)
        grown = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        ahead = torch.where(uphill, t, t + (momentum - 1) / grown * (t - before))
        momentum = grown
        if step % 50 == 0 and bool(((t - before).abs() <= 1e-13 * size).all()):
            break
    free = (t > 1e-6 * size) & (t < (1 - 1e-6) * size)
    count = int(free.sum())
    if 0 < count <= MAX_FREE:
        inner = gram[free][:, free].double()
        rest = (slope - gram @ torch.where(free, 0.0, t))[free].double()
        inner.diagonal().add_(1e-13 * inner.diagonal().mean())
        factor, trouble = torch.linalg.cholesky_ex(inner)
        if not int(trouble):
            solved = t.double()
            solved[free] = torch.cholesky_solve(rest[:, None], factor).flatten()
            if bool((solved >= 0).all()) and bool((solved <= size).all()):
                return solved / size
    return t / size


def full_equation(joint: Tensor, rows: Tensor, goal: Tensor, tolerance: float = 0.0) -> Equation:
    """The whole flip equation."""
    at, by = (torch.arange(size, device=goal.device) for size in goal.shape)
    return Equation(joint, rows, goal, at, by, tolerance)


def search(whole: Equation, accept: Accept) -> Dual | None:
    """Passes flip sets to `accept` until it accepts one. Otherwise returns a dual, if one is found."""
    goal, m = whole.goal, len(whole.rows)
    if accept(torch.zeros(m, dtype=torch.bool, device=goal.device)) or float(goal.norm()) == 0:
        return None
    large = goal.numel() * m > MAX_DENSE
    dual = None
    if not large:
        dual = whole.dual(goal)
    elif goal.shape[0] == goal.shape[1] and not bool((goal - torch.diag(goal.diagonal())).any()):
        dual = whole.dual(goal.diagonal())  # for A = I it compares traces
    if dual is not None or not m:
        return dual
    return (_sketched if large else _dense)(whole, accept)


def _dense(whole: Equation, accept: Accept) -> Dual | None:
    """Searches with all rank-one terms written out: least squares by SVD, then in the box 0 <= t <= 1."""
    goal = whole.goal
    matrix = (whole.joint.mT[:, :, None] * whole.rows[:, None, :]).flatten(1).mT  # (o n, m)
    scale = matrix.norm(dim=0)
    scale = torch.where(scale > 1e-14 * scale.max(), scale, 1.0)
    left, values, right = torch.linalg.svd(matrix / scale, full_matrices=False)
    keep = values > 1e-10 * values[0]
    left = left[:, keep]
    solution = (right[keep].mT / values[keep]) @ (left.mT @ goal.flatten()) / scale
    residual = goal.flatten() - matrix @ solution
    residual = residual - left @ (left.mT @ residual)  # twice, because a small residual is mostly rounding
    dual = whole.dual(residual.reshape(goal.shape))
    if dual is not None or accept(solution > 0.5):
        return dual
    inside = whole.box_least_squares()
    dual = whole.dual(goal - (matrix @ inside).reshape(goal.shape))
    if dual is None:
        accept(inside > 0.5)
    return dual


def _sketched(whole: Equation, accept: Accept) -> Dual | None:
    """Searches on random rows and columns first, then on all of them."""
    goal, m = whole.goal, len(whole.rows)
    generator = torch.Generator().manual_seed(0)
    for factor, steps in ((2, 60), (4, 200)):
        at, by = _corner(goal, math.ceil(math.sqrt(factor * m)) + 1, generator)
        if len(at) * len(by) >= goal.numel() / 2:
            break
        dual, taken = _conjugate(whole.part(at, by), accept, steps)
        if dual is not None or taken:
            return dual
    return _conjugate(whole, accept, steps=100)[0]


def _corner(goal: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random columns, and the rows in which the goal has the largest entries there: the same indices for A = I."""
    by = torch.randperm(goal.shape[1], generator=generator)[:size].sort().values.to(goal.device)
    heavy = goal[:, by].abs().amax(1)
    return heavy.argsort(descending=True, stable=True)[:size].sort().values, by


def _conjugate(equation: Equation, accept: Accept, steps: int) -> tuple[Dual | None, bool]:
    """Least squares by conjugate gradients. Returns a dual, if one is found, and whether a flip set was accepted.

    Every few steps the residual is tried as Y, and the rounded t as a flip set. Channels and units are scaled to equal
    norms, because outlier channels would need many more steps.
    """
    joint, rows, goal = equation.joint, equation.rows, equation.goal
    above, beside = equation.channel_norms
    columns, lines = joint / above, rows / beside
    scale = (columns.norm(dim=0) * lines.norm(dim=1)).clamp(min=1e-300)
    columns = columns / scale
    residual, t = goal / above / beside, goal.new_zeros(len(rows))
    direction, power = t, math.inf
    start, seen = float(residual.norm()), None
    for step in range(1, steps + 1):
        slope = torch.sum(torch.mm(columns.mT, residual) * lines, 1)
        before, power = power, float(slope.square().sum())
        direction = slope + (power / before) * direction
        moved = torch.mm(columns * direction, lines)
        length = float(moved.square().sum())
        if length == 0 or power == 0:
            break
        t = t + (power / length) * direction
        residual = residual - (power / length) * moved
        small = float(residual.norm()) <= 1e-9 * start
        if step % 5 and not small and step < steps:
            continue
        dual = equation.dual(residual / above / beside)
        if dual is not None:
            return dual, False
        flips = t / scale > 0.5
        near = max(4 * equation.tolerance, 1e-9 * float(goal.norm()))
        if float((goal - (joint * flips) @ rows).norm()) <= near and (seen is None or not torch.equal(seen, flips)):
            if accept(flips):
                return None, True
            seen = flips
        if small:
            break
    return None, False
