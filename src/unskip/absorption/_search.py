"""The search for a flip set, or for a proof that there is none.

    sum_k t_k J_k u_k^T = B,   t in {0, 1}^m

For any matrix Y let g_k = J_k^T Y u_k. Over all t in [0, 1]^m the left side stays at least

    LB(Y) = max( <Y, B> - sum_k max(g_k, 0),  sum_k min(g_k, 0) - <Y, B> ) / |Y|_F

away from B, so one Y with LB(Y) > 0 settles it. The residual of the least squares is the natural Y; a Y on few rows
and columns does as well, so the least squares need only be solved on a sketch. Where B lies in the span and the
rank-ones are independent, t is unique and is either binary or not: then Y with g = e_i pins t_i to a value that is
neither 0 nor 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 2.0**-53
DENSE = 3_000_000  # entries of the matrix of rank-ones that is still written out
GRAM = 8192  # units whose normal equations are still formed
UNITS = 2048  # whose terms are held at a time
STEPS = 800  # of projected gradients, at most


@dataclass(frozen=True, eq=False)
class Dual:
    """A matrix Y on some rows and columns; a vector is its diagonal. With `index` it pins t_index, else bars all t."""

    matrix: Tensor
    rows: Tensor
    columns: Tensor
    bound: float
    index: int | None = None


@dataclass(eq=False)
class Found:
    """What the search came to. No dual and no flips: nothing is known."""

    flips: Tensor | None = None  # (m,) bool
    dual: Dual | None = None
    independent: bool | None = None
    solution: Tensor | None = None  # the t of least squares


Accept = Callable[[Tensor], bool]  # whether flipping these keys is good enough


@dataclass(frozen=True, eq=False)
class _Equation:
    """sum_k t_k J_k u_k^T = B on some rows and columns of the whole one, and how near is near enough."""

    joint: Tensor  # (o, m)
    rows: Tensor  # (m, n)
    goal: Tensor  # (o, n)
    at: Tensor  # (o,) the rows of the whole
    by: Tensor  # (n,) and the columns
    tolerance: float

    def part(self, at: Tensor, by: Tensor) -> _Equation:
        """Some rows and columns of the whole equation."""
        return _Equation(self.joint[at], self.rows[:, by].contiguous(), self.goal[at][:, by], at, by, self.tolerance)

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
        seen = _seen(self.joint, self.rows, self.goal, matrix)
        own = float(seen.g[index])
        rest = float(seen.g.abs().sum()) - abs(own)
        away = min(abs(seen.inner), abs(seen.inner - own)) - rest - seen.slack
        if not (seen.norm and away > seen.norm * self.tolerance):
            return None
        return Dual(matrix / seen.norm, self.at, self.by, away / seen.norm, index)


def search(joint: Tensor, rows: Tensor, goal: Tensor, tolerance: float, accept: Accept) -> Found:
    """Looks for a flip set that `accept` takes, or a Y that keeps every t further than `tolerance` away."""
    found = Found()
    m = len(rows)
    if accept(torch.zeros(m, dtype=torch.bool, device=rows.device)):
        found.flips = torch.zeros(m, dtype=torch.bool, device=rows.device)
        return found
    if float(goal.norm()) == 0:
        return found
    at, by = (torch.arange(size, device=goal.device) for size in goal.shape)
    whole = _Equation(joint, rows, goal, at, by, tolerance)
    large = goal.numel() * m > DENSE
    if not large:
        found.dual = whole.dual(goal)
    elif goal.shape[0] == goal.shape[1] and not bool((goal - torch.diag(goal.diagonal())).any()):
        found.dual = _trace(whole)
    if found.dual is None and m:
        (_large if large else _dense)(whole, accept, found)
    return found


@dataclass(frozen=True, eq=False)
class Seen:
    """What a Y says of the equation: <Y, B>, g, |Y|_F and what rounding may have added to sums of them."""

    inner: float
    g: Tensor
    norm: float
    slack: float


def _seen(joint: Tensor, rows: Tensor, goal: Tensor, matrix: Tensor) -> Seen:
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
    seen = _seen(joint, rows, goal, matrix)
    gap = max(seen.inner - float(seen.g.clamp(min=0).sum()), float(seen.g.clamp(max=0).sum()) - seen.inner)
    return (gap - seen.slack) / seen.norm if gap > 0 and seen.norm else -math.inf


def _trace(whole: _Equation) -> Dual | None:
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


def _dense(whole: _Equation, accept: Accept, found: Found) -> None:
    """With all rank-ones written out: least squares by SVD, then in the box 0 <= t <= 1."""
    joint, rows, goal = whole.joint, whole.rows, whole.goal
    m = len(rows)
    matrix = (joint.mT[:, :, None] * rows[:, None, :]).reshape(m, -1).mT  # (o n, m)
    scale = matrix.norm(dim=0)
    scale = torch.where(scale > 1e-14 * scale.max(), scale, 1.0)
    left, values, right = torch.linalg.svd(matrix / scale, full_matrices=False)
    keep = values > 1e-10 * values[0]
    inverse = right[keep].mT / values[keep]  # (m, r)
    solution = (inverse @ (left[:, keep].mT @ goal.flatten())) / scale
    found.solution = solution
    found.independent = bool(keep.sum() == m)
    residual = (goal.flatten() - matrix @ solution).reshape(goal.shape)
    found.dual = whole.dual(residual)
    if found.dual is not None:
        return
    flips = solution > 0.5
    if accept(flips):
        found.flips = flips
        return
    if found.independent:
        fraction = (solution - flips.double()).abs() * scale
        for index in fraction.argsort(descending=True)[:3].tolist():
            pin = (left[:, keep] @ inverse[index]) / scale[index]
            found.dual = whole.pinned(pin.reshape(goal.shape), index)
            if found.dual is not None:
                return
    # The same problem in as many equations as unknowns, of unit size.
    square, aim = values[:, None] * right * scale, left.mT @ goal.flatten()
    unit = float(square.norm())
    if unit == 0:
        return
    for inside in _boxed(square / unit, aim / unit):
        residual = (goal.flatten() - matrix @ inside).reshape(goal.shape)
        found.dual = whole.dual(residual)
        if found.dual is not None:
            return
        if float(residual.norm()) <= whole.tolerance:  # then there is nothing to prove
            break
    if accept(inside > 0.5):
        found.flips = inside > 0.5


def _boxed(square: Tensor, aim: Tensor) -> Iterator[Tensor]:
    """Points t in [0, 1]^m with |square t - aim| near its least, the last one the best of them.

    Few unknowns are solved for; many get a set number of accelerated projected steps (arXiv 1204.3982: they start
    anew where the momentum points uphill), because scipy's method for them need not come to an end.
    """
    m = square.shape[1]
    if m <= 256:
        from scipy.optimize import lsq_linear

        done = lsq_linear(square.cpu().numpy(), aim.cpu().numpy(), (0.0, 1.0), "bvls", tol=1e-13, max_iter=100)
        yield torch.as_tensor(done.x, dtype=torch.float64, device=aim.device)
        return
    size = square.norm(dim=0)
    size = torch.where(size > 0, size, 1.0)
    square = square / size  # t times size is in [0, size]
    rate = 1 / float(torch.linalg.matrix_norm(square, 2)) ** 2
    t = ahead = size / 2
    momentum = aim.new_ones(())
    for step in range(1, STEPS + 1):
        slope = square.mT @ (square @ ahead - aim)
        before, t = t, torch.minimum((ahead - rate * slope).clamp(min=0), size)
        uphill = slope @ (t - before) > 0
        momentum = torch.where(uphill, 1.0, momentum)
        grown = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        ahead = torch.where(uphill, t, t + (momentum - 1) / grown * (t - before))
        momentum = grown
        if step % (STEPS // 8) == 0:
            yield t / size


def _large(whole: _Equation, accept: Accept, found: Found) -> None:
    """On random rows and columns first, then by the normal equations or, where there are too many, in steps."""
    goal, m = whole.goal, len(whole.rows)
    generator = torch.Generator().manual_seed(0)
    # Where the normal equations are cheap, a sketch gets a short try only.
    cheap = m <= GRAM
    for factor, steps in ((2, 30),) if cheap else ((2, 60), (4, 200)):
        at, by = _corner(goal, math.ceil(math.sqrt(factor * m)) + 1, generator)
        if len(at) * len(by) >= goal.numel() / 2:
            break
        if _conjugate(whole.part(at, by), accept, found, steps):
            return
    if m <= GRAM or (m <= 2 * GRAM and goal.device.type != "cpu"):
        _gram(whole, accept, found)
    else:
        _conjugate(whole, accept, found, steps=100)


def _corner(goal: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random columns, and the rows where the goal is large in them: for A = I the same ones."""
    o, n = goal.shape
    by = torch.randperm(n, generator=generator)[:size].sort().values.to(goal.device)
    heavy = goal[:, by].abs().amax(1)
    at = heavy.argsort(descending=True, stable=True)[: min(size, o)].sort().values
    return at, by


