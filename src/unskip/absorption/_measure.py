"""How well a replacement agrees with its block, measured: on inputs of several sizes, in float64 and as stored.

What is allowed is set by the block alone. In float64 the outputs may differ by 1e-10 of the block's own terms, the sum
of |A| |x|, |W_down| (|W_up| |x| + |b|) and |b_down|. Stored in a coarser dtype the replacement may err 4 times as much
as the block itself loses by computing in that dtype; 2.5 times on the few inputs that are drawn here. The loss is
measured, and counted as at least one rounding of the output and of each term that it sums,

    u / sqrt(3) * sqrt(F_k^2 + sum_j (A_kj x_j)^2 + sum_i (W_down,ki phi_i)^2 + b_down,k^2)  over inputs and outputs k,

because a block whose terms cancel may lose nothing on these inputs by chance. u / sqrt(3) is the standard deviation of
one rounding, and independent ones add up in squares: in bfloat16 a block of 3,072 units does lose that much, and 26
times less than u times the sum of its terms' sizes.
Nothing depends on the weights of the replacement. Where the block overflows, an eighth of the size at which it does not
is taken instead: there the replacement may not overflow either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._domain import Domain
from unskip.absorption._problem import SHARE

ROUNDINGS = 8  # of the units' terms, added in squares: what a gap may be at most
DECOMPOSED = 2048  # the largest skip that is decomposed, where it is not diagonal
SIZES = tuple(10.0**power for power in range(-6, 6))  # of inputs; on a domain in float64 from the fifth on
SMALLER = 8  # times, where the block overflows
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
    sizes = SIZES if domain is None or dtype != torch.float64 else SIZES[4:]
    drawn = {size: pair for size in sizes if (pair := _inputs(bare, domain, size, generator)) is not None}
    worst, measured = 0.0, dict[str, float]()  # nothing measured: the block overflows wherever it was looked at
    if not drawn:
        return Agreement(False, worst, measured)
    low, out = (torch.cat([pair[i] for pair in drawn.values()]) for i in (0, 1))
    exact = low.double()
    truth = _hidden_shift(block, wide(exact))
    gap = _hidden_shift(block, wide_made(exact)) - truth
    stored = gap if dtype == torch.float64 else _hidden_shift(block, made(low).double()) - truth
    own = _hidden_shift(block, out.double()) - truth
    terms, squares = _terms(wide, exact)
    for at, size in enumerate(drawn):
        rows = slice(at * _samples(block), (at + 1) * _samples(block))
        scale, lost, wrong = (float(each[rows].norm()) for each in (truth, own, gap))
        errors = torch.stack([gap[rows], stored[rows]])
        if dtype == torch.float64:
            ratio = errors.norm(dim=2) / ((WIDE + tolerance) * terms[rows]).clamp(min=1e-300)
        else:
            once = block.roundoff * math.sqrt((float(squares[rows].sum()) + scale**2) / 3)
            loss = max(lost, once, _underflow(wide, dtype) * _samples(block) ** 0.5)
            ratio = errors.flatten(1).norm(dim=1) / (OWN * loss + tolerance * terms[rows].norm()).clamp(min=1e-300)
        top = float(ratio.max())
        worst = max(worst, top if math.isfinite(top) else math.inf)
        if size <= 1.0 or not measured:
            errs = (("float64", wrong), ("stored", float(errors[1].norm())), ("original_stored", lost))
            measured = {name: error / max(scale, 1e-300) for name, error in errs}
    return Agreement(worst <= 1.0, worst, measured)


def _samples(block: Block) -> int:  # of each size; many outputs make up for few inputs
    return 48 if block.outputs < 64 else 16


def _inputs(
    block: Block, domain: Domain | None, size: float, generator: torch.Generator
) -> tuple[Tensor, Tensor] | None:
    """(samples, d) inputs of a size, or of a smaller one where the block overflows, and its outputs on them."""

    def draw(size: float) -> tuple[Tensor, Tensor]:
        if domain is not None:
            x = domain.sample(_samples(block), generator, size)
        else:
            x = size * torch.randn(_samples(block), block.inputs, generator=generator, dtype=torch.float64)
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


def _terms(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows,) the sizes of all that a block in float64 adds up, and the squares of what its outputs are sums of."""

    def linear(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        shift: Tensor | float = 0.0 if bias is None else bias
        return x @ weight.mT + shift, x.abs() @ weight.abs().mT + (0.0 if bias is None else bias.abs())

    value, size = linear(block.up, block.up_bias)
    zero = abs(block.phi.at_zero) if math.isfinite(block.phi.at_zero) else 0.0
    if block.gate is not None:
        gate, wide = linear(block.gate, block.gate_bias)
        last = block.phi.function(gate) * value
        hidden = (wide + zero + block.phi.function(gate).abs()) * size
    else:
        last = block.phi.function(value)
        hidden = size ** (2 if block.phi.family == "power" else 1) + zero + last.abs()
    const = x.new_zeros(1) if block.down_bias is None else block.down_bias
    total = hidden @ block.down.abs().mT + x.abs() @ block.matrix.abs().mT + const.abs()
    squares = last.square() @ block.down.square().sum(0) + x.square() @ block.matrix.square().sum(0)
    return total.norm(dim=1), squares + const.square().sum()


def linear_gap(block: Block, other: Block, domain: Domain | None = None) -> tuple[Tensor, Tensor]:
    """The linear map between a block of class O and a replacement, and the skip, as far as a norm lets them through.

    Equal blocks have the same A + (c / 2) W_down W_up. On a domain a ReLU-like unit whose kink misses it has the slope
    of its side, 1 or c - 1, in place of c / 2.
    """
    half = float(block.phi.odd or 0) / 2
    maps = []
    for each in (block, other):
        up, down = each.up.detach().double(), half * each.down.detach().double()
        if domain is not None and block.phi.homogeneous and block.phi.family == "odd-linear":
            bias = up.new_zeros(len(up)) if each.up_bias is None else each.up_bias.detach().to(up)
            down = down * (1 + (1 - half) / half * domain.on(up.device).side(up, bias))
        maps.append(down @ up)
    skip = block.matrix
    return _hidden_shift(block, (skip + maps[0] - maps[1]).mT).mT, _hidden_shift(block, skip.mT).mT


def makes_up(block: Block, left: Tensor, skip: Tensor, tolerance: float = 0.0) -> bool:
    """Whether a linear gap is rounding of the units, and a small share of the skip in every row, column and direction.

    In a coarse dtype the outputs would not show that a skip was dropped: beside large weights it is within their
    rounding. Nor would all rows together show that one of them was, beside a skip that is larger elsewhere.
    """
    half, down, up = abs(float(block.phi.odd or 0)) / 2, block.down.detach().double(), block.up.detach().double()
    outputs = half * (down.square() @ up.square().sum(1)).sqrt()
    inputs = half * (down.square().sum(0) @ up.square()).sqrt()
    if "post" in block.norms:  # a LayerNorm takes the mean of all outputs from each
        outputs = torch.hypot(outputs, outputs.norm() / len(outputs))
    for dim, units in ((1, outputs), (0, inputs)):
        share = skip.norm(dim=dim)
        bulk = torch.hypot(units, share)
        rounding = ROUNDINGS * block.roundoff * bulk
        allowed = torch.where(share > 1e-12 * bulk, rounding.minimum(SHARE * share), rounding) + 1e-12 * bulk
        slack = 1e-15 * bulk.norm() + tolerance * (skip.norm() + half * down.norm() * up.norm())
        if not bool((left.norm(dim=dim) <= allowed + slack).all()):
            return False
    return bool(tolerance) or _keeps_directions(left, skip)


def _keeps_directions(left: Tensor, skip: Tensor) -> bool:
    """Whether the gap is a small share of the skip along every direction of its inputs and outputs, not axes alone."""
    diagonal = skip.diagonal()
    if len(skip) == skip.shape[1] and torch.count_nonzero(skip) == torch.count_nonzero(diagonal):
        inverse = torch.where(diagonal != 0, 1 / diagonal, 0.0)
        shares = left * inverse, inverse[:, None] * left
    elif min(skip.shape) <= DECOMPOSED:
        inverse = torch.linalg.pinv(skip, rtol=1e-12)
        shares = left @ inverse, inverse @ left
    else:
        return True
    return all(_largest(share) <= 4 * SHARE for share in shares)


def _largest(matrix: Tensor) -> float:
    """The largest singular value, by power iteration; the Frobenius norm where that is small enough."""
    bound = float(matrix.norm())
    if bound <= 4 * SHARE:
        return bound
    vector = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0), dtype=matrix.dtype).to(matrix)
    for _ in range(32):
        vector = matrix.T @ (matrix @ (vector / vector.norm().clamp_min(1e-300)))
    return float((matrix @ (vector / vector.norm().clamp_min(1e-300))).norm())
