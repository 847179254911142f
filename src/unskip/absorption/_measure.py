"""Measures how well a replacement agrees with its block: on inputs of several sizes, in float64 and as stored.

The allowed error depends on the block alone, not on the weights of the replacement. In float64 the outputs may differ
by 1e-10 of the block's own terms, the sum of |A| |x|, |W_down| (|W_up| |x| + |b|) and |b_down|; on the few inputs drawn
here by 4e-11. Stored in a coarser dtype, the error of the replacement may be 4 times the loss of the block itself in
that dtype; on the inputs drawn here 2.5 times. The loss is measured, and is at least one rounding of the output and of
each term that it sums, with the unit roundoff u:

    u / sqrt(3) * sqrt(F_k^2 + sum_j (A_kj x_j)^2 + sum_i (W_down,ki phi_i)^2 + b_down,k^2)  over inputs and outputs k.

A block whose terms cancel may lose nothing on these inputs by chance, hence the minimum. u / sqrt(3) is the standard
deviation of one rounding, and independent roundings add up in squares: in bfloat16 a block of 3,072 units does lose
that much, which is 26 times less than u times the sum of the sizes of its terms.

The inputs are Gaussian, and some lie along the worst directions. If a number in the block overflows on an input, a
smaller one is used; the replacement may not overflow where the block does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unskip.absorption._block import Block
from unskip.absorption._domain import Domain
from unskip.absorption._problem import MAX_SHARE

ROUNDINGS = 8  # the largest gap, in roundings of the units' terms, added in squares
MAX_DECOMPOSED = 2048  # the largest skip that is decomposed if it is not diagonal
SIZES = tuple(10.0**power for power in range(-6, 6))  # of inputs; on a domain in float64 from the fifth on
OVERFLOW_MARGIN = 1.03  # an input is accepted if nothing in the block overflows at this multiple of it
SHRINK = 0.84  # factor on an input that overflows
DIRECTIONS = 2  # worst directions to measure, for each of PRODUCT_SHARES
# Shares of the rounding of products that may contribute to the loss.
PRODUCT_SHARES = {torch.float32: (0.0, 0.03, 0.1, 0.3, 1.0), torch.float64: (1.0,)}
FLOAT64_TOLERANCE = 4e-11  # of the block's own terms in float64; keeps the error on other inputs below 1e-10
LOSS_FACTOR = 2.5  # times the loss of the block; keeps the factor on other inputs below 4
SPLIT_TOLERANCE = 1e-6  # of the block's terms: additional error of split rows in `widen` and modules


@dataclass(frozen=True)
class Agreement:
    """Whether a replacement agrees, the worst ratio of its error to the allowed error, and measured errors.

    The errors are measured on inputs of size 1, or on smaller ones if the block overflows there.
    """

    holds: bool
    worst: float
    measured: dict[str, float]  # relative to the outputs: "float64", "stored", and "original_stored" of the block


def compare_outputs(
    block: Block,
    other: Block,
    domain: Domain | None = None,
    seed: int = 0,
    tolerance: float = 0.0,
    linear: Tensor | None = None,
) -> Agreement:
    """Compares the outputs, before any norm after the sum. `tolerance` is an additional error, relative to the terms.

    `linear` is the map that `linear_gap` returns, if the caller has it.
    """
    bare, made, dtype = block.bare(), other.bare(), block.dtype
    wide, wide_made = bare.double(), made.double()
    ways = _worst_directions(block, other, domain, linear)
    sizes = _sizes(wide) if domain is None else SIZES if dtype != torch.float64 else SIZES[4:]
    counts = torch.tensor([_samples(block), *[_along(block)] * len(ways)]).repeat(len(sizes))
    low = _inputs(bare, domain, sizes, ways, seed)
    if low is None:  # nothing to measure: the block overflows on all inputs
        return Agreement(False, 0.0, {})
    exact = low.double()
    truth = _hidden_shift(block, wide(exact))
    gap = _hidden_shift(block, wide_made(exact)) - truth
    stored = gap if dtype == torch.float64 else _hidden_shift(block, made(low).double()) - truth
    own = _hidden_shift(block, bare(low).double()) - truth
    group = torch.arange(len(counts)).repeat_interleave(counts).to(low.device)

    def together(rows: Tensor) -> Tensor:  # (rows,) squares to one norm per group
        return rows.new_zeros(len(counts)).index_add_(0, group, rows).sqrt()

    scale, lost, wrong, off = (together(each.square().sum(1)) for each in (truth, own, gap, stored))
    if dtype == torch.float64:
        ratio = gap.norm(dim=1) / ((FLOAT64_TOLERANCE + tolerance) * _terms(wide, exact)).clamp(min=1e-300)
    else:
        once = block.roundoff / math.sqrt(3) * together(_squares(wide, exact) + truth.square().sum(1))
        least = _underflow(wide, dtype) * counts.to(once).sqrt()
        allowed = LOSS_FACTOR * torch.stack([lost, once, least]).amax(0)
        if tolerance:
            allowed += tolerance * together(_terms(wide, exact).square())
        ratio = torch.maximum(wrong, off) / allowed.clamp(min=1e-300)
    top = float(ratio.max())
    top = top if math.isfinite(top) else math.inf
    at = (1 + len(ways)) * max(i for i, size in enumerate(sizes) if size <= 1.0 or not i)
    errs = (("float64", wrong), ("stored", off), ("original_stored", lost))
    return Agreement(top <= 1.0, top, {name: float(error[at]) / max(float(scale[at]), 1e-300) for name, error in errs})


def _sizes(block: Block) -> tuple[float, ...]:
    """Sizes of inputs for a block in float64. Sizes around its own nonlinear range are added if that is far from 1."""
    bias = torch.zeros_like(block.up[:, 0]) if block.up_bias is None else block.up_bias.abs()
    bend = (bias if block.phi.homogeneous else bias.clamp(min=1.0)) / block.up.norm(dim=1)
    bend = bend[torch.isfinite(bend) & (bend > 0)]
    own = float(bend.median()) if len(bend) else 1.0
    return SIZES if 0.01 <= own <= 100 else (*SIZES, *(own * size for size in SIZES))


def _worst_directions(block: Block, other: Block, domain: Domain | None, linear: Tensor | None) -> Tensor:
    """(ways, d) directions x in which the error of the replacement is expected to be largest relative to the loss.

    With E the linear gap between the two, u the unit roundoff, M x the terms A_j x_j and |v_i| u_i.x of the block, and
    M' x those of the replacement, they maximise |(E / u, M') x| / |M x|, which is large along directions that are
    nearly orthogonal to the rows. If products are not accumulated in a finer dtype, the terms |v_i| u_ij x_j contribute
    as well, with a share that depends on the kernel.
    """
    d, products = block.inputs, PRODUCT_SHARES.get(block.dtype, (0.0,))
    if block.phi.odd is None or block.gated or d == 1:
        return block.up.new_zeros(0, d, dtype=torch.float64)
    linear = linear_gap(block, other, domain)[0] if linear is None else linear
    rows, made = (each.down.double().norm(dim=0)[:, None] * each.up.double() for each in (block, other))
    size = torch.hypot(block.matrix.norm(dim=0), rows.norm(dim=0))
    size = torch.where(size > 0, size, 1e-9 * size.max().clamp(min=1e-300))  # columns are scaled to 1
    theirs = torch.cat([linear / block.roundoff, made]) / size
    if d > MAX_DECOMPOSED:  # axes only
        return torch.eye(d).to(size)[theirs.norm(dim=0).topk(DIRECTIONS).indices]
    square, gram, skip = theirs.mT @ theirs, (rows / size).mT @ (rows / size), block.matrix.norm(dim=0) / size
    start = torch.randn(d, min(DIRECTIONS, d), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(size)
    # Directions that are orthogonal to all rows, if there are any: products that cancel there do not round.
    ways = [torch.linalg.svd(block.up.double())[2][-2 * DIRECTIONS :]] if d <= 64 else []
    for part in products:
        mine = gram + torch.diag(skip.square() + part**2 * gram.diagonal() + 4e-15 * d)
        factor, basis = torch.linalg.cholesky(mine), start
        for _ in range(16):
            basis = torch.linalg.qr(torch.cholesky_solve(square @ basis, factor))[0]
        ways.append((basis / size[:, None]).mT)
    return F.normalize(torch.cat(ways), eps=1e-300)


def _samples(block: Block) -> int:  # of each size; with many outputs fewer inputs are enough
    return 48 if block.outputs < 64 else 16


def _along(block: Block) -> int:  # of each size along a direction
    return 24 if block.outputs < 64 else 4


def _inputs(block: Block, domain: Domain | None, sizes: Sequence[float], ways: Tensor, seed: int) -> Tensor | None:
    """(rows, d) inputs of every size: Gaussian ones (on a domain uniform ones), then some along each of the ways.

    Each is scaled down until no number in the block overflows. Returns None if that fails.
    """
    place, generator = domain or Domain.ball(torch.zeros(block.inputs), 1e90), torch.Generator().manual_seed(seed)
    center, drawn, samples = place.center.to(block.up.device), list[Tensor](), _samples(block)
    for size in sizes:
        if domain is None:
            drawn.append(size * torch.randn(samples, block.inputs, generator=generator, dtype=torch.float64))
        else:
            drawn.append(domain.sample(samples, generator, size) - domain.center)
        drawn += [place.along(way, _along(block), generator, size) for way in ways]
    away = torch.cat([each.to(center) for each in drawn])
    left = torch.arange(len(away), device=away.device)
    for _ in range(300):
        left = left[~_finite(block, (center + OVERFLOW_MARGIN * away[left]).to(block.dtype))]
        if not len(left):
            return (center + away).to(block.dtype)
        away[left] *= SHRINK
    return None


def _finite(block: Block, x: Tensor) -> Tensor:
    """(rows,) whether no number in the block overflows. A preactivation of -inf may not show in the output."""
    linear = [(block.up, block.up_bias), (block.gate, block.gate_bias)]
    parts = [F.linear(x, w.to(x), None if b is None else b.to(x)) for w, b in linear if w is not None]
    hidden = block.hidden(x)
    out = F.linear(hidden, block.down.to(x), None if block.down_bias is None else block.down_bias.to(x))
    parts += [x, hidden, out, out + x @ block.matrix.to(x).mT]
    return torch.stack([torch.isfinite(part).all(1) for part in parts]).all(0)


def _underflow(block: Block, dtype: torch.dtype) -> float:
    """The loss of a block in float64 if its hidden activations are rounded to the subnormal numbers of a dtype."""
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return least * (1 + float(block.down.abs().sum(1).norm()))


def _hidden_shift(block: Block, values: Tensor) -> Tensor:
    """Outputs (..., d_out), minus their mean if a LayerNorm after the sum removes it."""
    norm = block.norms.get("post")
    return values - values.mean(-1, keepdim=True) if norm is not None and norm.kind == "layernorm" else values


def _terms(block: Block, x: Tensor) -> Tensor:
    """(rows,) the sum of the sizes of all terms of a block in float64."""

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
    const = x.new_zeros(1) if block.down_bias is None else block.down_bias.abs()
    total: Tensor = (hidden @ block.down.abs().mT + x.abs() @ block.matrix.abs().mT + const).norm(dim=1)
    return total


def _squares(block: Block, x: Tensor) -> Tensor:
    """(rows,) the sum of the squared terms of the outputs of a block in float64."""
    const = x.new_zeros(1) if block.down_bias is None else block.down_bias
    squares = block.hidden(x).square() @ block.down.square().sum(0) + x.square() @ block.matrix.square().sum(0)
    return squares + const.square().sum()


def linear_gap(block: Block, other: Block, domain: Domain | None = None) -> tuple[Tensor, Tensor]:
    """The difference of the linear parts of a block of class O and a replacement, and the skip.

    Equal blocks have the same A + (c / 2) W_down W_up. A ReLU-like unit whose hinge misses the domain has slope 1 or
    c - 1 there instead of c / 2. The part that a LayerNorm after the sum removes is left out.
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