def _conjugate(equation: _Equation, accept: Accept, found: Found, steps: int) -> bool:
    """Least squares by conjugate gradients, with a look at the residual every few steps; whether that settled it."""
    joint, rows, goal, tolerance = equation.joint, equation.rows, equation.goal, equation.tolerance
    scale = equation.scale()
    columns = joint / scale

    def forward(t: Tensor) -> Tensor:
        return torch.mm(columns * t, rows)

    def back(matrix: Tensor) -> Tensor:
        return torch.sum(torch.mm(columns.mT, matrix) * rows, 1)

    residual, t = goal.clone(), goal.new_zeros(len(rows))
    slope = back(residual)
    direction, power = slope, float(slope.square().sum())
    start, seen = float(goal.norm()), None
    for step in range(1, steps + 1):
        moved = forward(direction)
        length = float(moved.square().sum())
        if length == 0 or power == 0:
            break
        rate = power / length
        t = t + rate * direction
        residual = residual - rate * moved
        slope = back(residual)
        fresh = float(slope.square().sum())
        direction, power = slope + (fresh / power) * direction, fresh
        small = float(residual.norm()) <= 1e-9 * start
        if step % 5 and not small and step < steps:
            continue
        found.dual = equation.dual(residual)
        if found.dual is not None:
            return True
        flips = t / scale > 0.5
        left = float((goal - (joint * flips) @ rows).norm())
        if left <= max(4 * tolerance, 1e-9 * start) and (seen is None or not torch.equal(seen, flips)):
            if accept(flips):
                found.flips, found.solution = flips, t / scale
                return True
            seen = flips
        if small:
            break
    found.solution = t / scale
    return False


