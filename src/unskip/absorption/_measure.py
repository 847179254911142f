"""How well a replacement agrees with its block, measured: on inputs of several sizes, in float64 and as stored.

What is allowed is set by the block alone. In float64 the outputs may differ by 1e-10 of the block's own terms, the sum
of |A| |x|, |W_down| (|W_up| |x| + |b|) and |b_down|. Stored in a coarser dtype the replacement may err 4 times as much
as the block itself does when it is computed in that dtype; 2.5 times on the few inputs that are drawn here. Nothing
depends on the weights of the replacement. Where the block overflows, an eighth of the size at which it does not is
taken instead: there the replacement may not overflow either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._domain import Domain

SIZES = (1e-6, 1e-2, 1.0, 1e2, 1e5)  # of inputs
SMALLER = 8  # times, where the block overflows
SAMPLES = 48  # of each size
WIDE = 1e-10  # of the block's own terms, in float64
OWN = 2.5  # times what the block loses itself, so that on other inputs it stays below 4
SPLIT = 1e-6  # of the block's terms, that splitting rows into stored weights may cost on top, in `widen` and modules


@dataclass(frozen=True)
class Agreement:
    """Whether a replacement agrees, the worst ratio of its error to what is allowed, and errors at inputs of size 1
    (where the block overflows there, of the greatest size that was tried)."""

    holds: bool
    worst: float
    measured: dict[str, float]  # relative to the outputs: "float64", "stored", and "original_stored" of the block


def agree(block: Block, other: Block, domain: Domain | None = None, seed: int = 0, tolerance: float = 0.0) -> Agreement:
    """Compares the outputs before any norm after the sum. A tolerance is allowed on top, relative to the terms."""
    generator = torch.Generator().manual_seed(seed)
    bare, made, dtype = block.bare(), other.bare(), block.dtype
    wide, wide_made = bare.double(), made.double()
    worst, measured = 0.0, dict[str, float]()  # nothing measured: the block overflows wherever it was looked at
    for size in SIZES if domain is None else SIZES[1:]:  # on a domain from its center
        drawn = _inputs(bare, domain, size, generator)
        if drawn is None:
            continue
        low, out = drawn
        exact = low.double()
        truth = _hidden_shift(block, wide(exact))
        gap = _hidden_shift(block, wide_made(exact)) - truth
        terms = _terms(wide, exact)
        scale = max(float(truth.norm()), 1e-300)
        if dtype == torch.float64:
            allowed, own, stored = (WIDE + tolerance) * terms, torch.zeros_like(terms), gap
        else:
            own = (_hidden_shift(block, out.double()) - truth).norm(dim=1)
            loss = max(float(own.norm()), block.roundoff * scale, _underflow(wide, dtype) * SAMPLES**0.5)
            stored = _hidden_shift(block, made(low).double()) - truth
            allowed = (OWN * loss + tolerance * terms.norm()).expand(1)
            gap, stored = gap.norm().expand(1, 1), stored.norm().expand(1, 1)
        for error in (gap, stored):
            ratio = error.norm(dim=1) / allowed.clamp(min=1e-300)
            top = float(ratio.max())
            worst = max(worst, top if math.isfinite(top) else math.inf)
        if size <= 1.0 or not measured:
            measured = {"float64": float(gap.norm()) / scale, "stored": float(stored.norm()) / scale}
            measured["original_stored"] = float(own.norm()) / scale
    return Agreement(bool(measured) and worst <= 1.0, worst, measured)


def _inputs(
    block: Block, domain: Domain | None, size: float, generator: torch.Generator
) -> tuple[Tensor, Tensor] | None:
    """(samples, d) inputs of a size, or of a smaller one where the block overflows, and its outputs on them."""

    def draw(size: float) -> tuple[Tensor, Tensor]:
        if domain is not None:
            x = domain.sample(SAMPLES, generator, size)
        else:
            x = size * torch.randn(SAMPLES, block.inputs, generator=generator, dtype=torch.float64)
        x = x.to(block.up.device, block.dtype)
        return x, block(x)

    asked = size = min(size, torch.finfo(block.dtype).max / SMALLER)
    while size >= SIZES[0]:
        x, out = draw(size)
        if bool(torch.isfinite(out).all()):
            return (x, out) if size == asked else draw(size / SMALLER)
        size /= 2
    return None


def _underflow(block: Block, dtype: torch.dtype) -> float:
    """What a block in float64 loses where its hidden layer is rounded to the numbers next to 0 of a dtype."""
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return least * (1 + float(block.down.abs().sum(1).norm()))


def _hidden_shift(block: Block, values: Tensor) -> Tensor:
    """Outputs (..., d_out) as far as a LayerNorm after the sum sees them."""
    norm = block.norms.get("post")
    return values - values.mean(-1, keepdim=True) if norm is not None and norm.kind == "layernorm" else values


def _terms(block: Block, x: Tensor) -> Tensor:
    """(rows,) the sizes of what a block in float64 adds up."""

    def linear(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        shift: Tensor | float = 0.0 if bias is None else bias
        return x @ weight.mT + shift, x.abs() @ weight.abs().mT + (0.0 if bias is None else bias.abs())

    value, size = linear(block.up, block.up_bias)
    zero = abs(block.phi.at_zero) if math.isfinite(block.phi.at_zero) else 0.0
    if block.gate is not None:
        gate, wide = linear(block.gate, block.gate_bias)
        hidden = (wide + zero + block.phi.function(gate).abs()) * size
    else:
        hidden = size ** (2 if block.phi.family == "power" else 1) + zero + block.phi.function(value).abs()
    total = hidden @ block.down.abs().mT + x.abs() @ block.matrix.abs().mT
    sizes: Tensor = (total + (0.0 if block.down_bias is None else block.down_bias.abs())).norm(dim=1)
    return sizes


def linear_gap(block: Block, other: Block) -> tuple[Tensor, Tensor]:
    """The linear map between a block of class O and a replacement, and the skip, as far as a norm lets them through.

    Equal blocks have the same A + (c / 2) W_down W_up. In a coarse dtype outputs alone would not show that a skip was
    dropped: beside large weights it is within their rounding.
    """
    half = float(block.phi.odd or 0) / 2
    ours, theirs = (half * each.down.detach().double() @ each.up.detach().double() for each in (block, other))
    skip = block.matrix
    return _hidden_shift(block, (skip + ours - theirs).mT).mT, _hidden_shift(block, skip.mT).mT
