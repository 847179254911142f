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
from unskip.absorption._decide import absorb
from unskip.absorption._extra import gate_bias, skip_rank
from unskip.absorption._measure import agree
from unskip.absorption._nearest import Nearest, project
from unskip.absorption._problem import Biases, allowed, reduce
from unskip.absorption._verdict import Certificate, Verdict
from unskip.errors import BadInput

GOOD = 1e-5  # a relative error that is good enough for more units not to be spent on it


@dataclass(frozen=True, eq=False)
class Widened:
    """A wider block without a skip, stored as the block is. `verdict` is about the weights in float64.

    `error` is that of the stored block on inputs of size 1, relative to its outputs; `own` is what the block itself
    loses by computing in its dtype.
    """

    block: Block
    extra: int
    verdict: Verdict
    error: float
    own: float


def widen(block: Block, biases: Biases = "as-is") -> Widened:
    """The replacement that is exact with as few more units as are known to be enough, built and checked.

    Splits of rows that are nearly dependent lose digits; in a coarse dtype more units are spent to keep the loss small.
    """
    now = absorb(block, biases=biases)
    if now.status == "possible":
        return _stored(block, now)
    with torch.no_grad():
        if block.gated or block.phi.family == "power":
            return _stored(block, _with_biases(block.double(), biases, now))
        best: Widened | None = None
        for extra in _extras(block, now):
            verdict = absorb(block.double(), width=block.width + extra, biases=biases)
            if verdict.status != "possible":
                continue
            found = _stored(block, verdict)
            if best is None or found.error < best.error:
                best = found
            if found.error <= max(GOOD, 4 * found.own):
                break
        if best is None:
            raise BadInput(f"widen: {now.reason} Nothing wider is known: {verdict.reason}")
        return best


def _stored(block: Block, verdict: Verdict) -> Widened:
    made = verdict.replacement().stored_as(block)
    seen = agree(block, made).measured
    return Widened(made, made.width - block.width, verdict, seen["stored"], seen["original_stored"])


def _extras(block: Block, now: Verdict) -> list[int]:
    """Numbers of units to try, the least that is enough first."""
    least = now.extra_width
    if least is None:
        raise BadInput(f"widen: {now.reason} No width is known to be enough; absorption.approximate comes near")
    most = 2 * max(skip_rank(block.matrix), 1)
    return sorted({max(least, 1), max(least, min(least + block.inputs // 8, most)), max(least, most)})


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
    seen = agree(block, made)
    if not seen.holds:
        raise BadInput("widen: the wider block does not agree with the original; its weights are too uneven")
    return Verdict(
        "possible",
        f"With {made.width - block.width} more units the skip is made up.",
        block,
        made.width,
        biases,
        "all inputs",
        Certificate("construction", {}),
        error=seen.measured["float64"],
        extra_width=0,
        measured=seen.measured,
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


def nearest(block: Block, joint: bool = True, steps: int = 40) -> Nearest:
    """The smallest change of the weights that was found to make the block absorbable by flips.

    With `joint` both weights move, else W_down alone. The flip set is the one that the search comes closest with, all
    units, or those that point against the skip, whichever needs less.
    """
    if block.gated or block.phi.family != "odd-linear" or {"pre", "out"} & block.norms.keys():
        raise BadInput(
            f"nearest: no flip set makes up a skip for {block.activation} with norms {list(block.norms) or 'none'}; "
            "it takes a class-O activation such as relu or gelu, without a norm on the branch"
        )
    with torch.no_grad():
        found = project(block, reduce(block, block.width, "allowed"), joint, steps)
        if found is None:
            rank = skip_rank(block.matrix)
            why = "are fewer than" if block.width < rank else "have rows that do not carry"
            hint = "use widen" if joint else "use widen, or joint=True"
            raise BadInput(f"nearest: {block.width} units {why} the rank {rank} of the skip; {hint}")
        made, flips, moved = found
        return Nearest(made, moved, flips, absorb(made, biases="allowed"))