def _gram(whole: _Equation, accept: Accept, found: Found) -> None:
    """The normal equations: G_ij = (J_i.J_j)(u_i.u_j), scaled, Cholesky in float32, refined in float64."""
    rows, goal, scale = whole.rows, whole.goal, whole.scale()
    columns = whole.joint / scale
    lengths = rows.norm(dim=1, keepdim=True)
    thin, wide = (columns * lengths.mT).float(), (rows / lengths).float()  # both of unit size
    gram = thin.mT @ thin
    for part, lines in zip(gram.split(UNITS), wide.split(UNITS), strict=True):  # to keep memory low
        part.mul_(lines @ wide.mT)
    factor, trouble = torch.linalg.cholesky_ex(gram)
    if int(trouble):  # too close to dependent for float32
        gram = (columns.mT @ columns).mul_(rows @ rows.mT)
        factor, trouble = torch.linalg.cholesky_ex(gram)
    found.independent = int(trouble) == 0 and float(factor.diagonal().min()) > 1e-6
    if int(trouble):
        return

    def solve(values: Tensor) -> Tensor:
        return torch.cholesky_solve(values[:, None].to(factor), factor).flatten().double()

    t, residual, left = torch.zeros_like(scale), goal, float(goal.norm())
    for step in range(12):
        t = t + solve(((columns.mT @ residual) * rows).sum(1))
        residual = goal - (columns * t) @ rows
        if step % 3 == 0:
            found.dual = whole.dual(residual)
            if found.dual is not None:
                break
        before, left = left, float(residual.norm())
        if step > 1 and left > 0.5 * before:  # what is left is no rounding of the solution any more
            break
    found.solution = t / scale
    found.dual = found.dual or whole.dual(residual)
    if found.dual is not None:
        return
    flips = found.solution > 0.5
    if accept(flips):
        found.flips = flips
        return
    if not found.independent:
        return
    fraction = (found.solution - flips.double()).abs() * scale
    for index in fraction.argsort(descending=True)[:3].tolist():
        one = torch.zeros_like(scale)
        one[index] = 1.0
        weights, missing = torch.zeros_like(scale), one
        for _ in range(4):
            weights = weights + solve(missing)
            missing = one - ((columns.mT @ ((columns * weights) @ rows)) * rows).sum(1)
        found.dual = whole.pinned((columns * weights) @ rows, index)
        if found.dual is not None:
            return
