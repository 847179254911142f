"""The search for a flip set, or for a matrix Y that rules all of them out.

The residual of least squares over t is the natural Y; a Y on few rows and columns does as well, so the least squares
need only be solved on a sketch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from unskip.absorption._equation import Dual, Equation

DENSE = 3_000_000  # entries of the matrix of rank-ones that is still written out

Accept = Callable[[Tensor], bool]  # whether flipping these keys is good enough


def equation(joint: Tensor, rows: Tensor, goal: Tensor, tolerance: float = 0.0) -> Equation:
    """The whole flip equation."""
    at, by = (torch.arange(size, device=goal.device) for size in goal.shape)
    return Equation(joint, rows, goal, at, by, tolerance)


def search(whole: Equation, accept: Accept) -> Dual | None:
    """Offers flip sets to `accept` until it takes one; otherwise a Y that keeps every t away, if one is found."""
    goal, m = whole.goal, len(whole.rows)
    if accept(torch.zeros(m, dtype=torch.bool, device=goal.device)) or float(goal.norm()) == 0:
        return None
    large = goal.numel() * m > DENSE
    dual = None
    if not large:
        dual = whole.dual(goal)
    elif goal.shape[0] == goal.shape[1] and not bool((goal - torch.diag(goal.diagonal())).any()):
        dual = whole.dual(goal.diagonal())  # for A = I the trace
    if dual is not None or not m:
        return dual
    return (_sketched if large else _dense)(whole, accept)


def _dense(whole: Equation, accept: Accept) -> Dual | None:
    """With all rank-ones written out: least squares by SVD, then in the box 0 <= t <= 1."""
    goal = whole.goal
    matrix = (whole.joint.mT[:, :, None] * whole.rows[:, None, :]).flatten(1).mT  # (o n, m)
    scale = matrix.norm(dim=0)
    scale = torch.where(scale > 1e-14 * scale.max(), scale, 1.0)
    left, values, right = torch.linalg.svd(matrix / scale, full_matrices=False)
    keep = values > 1e-10 * values[0]
    left = left[:, keep]
    solution = (right[keep].mT / values[keep]) @ (left.mT @ goal.flatten()) / scale
    residual = goal.flatten() - matrix @ solution
    residual = residual - left @ (left.mT @ residual)  # once more, because a small residual is mostly rounding
    dual = whole.dual(residual.reshape(goal.shape))
    if dual is not None or accept(solution > 0.5):
        return dual
    inside = whole.closest()
    dual = whole.dual(goal - (matrix @ inside).reshape(goal.shape))
    if dual is None:
        accept(inside > 0.5)
    return dual


def _sketched(whole: Equation, accept: Accept) -> Dual | None:
    """On random rows and columns first, then on all of them."""
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
    """Random columns, and the rows where the goal is large in them: for A = I the same ones."""
    by = torch.randperm(goal.shape[1], generator=generator)[:size].sort().values.to(goal.device)
    heavy = goal[:, by].abs().amax(1)
    return heavy.argsort(descending=True, stable=True)[:size].sort().values, by


def _conjugate(equation: Equation, accept: Accept, steps: int) -> tuple[Dual | None, bool]:
    """Least squares by conjugate gradients, with a look at the residual every few steps: a Y, or a set was taken.

    Channels and units are scaled to equal norms: outlier channels would make for many more steps.
    """
    joint, rows, goal = equation.joint, equation.rows, equation.goal
    above, beside = equation.channels
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
        left, near = (
            float((goal - (joint * flips) @ rows).norm()),
            max(4 * equation.tolerance, 1e-9 * float(goal.norm())),
        )
        if left <= near and (seen is None or not torch.equal(seen, flips)):
            if accept(flips):
                return None, True
            seen = flips
        if small:
            break
    return None, False
