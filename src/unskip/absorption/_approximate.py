"""Approximate replacements of the same width: the best of several cheap steps, on given inputs.

    drop     drop the skip
    refit    also fit W_down and the output bias to the block's outputs by least squares
    flip     refit after flipping the units whose rank-one terms point against the skip
    split    prune the d least important units, put mirrored copies of d rows in their place, and refit
    open     gated blocks: put d linear units with a constant gate in the place of the least important ones, and refit
    distil   start from the best of these and train all weights to match the block's outputs

A unit and its mirror represent any rank-one map along their row, so d mirrored rows represent a linear map exactly; the
loss is the contribution of the d pruned units. A constant gate needs a gate bias, or g(0) != 0: gated blocks without
either have no linear units, so only drop, refit and distil apply to them. The error is |F - G| / |F - mean F| on
held-out inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unskip import _checks
from unskip.absorption._block import WEIGHTS, Block
from unskip.absorption._construct import independent_rows
from unskip.absorption._domain import as_rows
from unskip.absorption._from import block_of
from unskip.anatomy import MlpParts
from unskip.errors import BadInput

RIDGE = 1e-9


@dataclass(frozen=True, eq=False)
class Approximation:
    """A replacement of the same width, its error on `held_out` inputs, and the errors of all steps."""

    block: Block = field(repr=False)
    step: str
    error: float
    ladder: Mapping[str, float]
    held_out: int  # number of inputs on which the errors are measured


def min_inputs(width: int) -> int:
    """The number of inputs for a fit: half are held out, a tenth select the step, the rest outnumber the unknowns."""
    return math.ceil(2.5 * (width + 1))


def inputs_to_read(width: int) -> int:
    """The number of inputs to record for a site, if the data have that many: with `min_inputs` alone a fit overfits."""
    return max(min_inputs(width), 8192)


def approximate(block: Block | MlpParts, inputs: Tensor, distil: int = 0) -> Approximation:
    """Returns the best approximate replacement on the block's `inputs` (..., d), half of which are held out.

    A step is selected by its error on inputs that it was not fitted to. The reported error is measured on the held-out
    inputs, which are used neither to fit nor to select. `distil` is a number of training steps.
    """
    block = block_of(block)
    x = _rows(inputs, block)
    distil = _checks.whole("approximate", "distil", distil, low=0)
    if "post" in block.norms:
        raise BadInput("approximate: remove the norm after the sum with block.bare(); it acts on both in the same way")
    if len(x) < min_inputs(block.width):
        raise BadInput(
            f"approximate: {len(x)} inputs are too few for {block.width} units: {min_inputs(block.width)} are needed, "
            "so that the fit has more inputs than unknowns and half can be held out"
        )
    if bool((x == x[0]).all()):
        raise BadInput("approximate: all inputs are the same, so there is nothing to fit; give the inputs of the block")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
    kept = len(x) // 2
    fifth = (len(x) - kept) // 5
    test, choose, fit = x[order[:kept]], x[order[kept : kept + fifth]], x[order[kept + fifth :]]
    ladder: dict[str, float] = {}
    best: tuple[float, str, Block] | None = None
    with torch.no_grad():
        whole = block.double()
        for step, made in _ladder(whole, fit):
            ladder[step] = _error(whole, made, test)
            score = _error(whole, made, choose)
            if best is None or score < best[0]:
                best = (score, step, made)
        assert best is not None
        if distil:
            made = _distil(whole, best[2], fit, choose, distil)
            ladder["distil"] = _error(whole, made, test)
            if _error(whole, made, choose) < best[0]:
                best = (0.0, "distil", made)
        _, step, made = best
        stored = made.stored_as(block)
        return Approximation(stored, step, _error(whole, stored.double(), test), ladder, len(test))


def _rows(value: Tensor, block: Block) -> Tensor:
    """Inputs as (n, d) in float64."""
    x = as_rows("approximate: inputs", value)
    if x.shape[1] != block.inputs:
        raise BadInput(f"approximate: inputs must be (..., {block.inputs}), got (..., {x.shape[1]})")
    return x.to(block.up.device)


def _error(block: Block, other: Block, x: Tensor) -> float:
    truth = block(x)
    spread = (truth - truth.mean(0)).norm()
    return float((other(x) - truth).norm() / spread.clamp(min=1e-300))


def _ladder(block: Block, x: Tensor) -> Iterator[tuple[str, Block]]:
    free, target = replace(block, skip=0.0), block(x)
    yield "drop", free
    if "out" in block.norms:  # a norm at the end of the branch is not linear in W_down
        return
    yield "refit", _refit(free, x, target)
    if block.gated:
        opened = _constant_gates(free, x)
        if opened is not None:
            yield "open", _refit(opened, x, target)
        return
    if block.phi.odd is None:
        return
    if block.inputs == block.outputs:
        against = ((block.down * block.up.mT).sum(0) * float(block.phi.odd)) < 0
        sign = torch.where(against, -1.0, 1.0).to(block.up)
        bias = None if block.up_bias is None else block.up_bias * sign
        yield "flip", _refit(replace(free, up=block.up * sign[:, None], up_bias=bias), x, target)
    if block.width > block.inputs:
        yield "split", _refit(_split(free, x), x, target)


def _refit(block: Block, x: Tensor, target: Tensor) -> Block:
    """Fits W_down, and the output bias if there is one, by least squares with a small ridge penalty."""
    hidden = block.hidden(x)
    middle, centre = hidden.mean(0), target.mean(0)
    if block.down_bias is None:
        middle, centre = torch.zeros_like(middle), torch.zeros_like(centre)
    scale = hidden.std(0).clamp(min=1e-12)
    centred = (hidden - middle) / scale
    gram = centred.mT @ centred
    gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()) + 1e-12)
    weight = torch.linalg.solve(gram, centred.mT @ (target - centre)).mT / scale
    return replace(block, down=weight, down_bias=None if block.down_bias is None else centre - weight @ middle)


def _split(block: Block, x: Tensor) -> Block:
    """Prunes the least important units and puts mirrored copies of independent rows in their place."""
    d, h = block.inputs, block.width
    hidden = block.hidden(x)
    weight = block.down.norm(dim=0) * hidden.std(0)
    room = min(d, h // 2)
    order = weight.argsort()
    keep = order[room:].sort().values
    rows = independent_rows(block.up[keep])[:room]
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


def _constant_gates(block: Block, x: Tensor) -> Block | None:
    """Replaces the least important units by units with a constant gate; None if no gate can be constant."""
    assert block.gate is not None
    at_zero = float(block.phi.function(torch.zeros(1, dtype=torch.float64)))
    room = min(block.inputs, block.width // 2)
    if block.gate_bias is None and not at_zero:
        return None
    least = (block.down.norm(dim=0) * block.hidden(x).std(0)).argsort()[:room]
    up, gate = block.up.clone(), block.gate.clone()
    up[least], gate[least] = torch.eye(block.inputs, dtype=up.dtype, device=up.device)[:room], 0.0
    up_bias, gate_bias = (None if bias is None else bias.clone() for bias in (block.up_bias, block.gate_bias))
    if up_bias is not None:
        up_bias[least] = 0.0
    if gate_bias is not None:
        gate_bias[least] = 0.0 if at_zero else 1.0
    return replace(block, up=up, gate=gate, up_bias=up_bias, gate_bias=gate_bias)


def _distil(block: Block, made: Block, fit: Tensor, choose: Tensor, steps: int) -> Block:
    """Trains all weights of the replacement with Adam, with learning rates relative to their size.

    Returns the weights with the least error on `choose`.
    """
    held = {name: value for name, value in made.tensors().items() if name in WEIGHTS}
    weights: dict[str, Any] = {name: value.detach().clone().requires_grad_() for name, value in held.items()}
    groups = [{"params": [w], "lr": 3e-3 * (float(w.detach().abs().mean()) + 1e-6)} for w in weights.values()]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    target, generator = block(fit), torch.Generator().manual_seed(0)
    scale = (target - target.mean(0)).square().mean().clamp(min=1e-300)
    best, score = made, _error(block, made, choose)
    for step in range(1, steps + 1):
        rows = torch.randint(len(fit), (min(len(fit), 1024),), generator=generator).to(fit.device)
        with torch.enable_grad():
            now = replace(made, **weights)
            loss = (now(fit[rows]) - target[rows]).square().mean() / scale
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            kept = replace(made, **{name: w.detach().clone() for name, w in weights.items()})
            error = _error(block, kept, choose)
            if error < score:
                best, score = kept, error
    return best
