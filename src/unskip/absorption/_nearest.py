"""Nearby weights whose skip can be absorbed.

For a flip set S with V = W_down[:, S] and U = W_up[S, :], the smallest change of W_down alone is -(A / c + V U) U^+. To
change both weights, each step solves Lambda U^T U + V V^T Lambda = R with R = -A / c - V U, and adds Lambda U^T to V
and V^T Lambda to U. S comes from the search for flips: the entries above 1/2 of the least-squares solution in the box
0 <= t <= 1, which is the flip set itself if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._keys import separate_keys
from unskip.absorption._measure import compare_outputs
from unskip.absorption._problem import Problem, problem_of
from unskip.absorption._search import full_equation
from unskip.absorption._verdict import Verdict

STEPS = 40  # the largest number of steps that change both weights
Again = Callable[[Block, Verdict], Verdict]  # decides the same question for other weights


@dataclass(frozen=True, eq=False)
class Nearest:
    """A nearby block that can absorb its skip. `change` is |new weights - old| / |old| of both weights (Frobenius)."""

    block: Block
    change: float
    flips: Tensor
    verdict: Verdict


def candidate_flip_sets(problem: Problem) -> list[Tensor]:
    """(h,) candidate flip sets: the rounded solution of the search, all units, and the units against the skip."""
    keys = separate_keys(problem)
    near = full_equation(keys.joint, keys.rows, keys.goal).box_least_squares(coarse=keys.count > 512) > 0.5
    found = [near, torch.ones_like(near)]
    if problem.skip.shape[0] == problem.up.shape[1]:
        found.append(problem.odd * ((problem.skip @ problem.up.mT) * problem.down).sum(0) < 0)
    return found


def least_change(block: Block, problem: Problem) -> tuple[Block, Tensor, float] | None:
    """The least change of weights that was found to make a flip set absorb the skip.

    Returns the changed block, the flips and the relative change, or None.
    """
    goal = -block.matrix / problem.odd
    up, down = block.up.detach().double(), block.down.detach().double()
    best: tuple[float, Tensor, Tensor, Tensor] | None = None
    for chosen in candidate_flip_sets(problem):
        moved = _moved(up[chosen], down[:, chosen], goal)
        if moved is None:
            continue
        cost = float((moved[0] - up[chosen]).square().sum() + (moved[1] - down[:, chosen]).square().sum())
        if best is None or cost < best[0]:
            best = (cost, chosen, *moved)
    if best is None:
        return None
    cost, chosen, new_up, new_down = best
    up, down = up.clone(), down.clone()
    up[chosen], down[:, chosen] = new_up, new_down
    made = replace(block, up=up.to(block.up.dtype), down=down.to(block.down.dtype))
    old, new = (torch.cat([each.up.flatten(), each.down.flatten()]).detach().double() for each in (block, made))
    return made, chosen.nonzero().flatten(), float((new - old).norm() / old.norm().clamp(min=1e-300))


def _moved(up: Tensor, down: Tensor, goal: Tensor) -> tuple[Tensor, Tensor] | None:
    """Changes the rows and columns until down @ up is the goal. Returns None if the rows do not allow that."""
    size = float(goal.norm())
    if len(up):
        for _ in range(STEPS):
            left = goal - down @ up
            if float(left.norm()) <= 1e-13 * size:
                break
            multiplier = _sylvester(down @ down.mT, up.mT @ up, left)
            up, down = up + down.mT @ multiplier, down + multiplier @ up.mT
    down = down + (goal - down @ up) @ torch.linalg.pinv(up)  # the rest in closed form
    fits = float((goal - down @ up).norm()) <= 1e-9 * size
    return (up, down) if fits else None


def _sylvester(a: Tensor, b: Tensor, right: Tensor) -> Tensor:
    """Solves a X + X b = right for symmetric positive semidefinite a and b."""
    (one, left), (two, other) = torch.linalg.eigh(a), torch.linalg.eigh(b)
    sums = one[:, None] + two
    floor = 1e-14 * float(sums.abs().max()) + 1e-300
    found: Tensor = left @ ((left.mT @ right @ other) / sums.clamp(min=floor)) @ other.mT
    return found


def unsupported_reason(block: Block, width: int) -> str | None:
    """The reason why nearby weights are not searched for, or None. The verdict has to depend on flip sets."""
    if block.gated or block.phi.family != "odd-linear" or {"pre", "out"} & block.norms.keys():
        return "takes a plain MLP of an activation such as relu or gelu, without a norm on the branch"
    if block.extreme:
        return "takes weights whose squares float64 can hold; rescale rows and columns"
    return None if width >= block.width else f"takes a width of at least {block.width}, the block's own"


def absorb_within(verdict: Verdict, tolerance: float, again: Again) -> Verdict | None:
    """A `possible` verdict for weights that are changed by at most the tolerance, or None."""
    block = verdict.block
    near = least_change(block, problem_of(block, verdict.width, verdict.biases, verdict.inputs))
    if near is None or near[2] > tolerance:
        return None
    found = again(near[0], verdict)
    if found.status != "possible" or found.weights is None:
        return None
    seen = compare_outputs(block, found.weights, verdict.inputs, tolerance=4 * tolerance)
    reason = f"Within the tolerance: with weights moved by {near[2]:.2g} of their size the skip can be absorbed."
    return replace(
        found, block=block, reason=reason, error=seen.measured.get("float64"), measured=seen.measured,
        tolerance=tolerance, change=near[2], domain=found.domain.partition(", up to")[0] + ", up to the error below",
    )  # fmt: skip
