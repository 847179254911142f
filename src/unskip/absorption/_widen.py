"""More units: the replacement that is exact at a greater width, and the change of weights that needs none.

For class O splitting d independent rows T is enough, whatever the skip: with a = A W_up[T]^{-1},

    W_down' = [W_down + a / c on T, -a / c],   W_up' = [W_up; -W_up[T]],   b' = [b; -b_T],

d units more instead of the 2 d of fresh pairs. Gated blocks need a gate with a bias, g(beta) != 0, and rank(A) units;
ReLU^2 four units a direction: 4 z = r(z + 1) + r(-z - 1) - r(z - 1) - r(1 - z) with r = ReLU^2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._construct import output_errors
from unskip.absorption._decide import absorb, allowed, gate_bias, skip_rank
from unskip.absorption._flips import pivots
from unskip.absorption._reduce import reduce
from unskip.absorption._verdict import Biases, Certificate, Verdict
from unskip.errors import BadInput


@dataclass(frozen=True, eq=False)
class Widened:
    """A wider block without a skip. `least`: fewer units were proved not to be enough; None where that is open."""

    block: Block
    extra: int
    verdict: Verdict
    least: bool | None


def widen(block: Block, biases: Biases = "as-is") -> Widened:
    """The replacement that is exact with as few more units as are known to be enough, built and checked."""
    now = absorb(block, biases=biases)
    if now.status == "possible":
        return Widened(now.replacement(), 0, now, True)
    with torch.no_grad():
        if block.gated or block.phi.family == "power":
            verdict = _with_biases(block, biases, now)
        else:
            extra = _extra(block, biases, now)
            verdict = absorb(block, width=block.width + extra, biases=biases)
        if verdict.status != "possible":
            raise BadInput(f"widen: {now.reason} Nothing wider is known: {verdict.reason}")
        extra = verdict.width - block.width
        least: bool | None = None
        if not block.gated and block.phi.family == "odd-linear" and block.up.numel() <= 4096:
            fewer = now if extra == 1 else absorb(block, width=verdict.width - 1, biases=biases)
            least = True if fewer.status == "impossible" else None
        return Widened(verdict.replacement(), extra, verdict, least)


def _extra(block: Block, biases: Biases, now: Verdict) -> int:
    family, trusted = block.phi.family, block.phi.trusted
    if {"pre", "out"} & block.norms.keys() or family not in ("odd-linear", "linear"):
        hint = "" if biases == "allowed" or trusted else "; biases='allowed' may help"
        raise BadInput(f"widen: {now.reason} No width is known to be enough{hint}; absorption.approximate comes near")
    if family == "linear":
        return max(1, min(block.inputs, block.outputs) - block.width)
    problem = reduce(block, block.width, *allowed(block, biases))
    rank, n = skip_rank(problem.target), problem.rows.shape[1]
    if problem.one_each:
        return rank
    rows = problem.up if problem.output_bias else None
    split = 2 * n - len(pivots(rows)) if rows is not None else 2 * n
    return max(1, min(2 * rank, split))


def _with_biases(block: Block, biases: Biases, now: Verdict) -> Verdict:
    if block.gated:  # a zero row of the gate is open by itself, or by its bias
        what, may = "gate", _height(block, 0.0) != 0 or gate_bias(block, biases)
    else:
        what, may = "hidden", allowed(block, biases)[0]
    if not may or {"pre", "out"} & block.norms.keys():
        hint = "" if block.norms else f" With {what} biases it can be done: ask with biases='allowed'"
        raise BadInput(f"widen: {now.reason}{hint}")
    left, values, right = torch.linalg.svd(block.matrix, full_matrices=False)
    rank = int((values > 1e-12 * values[0]).sum())
    columns, rows = left[:, :rank] * values[:rank], right[:rank]
    made = _gate(block, rows, columns) if block.gated else _power(block, rows, columns)
    errors = output_errors(block, made)
    if errors["float64"] > 1e3 * max(block.roundoff, 1e-15):
        raise BadInput("widen: the wider block does not agree with the original; its weights are too uneven")
    return Verdict(
        "possible",
        f"With {made.width - block.width} more units the skip is made up.",
        block,
        made.width,
        biases,
        "all inputs",
        Certificate("construction", {}),
        error=errors["float64"],
        extra_width=0,
        measured=errors,
        weights=made,
    )


def _rows(value: Tensor | None, more: Tensor, like: Tensor) -> Tensor:
    base = like.new_zeros(len(like)) if value is None else value.detach()
    return torch.cat([base, more.to(base)])


def _height(block: Block, beta: float) -> float:
    """How open a gate is that sees nothing but its bias. A word of the user's need not say what it is at 0."""
    return float(block.phi.function(torch.full((1,), beta, dtype=torch.float64)))


