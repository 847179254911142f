"""The search for a flip set, or for a proof that there is none.

    sum_k t_k J_k u_k^T = B,   t in {0, 1}^m

For any matrix Y let g_k = J_k^T Y u_k. Over all t in [0, 1]^m the left side stays at least

    LB(Y) = max( <Y, B> - sum_k max(g_k, 0),  sum_k min(g_k, 0) - <Y, B> ) / |Y|_F

away from B, so one Y with LB(Y) > 0 settles it. The residual of the least squares is the natural Y; a Y on few rows
and columns does as well, so the least squares need only be solved on a sketch. The residual of least squares in the box
0 <= t <= 1 has the greatest LB of all, the distance itself. Where B lies in the span and the rank-ones are independent,
t is unique and is either binary or not: then Y with g = e_i pins t_i to a value that is neither 0 nor 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.absorption._equation import UNITS, Dual, Equation, boxed, trace

DENSE = 3_000_000  # entries of the matrix of rank-ones that is still written out
GRAM = 8192  # units whose normal equations are still formed
TIGHT = 2e10  # products that a tighter bound may cost


@dataclass(eq=False)
class Found:
    """What the search came to. No dual and no flips: nothing is known."""

    flips: Tensor | None = None  # (m,) bool
    dual: Dual | None = None
    solution: Tensor | None = None  # the t of least squares, in the box where that was solved


Accept = Callable[[Tensor], bool]  # whether flipping these keys is good enough


def search(joint: Tensor, rows: Tensor, goal: Tensor, tolerance: float, accept: Accept, tight: bool = True) -> Found:
    """Looks for a flip set that `accept` takes, or a Y that keeps every t further than `tolerance` away.

    With `tight` a bound that says little is raised to the distance itself, where that is cheap.
    """
    found = Found()
    m = len(rows)
    none = torch.zeros(m, dtype=torch.bool, device=rows.device)
    if accept(none):
        found.flips = none
        return found
    if float(goal.norm()) == 0:
        return found
    at, by = (torch.arange(size, device=goal.device) for size in goal.shape)
    whole = Equation(joint, rows, goal, at, by, tolerance)
    large = goal.numel() * m > DENSE
    if not large:
        found.dual = whole.dual(goal)
    elif goal.shape[0] == goal.shape[1] and not bool((goal - torch.diag(goal.diagonal())).any()):
        found.dual = trace(whole)
    if found.dual is None and m:
        (_large if large else _dense)(whole, accept, found)
    if tight and found.dual is not None and found.dual.index is None and m:
        _tighten(whole, found)
    return found


def _tighten(whole: Equation, found: Found) -> None:
    """Raises the bound to the least distance over the box, unless it is close to what dropping the skip costs."""
    assert found.dual is not None
    o, n = whole.goal.shape
    m = len(whole.rows)
    if found.dual.bound >= 0.9 * float(whole.goal.norm()) or m * m * (o + n) > TIGHT:
        return
    joint, rows = (value.float() for value in (whole.joint, whole.rows)) if m > 512 else (whole.joint, whole.rows)
    gram = joint.mT @ joint
    for part, lines in zip(gram.split(UNITS), rows.split(UNITS), strict=True):
        part.mul_(lines @ rows.mT)
    slope = ((joint.mT @ whole.goal.to(joint)) * rows).sum(1)
    found.solution = boxed(gram, slope, 30).double()
    better = whole.dual(whole.goal - (whole.joint * found.solution) @ whole.rows)
    if better is not None and better.bound > found.dual.bound:
        found.dual = better


def _dense(whole: Equation, accept: Accept, found: Found) -> None:
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
    residual = (goal.flatten() - matrix @ solution).reshape(goal.shape)
    found.dual = whole.dual(residual)
    if found.dual is not None:
        return
    flips = solution > 0.5
    if accept(flips):
        found.flips = flips
        return
    if bool(keep.sum() == m):  # independent
        fraction = (solution - flips.double()).abs() * scale
        for index in fraction.argsort(descending=True)[:3].tolist():
            pin = (left[:, keep] @ inverse[index]) / scale[index]
            found.dual = whole.pinned(pin.reshape(goal.shape), index)
            if found.dual is not None:
                return
    inside = boxed(matrix.mT @ matrix, matrix.mT @ goal.flatten(), 800)
    found.solution = inside
    found.dual = whole.dual((goal.flatten() - matrix @ inside).reshape(goal.shape))
    if found.dual is None and accept(inside > 0.5):
        found.flips = inside > 0.5


def _large(whole: Equation, accept: Accept, found: Found) -> None:
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


def _conjugate(equation: Equation, accept: Accept, found: Found, steps: int) -> bool:
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


def _gram(whole: Equation, accept: Accept, found: Found) -> None:
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
    if float(factor.diagonal().min()) <= 1e-6:  # not known to be independent
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
