"""Exact replacements with more units, and nearby weights that need no more units.

For class O, splitting d independent rows T is enough for any skip: with a = A W_up[T]^{-1},

    W_down' = [W_down + a / c on T, -a / c],   W_up' = [W_up; -W_up[T]],   b' = [b; -b_T],

This needs d more units, where fresh pairs need 2 d. Gated blocks need a gate bias beta with g(beta) != 0, and rank(A)
more units.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from unskip.absorption._block import Block
from unskip.absorption._construct import allows_gate_bias, skip_rank
from unskip.absorption._decide import absorb, pad
from unskip.absorption._from import block_of
from unskip.absorption._measure import SPLIT_TOLERANCE, compare_outputs
from unskip.absorption._nearest import Nearest, least_change, unsupported_reason
from unskip.absorption._problem import Biases, problem_of
from unskip.absorption._verdict import Certificate, Verdict
from unskip.anatomy import MlpParts
from unskip.errors import BadInput


@dataclass(frozen=True, eq=False)
class Widened:
    """A wider block without a skip, in the dtypes of the original. `verdict` holds for the weights in float64.

    `error` is that of the stored block on inputs of size 1, relative to its outputs; `own` is the error of the original
    block from computing in its dtype.
    """

    block: Block = field(repr=False)
    extra: int
    verdict: Verdict = field(repr=False)
    error: float
    own: float


def widen(block: Block | MlpParts, biases: Biases = "as-is") -> Widened:
    """Builds and checks an exact replacement, with as few additional units as are known to be enough.

    Splits of nearly dependent rows lose digits, so in a coarse dtype more units may be used. The stored block is
    accepted like a replacement of `absorb`, with an additional error of 1e-6 of the block's terms.
    """
    block = block_of(block)
    now = absorb(block, biases=biases)
    with torch.no_grad():
        if now.status == "possible":
            verdicts = iter([now])
        elif block.gated:
            verdicts = iter([_open_gates(block.double(), biases, now)])
        else:
            widths = (block.width + extra for extra in _extras(block, now))
            verdicts = (absorb(block.double(), width=width, biases=biases) for width in widths)
        for verdict in verdicts:
            if verdict.status != "possible":
                continue
            made = verdict.replacement().stored_as(block)
            seen = compare_outputs(block, made, tolerance=SPLIT_TOLERANCE)
            if seen.holds:
                extra, lost = made.width - block.width, seen.measured
                return Widened(made, extra, verdict, lost["stored"], lost["original_stored"])
    name = str(block.dtype).removeprefix("torch.")
    raise BadInput(f"widen: {now.reason} Wider blocks lose too many digits when they are stored in {name}; use float64")


def _extras(block: Block, now: Verdict) -> list[int]:
    """The numbers of additional units to try, the smallest first."""
    least = now.extra_width
    if least is None:
        raise BadInput(f"widen: {now.reason} No width is known to be enough; absorption.approximate fits a replacement")
    most = 2 * max(skip_rank(block.matrix), 1)  # with fresh pairs alone
    return sorted({max(least, 1), max(least, min(least + block.inputs // 8, most)), max(least, most)})


def _open_gates(block: Block, biases: Biases, now: Verdict) -> Verdict:
    """Adds units with a constant gate, which are linear: one for each direction of the skip."""

    def height(beta: float) -> float:  # of the gate; a registered activation may lack at_zero
        return float(block.phi.function(torch.full((1,), beta, dtype=torch.float64)))

    assert block.gate is not None
    beta = 0.0 if height(0.0) else 1.0
    if (beta and not allows_gate_bias(block, biases)) or {"pre", "out"} & block.norms.keys():
        hint = "" if block.norms else " With gate biases it is possible: pass biases='allowed'"
        raise BadInput(f"widen: {now.reason}{hint}")
    left, values, right = torch.linalg.svd(block.matrix, full_matrices=False)
    rank = int((values > 1e-12 * values[0]).sum())
    columns, rows = left[:, :rank] * values[:rank], right[:rank]
    wider = pad(block, block.width + rank)
    made = replace(
        wider,
        up=torch.cat([block.up.detach(), rows.to(block.up)]),
        down=torch.cat([block.down.detach(), (columns / height(beta)).to(block.down)], 1),
        skip=0.0,
    )
    if beta:
        before = block.up.new_zeros(block.width) if block.gate_bias is None else block.gate_bias.detach()
        made = replace(made, gate_bias=torch.cat([before, before.new_full((rank,), beta)]))
    seen = compare_outputs(block, made)
    return Verdict(
        "possible" if seen.holds else "undecided",
        f"{rank} more units reproduce the skip.",
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


def nearest(block: Block | MlpParts) -> Nearest:
    """The smallest change of the weights that was found to let the block absorb its skip by flips.

    The flip set is the rounded solution of the search, all units, or those that point against the skip, whichever needs
    the smallest change.
    """
    block = block_of(block)
    if (why := unsupported_reason(block, block.width)) is not None:
        raise BadInput(f"nearest: it {why}; this one has {block.activation} and norms {list(block.norms) or 'none'}")
    with torch.no_grad():
        found = least_change(block, problem_of(block, block.width, "allowed"))
        if found is None:
            rank = skip_rank(block.matrix)
            why = "are fewer than" if block.width < rank else "have rows that do not carry"
            raise BadInput(f"nearest: {block.width} units {why} the rank {rank} of the skip; use widen")
        made, flips, moved = found
        return Nearest(made, moved, flips, absorb(made, biases="allowed"))