def _gate(block: Block, rows: Tensor, columns: Tensor) -> Block:
    assert block.gate is not None
    beta = 0.0 if _height(block, 0.0) else 1.0
    height = _height(block, beta)
    zero = rows.new_zeros(len(rows))
    plain = block.gate_bias is None and not beta
    return replace(
        block,
        up=torch.cat([block.up.detach(), rows.to(block.up)]),
        gate=torch.cat([block.gate.detach(), torch.zeros_like(rows).to(block.gate)]),
        gate_bias=None if plain else _rows(block.gate_bias, zero + beta, block.up[:, 0]),
        up_bias=None if block.up_bias is None else _rows(block.up_bias, zero, block.up[:, 0]),
        down=torch.cat([block.down.detach(), (columns / height).to(block.down)], 1),
        skip=0.0,
    )


def _power(block: Block, rows: Tensor, columns: Tensor) -> Block:
    one = rows.new_ones(len(rows))
    quarter = columns / 4
    if block.phi.name == "relu2":
        more, shifts = torch.cat([rows, -rows, rows, -rows]), torch.cat([one, -one, -one, one])
        out = torch.cat([quarter, quarter, -quarter, -quarter], 1)
    else:  # z^2
        more, shifts, out = torch.cat([rows, rows]), torch.cat([one, -one]), torch.cat([quarter, -quarter], 1)
    return replace(
        block,
        up=torch.cat([block.up.detach(), more.to(block.up)]),
        up_bias=_rows(block.up_bias, shifts, block.up[:, 0]),
        down=torch.cat([block.down.detach(), out.to(block.down)], 1),
        skip=0.0,
    )


@dataclass(frozen=True, eq=False)
class Nearest:
    """An absorbable block close by. `change` is |new weights - old| / |old| over both weights (Frobenius)."""

    block: Block
    change: float
    flips: Tensor
    verdict: Verdict


def nearest(block: Block, joint: bool = True, steps: int = 40) -> Nearest:
    """The smallest change of the weights that was found to make the block absorbable by flips.

    For a flip set S the change of W_down alone is closed form, -(A / c + V_S U_S) U_S^+. With `joint` both weights
    move: each step solves Lambda U^T U + V V^T Lambda = R and takes V += Lambda U^T, U += V^T Lambda. S is everything,
    or the units whose v.u is negative, whichever needs less; the best S of all is not searched for.
    """
    if block.gated or block.phi.family != "odd-linear" or {"pre", "out", "input"} & block.norms.keys():
        raise BadInput(
            f"nearest: no flip set makes up a skip for {block.activation} with norms {list(block.norms) or 'none'}; "
            "it takes a class-O activation such as relu or gelu, without a norm on the branch"
        )
    with torch.no_grad():
        problem = reduce(block, block.width, *allowed(block, "allowed"))
        goal = -block.matrix / problem.odd
        up, down = block.up.detach().double().clone(), block.down.detach().double().clone()
        together = (down * up.mT).sum(0) if block.inputs == block.outputs else down.norm(dim=0)
        rank = skip_rank(block.matrix)
        best: tuple[float, Tensor, Tensor, Tensor] | None = None
        for chosen in (torch.ones(block.width, dtype=torch.bool, device=up.device), together < 0):
            if int(chosen.sum()) < rank:
                continue
            moved = _project(up[chosen], down[:, chosen], goal, joint, steps)
            if moved is None:
                continue
            cost = float((moved[0] - up[chosen]).square().sum() + (moved[1] - down[:, chosen]).square().sum())
            if best is None or cost < best[0]:
                best = (cost, chosen, *moved)
        if best is None:
            why = "are fewer than" if block.width < rank else "have rows that do not carry"
            hint = "use widen" if joint else "use widen, or joint=True"
            raise BadInput(f"nearest: {block.width} units {why} the rank {rank} of the skip; {hint}")
        cost, chosen, new_up, new_down = best
        up[chosen], down[:, chosen] = new_up, new_down
        made = replace(block, up=up.to(block.up.dtype), down=down.to(block.down.dtype))
        total = float(block.up.double().square().sum() + block.down.double().square().sum())
        return Nearest(made, (cost / total) ** 0.5, chosen.nonzero().flatten(), absorb(made, biases="allowed"))


def _project(up: Tensor, down: Tensor, goal: Tensor, joint: bool, steps: int) -> tuple[Tensor, Tensor] | None:
    """The rows and columns moved so that they add up to the goal, or None where these rows cannot."""
    from scipy.linalg import solve_sylvester

    size = float(goal.norm())
    if joint:
        for _ in range(steps):
            left = goal - down @ up
            if float(left.norm()) <= 1e-13 * size:
                break
            found = solve_sylvester((down @ down.mT).cpu().numpy(), (up.mT @ up).cpu().numpy(), left.cpu().numpy())
            multiplier = torch.as_tensor(found, dtype=up.dtype, device=up.device)
            up, down = up + down.mT @ multiplier, down + multiplier @ up.mT
    down = down + (goal - down @ up) @ torch.linalg.pinv(up)  # the rest in closed form
    fits = float((goal - down @ up).norm()) <= 1e-9 * size
    return (up, down) if fits else None
