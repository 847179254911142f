"""The flip equation: the bound that a matrix Y proves about it, and least squares in the box 0 <= t <= 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.absorption._problem import EPS

UNITS = 2048  # whose terms are held at a time
FREE = 1500  # unknowns inside the box that are still solved for


@dataclass(frozen=True, eq=False)
class Seen:
    """What a Y says of the equation: <Y, B>, g, |Y|_F and what rounding may have added to sums of them."""

    inner: float
    g: Tensor
    norm: float
    slack: float


def seen_by(joint: Tensor, rows: Tensor, goal: Tensor, matrix: Tensor) -> Seen:
    """What the matrix Y says of sum_k t_k J_k u_k^T = B."""
    parts, size, large = [], goal.new_zeros(()), matrix.abs()
    for start in range(0, len(rows), UNITS):  # in parts, to keep memory low
        part = slice(start, start + UNITS)
        parts.append((joint[:, part] * (matrix @ rows[part].mT)).sum(0))
        size = size + (joint[:, part].abs() * (large @ rows[part].abs().mT)).sum()
    g = torch.cat(parts) if parts else goal.new_zeros(0)
    terms = matrix * goal
    slack = (len(goal) + goal.shape[1] + len(rows) + 16) * 2 * EPS * float(size + terms.abs().sum())
    return Seen(float(terms.sum()), g, float(matrix.norm()), slack)


def lower_bound(joint: Tensor, rows: Tensor, goal: Tensor, matrix: Tensor) -> float:
    """LB(Y) less what rounding could have added to it."""
    seen = seen_by(joint, rows, goal, matrix)
    gap = max(seen.inner - float(seen.g.clamp(min=0).sum()), float(seen.g.clamp(max=0).sum()) - seen.inner)
    return (gap - seen.slack) / seen.norm if gap > 0 and seen.norm else -math.inf


@dataclass(frozen=True, eq=False)
class Dual:
    """A matrix Y on some rows and columns; a vector is its diagonal. With `index` it pins t_index, else bars all t."""

    matrix: Tensor
    rows: Tensor
    columns: Tensor
    bound: float
    index: int | None = None


@dataclass(frozen=True, eq=False)
class Equation:
    """sum_k t_k J_k u_k^T = B on some rows and columns of the whole one, and how near is near enough."""

    joint: Tensor  # (o, m)
    rows: Tensor  # (m, n)
    goal: Tensor  # (o, n)
    at: Tensor  # (o,) the rows of the whole
    by: Tensor  # (n,) and the columns
    tolerance: float

    def part(self, at: Tensor, by: Tensor) -> Equation:
        """Some rows and columns of the whole equation."""
        return Equation(self.joint[at], self.rows[:, by].contiguous(), self.goal[at][:, by], at, by, self.tolerance)

    def scale(self) -> Tensor:
        """(m,) the sizes of the rank-ones."""
        sizes: Tensor = self.joint.norm(dim=0) * self.rows.norm(dim=1)
        return sizes.clamp(min=1e-300)

    def dual(self, matrix: Tensor) -> Dual | None:
        """This Y, if it keeps every t away."""
        bound = lower_bound(self.joint, self.rows, self.goal, matrix)
        return Dual(matrix / float(matrix.norm()), self.at, self.by, bound) if bound > self.tolerance else None

    def pinned(self, matrix: Tensor, index: int) -> Dual | None:
        """This Y, if it pins t_index to what is neither 0 nor 1."""
        seen = seen_by(self.joint, self.rows, self.goal, matrix)
        own = float(seen.g[index])
        rest = float(seen.g.abs().sum()) - abs(own)
        away = min(abs(seen.inner), abs(seen.inner - own)) - rest - seen.slack
        if not (seen.norm and away > seen.norm * self.tolerance):
            return None
        return Dual(matrix / seen.norm, self.at, self.by, away / seen.norm, index)


def trace(whole: Equation) -> Dual | None:
    """The test with a diagonal Y = B, for A = I the trace: entry by entry, without a product of matrices."""
    joint, rows, diagonal = whole.joint, whole.rows, whole.goal.diagonal()
    parts, size = [], diagonal.new_zeros(())
    for start in range(0, len(rows), UNITS):  # in parts, to keep memory low
        part = slice(start, start + UNITS)
        terms = joint[:, part].mT * rows[part] * diagonal
        parts.append(terms.sum(1))
        size = size + terms.abs_().sum()
    g = torch.cat(parts) if parts else diagonal.new_zeros(0)
    inner = float(diagonal.square().sum())
    slack = (len(diagonal) + len(rows) + 16) * 2 * EPS * (float(size) + inner)
    gap = max(inner - float(g.clamp(min=0).sum()), float(g.clamp(max=0).sum()) - inner) - slack
    norm = float(diagonal.norm())
    return Dual(diagonal / norm, whole.at, whole.by, gap / norm) if gap > norm * whole.tolerance else None


def boxed(gram: Tensor, slope: Tensor, steps: int) -> Tensor:
    """The t in [0, 1]^m near the least of t^T G t / 2 - s^T t.

    Accelerated projected steps that start anew where the momentum points uphill (arXiv 1204.3982), then the entries
    inside the box are solved for with the others held at their ends.
    """
    size = gram.diagonal().clamp(min=0).sqrt()
    size = torch.where(size > 0, size, 1.0)
    gram, slope = gram / (size * size[:, None]), slope / size  # t times size is in [0, size]
    x = torch.ones_like(slope)
    for _ in range(12):  # the greatest eigenvalue, from below
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
    if 0 < count <= FREE:
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