def gap_is_negligible(block: Block, left: Tensor, skip: Tensor, tolerance: float = 0.0) -> bool:
    """Whether a linear gap is within rounding, and a small share of the skip in every row, column and direction.

    In a coarse dtype a skip that was dropped may be within the rounding of large weights, so that the outputs do not
    show it. A row of the skip that was dropped may not show in a norm over all rows if the others are larger.
    """
    half, down, up = abs(float(block.phi.odd or 0)) / 2, block.down.detach().double(), block.up.detach().double()
    outputs = half * (down.square() @ up.square().sum(1)).sqrt()
    inputs = half * (down.square().sum(0) @ up.square()).sqrt()
    if "post" in block.norms:  # a LayerNorm subtracts the mean of all outputs from each
        outputs = torch.hypot(outputs, outputs.norm() / len(outputs))
    for dim, units in ((1, outputs), (0, inputs)):
        share = skip.norm(dim=dim)
        bulk = torch.hypot(units, share)
        rounding = ROUNDINGS * block.roundoff * bulk
        allowed = torch.where(share > 1e-12 * bulk, rounding.minimum(MAX_SHARE * share), rounding) + 1e-12 * bulk
        slack = 1e-15 * bulk.norm() + tolerance * (skip.norm() + half * down.norm() * up.norm())
        if not bool((left.norm(dim=dim) <= allowed + slack).all()):
            return False
    return bool(tolerance) or _keeps_directions(left, skip)


def _keeps_directions(left: Tensor, skip: Tensor) -> bool:
    """Whether the gap is a small share of the skip along every direction of its inputs and outputs."""
    diagonal = skip.diagonal()
    if len(skip) == skip.shape[1] and torch.count_nonzero(skip) == torch.count_nonzero(diagonal):
        inverse = torch.where(diagonal != 0, 1 / diagonal, 0.0)
        shares = left * inverse, inverse[:, None] * left
    elif min(skip.shape) <= MAX_DECOMPOSED:
        inverse = torch.linalg.pinv(skip, rtol=1e-12)
        shares = left @ inverse, inverse @ left
    else:
        return True
    return all(_largest(share) <= 4 * MAX_SHARE for share in shares)


def _largest(matrix: Tensor) -> float:
    """The largest singular value, by power iteration; the Frobenius norm if that is small enough."""
    bound = float(matrix.norm())
    if bound <= 4 * MAX_SHARE:
        return bound
    vector = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0), dtype=matrix.dtype).to(matrix)
    for _ in range(32):
        vector = matrix.T @ (matrix @ (vector / vector.norm().clamp_min(1e-300)))
    return float((matrix @ (vector / vector.norm().clamp_min(1e-300))).norm())
