"""Weights close by that can be absorbed.

For a flip set S the change of W_down alone is closed form, -(A / c + V_S U_S) U_S^+. To move both weights each step
solves Lambda U^T U + V V^T Lambda = R and takes V += Lambda U^T, U += V^T Lambda. S comes from the search for flips:
the entries above 1/2 of least squares in the box 0 <= t <= 1, which is the flip set itself where there is one. Units
that nearly share a key are the other way: moved onto it they leave units to spare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._keys import canonical, snapped
from unskip.absorption._measure import agree
from unskip.absorption._problem import Problem, reduce
from unskip.absorption._search import search
from unskip.absorption._verdict import Verdict

Again = Callable[[Block, Verdict], Verdict]  # the same question about other weights


@dataclass(frozen=True, eq=False)
class Nearest:
    """An absorbable block close by. `change` is |new weights - old| / |old| over both weights (Frobenius)."""

    block: Block
    change: float
    flips: Tensor
    verdict: Verdict


def flip_sets(problem: Problem) -> list[Tensor]:
    """(h,) sets of units that come near to the skip: what the search rounds to, those against the skip, and all."""
    keys = canonical(problem)
    units = torch.zeros(len(problem.up), dtype=torch.bool, device=problem.up.device)
    every = torch.ones_like(units)
    found = [every]
    if problem.skip.shape[0] == problem.up.shape[1]:
        found.append(problem.odd * ((problem.skip @ problem.up.mT) * problem.down).sum(0) < 0)
    if keys.count == len(units):
        solution = search(keys.joint, keys.rows, keys.goal, 0.0, lambda flips: False).solution
        if solution is not None:
            found.insert(0, solution > 0.5)
    return found


def project(block: Block, problem: Problem, joint: bool = True, steps: int = 40) -> tuple[Block, Tensor, float] | None:
    """The block with the least change that was found to make one of the flip sets add up to the skip."""
    goal = -block.matrix / problem.odd
    up, down = block.up.detach().double(), block.down.detach().double()
    best: tuple[float, Tensor, Tensor, Tensor] | None = None
    for chosen in flip_sets(problem):
        moved = _moved(up[chosen], down[:, chosen], goal, joint, steps)
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
    return made, chosen.nonzero().flatten(), change(block, made)


def change(block: Block, made: Block) -> float:
    """|new weights - old| / |old| over both weights; a hidden bias that moves counts as moved."""

    def parts(one: Block) -> list[Tensor]:
        held = [one.up, one.down] + ([] if one.up_bias is None else [one.up_bias])
        return [value.detach().double() for value in held]

    moved = sum(float((a - b).square().sum()) for a, b in zip(parts(block), parts(made), strict=True))
    whole = sum(float(b.square().sum()) for b in parts(block)[:2])
    return float((moved / max(whole, 1e-300)) ** 0.5)


def _moved(up: Tensor, down: Tensor, goal: Tensor, joint: bool, steps: int) -> tuple[Tensor, Tensor] | None:
    """The rows and columns moved so that they add up to the goal, or None where these rows cannot."""
    size = float(goal.norm())
    if joint and len(up):
        for _ in range(steps):
            left = goal - down @ up
            if float(left.norm()) <= 1e-13 * size:
                break
            multiplier = _sylvester(down @ down.mT, up.mT @ up, left)
            up, down = up + down.mT @ multiplier, down + multiplier @ up.mT
    down = down + (goal - down @ up) @ torch.linalg.pinv(up)  # the rest in closed form
    fits = float((goal - down @ up).norm()) <= 1e-9 * size
    return (up, down) if fits else None


def _sylvester(a: Tensor, b: Tensor, right: Tensor) -> Tensor:
    """X with a X + X b = right, for symmetric a and b that are not negative."""
    (one, left), (two, other) = torch.linalg.eigh(a), torch.linalg.eigh(b)
    sums = one[:, None] + two
    floor = 1e-14 * float(sums.abs().max()) + 1e-300
    found: Tensor = left @ ((left.mT @ right @ other) / sums.clamp(min=floor)) @ other.mT
    return found


def near_absorbable(verdict: Verdict, tolerance: float, again: Again) -> Verdict | None:
    """A `possible` with weights that are moved by at most the tolerance, or None. The least change is taken."""
    block = verdict.block
    best: Verdict | None = None
    for made in _candidates(verdict, tolerance):
        moved = change(block, made)
        if moved > tolerance or (best is not None and best.change is not None and moved >= best.change):
            continue
        found = again(made, verdict)
        if found.status != "possible" or found.weights is None:
            continue
        seen = agree(block, found.weights, verdict.inputs, tolerance=4 * tolerance)
        reason = f"Within the tolerance: with weights moved by {moved:.2g} of their size the skip can be absorbed."
        best = replace(
            found, block=block, reason=reason, exact=False, error=seen.measured.get("float64"), flip_bound=None,
            measured=seen.measured, tolerance=tolerance, change=moved, domain=verdict.domain,
        )  # fmt: skip
    return best


def _candidates(verdict: Verdict, tolerance: float) -> Iterator[Block]:
    block = verdict.block
    if block.gated or block.phi.family != "odd-linear" or {"pre", "out"} & block.norms.keys() or block.extreme:
        return
    problem = reduce(block, verdict.width, verdict.biases, verdict.inputs)
    together = snapped(problem, tolerance)
    if together is not None:
        yield together
    if "input" not in block.norms and verdict.width >= block.width:
        found = project(block, problem)
        if found is not None:
            yield found[0]
