"""The same width, approximately: the best replacement without a skip on given inputs, by a ladder of cheap steps.

    drop     leave the skip away
    refit    and fit W_down and the output bias to the block's outputs by least squares
    flip     after flipping the units whose rank-one points against the skip
    split    give up the d units that matter least, mirror d rows in their place, and refit

Two mirrored units give any rank-one along their row, so d mirrored rows carry a linear map exactly; what is lost is
what the d pruned units added. The error is |F - G| / |F - mean F| on inputs that were held out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._flips import pivots
from unskip.errors import BadInput


@dataclass(frozen=True, eq=False)
class Approximation:
    """A replacement of the same width, its error on held-out inputs, and the errors of the whole ladder."""

    block: Block
    step: str
    error: float
    ladder: Mapping[str, float]


def approximate(block: Block, inputs: Tensor, held_out: Tensor | None = None, ridge: float = 1e-9) -> Approximation:
    """The best step of the ladder on `inputs` (..., d), what the block reads. Without `held_out` a fifth is kept back.

    A step is chosen by its error on another fifth of the inputs, so the error that is reported is of inputs that
    nothing was fitted to or chosen by.
    """
    x = inputs.detach().reshape(-1, block.inputs).double().to(block.up.device)
    if not bool(torch.isfinite(x).all()):
        raise BadInput("approximate: the inputs have entries that are NaN or infinite")
    if "post" in block.norms:
        raise BadInput("approximate: set the norm after the sum aside with block.bare(); it acts on both the same way")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
    fifth = len(x) // 5
    if fifth < 1 or len(x) - 2 * fifth < 2:
        raise BadInput(f"approximate: {len(x)} inputs are too few to fit, choose and judge by; give hundreds")
    judge = x[order[:fifth]] if held_out is None else held_out.detach().reshape(-1, block.inputs).to(x)
    choose, fit = x[order[fifth : 2 * fifth]], x[order[2 * fifth :]]
    ladder: dict[str, float] = {}
    best: tuple[float, str, Block] | None = None
    with torch.no_grad():
        whole = block.double()
        for step, made in _ladder(whole, fit, ridge):
            ladder[step] = _error(whole, made, judge)
            score = _error(whole, made, choose)
            if best is None or score < best[0]:
                best = (score, step, made)
    assert best is not None
    _, step, made = best
    stored = replace(
        block,
        up=made.up.to(block.up.dtype),
        down=made.down.to(block.down.dtype),
        up_bias=None if made.up_bias is None else made.up_bias.to(block.up.dtype),
        down_bias=None if made.down_bias is None else made.down_bias.to(block.down.dtype),
        skip=0.0,
    )
    return Approximation(stored, step, _error(whole, stored.double(), judge), ladder)


def _error(block: Block, other: Block, x: Tensor) -> float:
    truth = block(x)
    spread = (truth - truth.mean(0)).norm()
    return float((other(x) - truth).norm() / spread.clamp(min=1e-300))


def _ladder(block: Block, x: Tensor, ridge: float) -> Iterator[tuple[str, Block]]:
    free, target = replace(block, skip=0.0), block(x)
    yield "drop", free
    if "out" in block.norms:  # the norm at the branch's end is not linear in W_down
        return
    yield "refit", _refit(free, x, target, ridge)
    if block.gated or block.phi.odd is None:
        return
    if block.inputs == block.outputs:
        against = ((block.down * block.up.mT).sum(0) * float(block.phi.odd)) < 0
        sign = torch.where(against, -1.0, 1.0).to(block.up)
        bias = None if block.up_bias is None else block.up_bias * sign
        yield "flip", _refit(replace(free, up=block.up * sign[:, None], up_bias=bias), x, target, ridge)
    if block.width > block.inputs:
        yield "split", _refit(_split(free, x), x, target, ridge)


def _hidden(block: Block, x: Tensor) -> Tensor:
    x = block.norms["pre"](x) if "pre" in block.norms else x
    z = x @ block.up.mT + (0 if block.up_bias is None else block.up_bias)
    if block.gate is None:
        return block.phi.function(z)
    gate = x @ block.gate.mT + (0 if block.gate_bias is None else block.gate_bias)
    return block.phi.function(gate) * z


def _refit(block: Block, x: Tensor, target: Tensor, ridge: float) -> Block:
    """W_down, and the output bias if there is one, by least squares; a small ridge holds them to the units' scale."""
    hidden = _hidden(block, x)
    middle, centre = hidden.mean(0), target.mean(0)
    if block.down_bias is None:
        middle, centre = torch.zeros_like(middle), torch.zeros_like(centre)
    scale = hidden.std(0).clamp(min=1e-12)
    centred = (hidden - middle) / scale
    gram = centred.mT @ centred
    gram.diagonal().add_(ridge * float(gram.diagonal().mean()) + 1e-12)
    weight = torch.linalg.solve(gram, centred.mT @ (target - centre)).mT / scale
    return replace(block, down=weight, down_bias=None if block.down_bias is None else centre - weight @ middle)


def _split(block: Block, x: Tensor) -> Block:
    """Prunes the units that matter least and mirrors independent rows in their place."""
    d, h = block.inputs, block.width
    hidden = _hidden(block, x)
    weight = block.down.norm(dim=0) * hidden.std(0)
    room = min(d, h // 2)
    order = weight.argsort()
    keep = order[room:].sort().values
    rows = pivots(block.up[keep])[:room]
    mirrored = keep[torch.tensor(rows).to(keep.device)]
    bias = block.up_bias
    up = torch.cat([block.up[keep], -block.up[mirrored]])
    down = torch.cat([block.down[:, keep], torch.zeros_like(block.down[:, mirrored])], 1)
    spare = h - len(up)
    up = torch.cat([up, up.new_zeros(spare, d)])
    down = torch.cat([down, down.new_zeros(len(down), spare)], 1)
    if bias is not None:
        bias = torch.cat([bias[keep], -bias[mirrored], bias.new_zeros(spare)])
    return replace(block, up=up, down=down, up_bias=bias)
