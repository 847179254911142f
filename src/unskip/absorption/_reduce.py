"""The question that is left once the norms are taken care of: a plain block on a simple domain.

A norm after the sum sees its input only up to a shift (LayerNorm, eps > 0) or exactly (RMSNorm, eps > 0), so

    LN(F(x)) = LN(G(x))  for all x    <=>    P F(x) = P G(x),  P = I - 1 1^T / d.

A block that reads what a norm gives has x = beta + B s with s in an open ball of radius sqrt(d), B = diag(gamma) Q and
Q a basis of the vectors that sum to zero (all of R^d for RMSNorm). What cannot be carried over is said as a caveat:
with it an `impossible` of the reduced question says nothing about the block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unskip.absorption._activations import KINKS
from unskip.absorption._block import Block, Norm

EPS = 2.0**-53


@dataclass(frozen=True, eq=False)
class Problem:
    """A x + W_down phi(W_up x + b) + const on R^n or on a ball, in float64. `skip` is (o, n), `up` (h, n)."""

    block: Block
    width: int  # of the replacement
    hidden_bias: bool  # whether the replacement may have them
    output_bias: bool  # or would not need one anyway
    drop_constant: bool  # it may not have one
    skip: Tensor
    up: Tensor
    bias: Tensor
    down: Tensor
    const: Tensor
    radius: float | None
    caveat: str | None
    basis: Tensor | None  # (d, n): x = offset + basis s
    offset: Tensor | None
    # Norms before the quotients, which rounding is relative to: what a quotient takes away may have been most of it.
    long_skip: float
    long_up: Tensor  # (h,)
    long_bias: Tensor  # (h,)
    long_down: Tensor  # (h,)

    @property
    def odd(self) -> float:
        odd = self.block.phi.odd
        return float(odd) if odd is not None else math.nan

    @property
    def bounded(self) -> bool:
        """Whether units can be affine on the domain: their kink misses it, and one alone gives any rank-one."""
        return self.radius is not None and not self.block.phi.analytic

    @property
    def bend(self) -> float:
        """How far from 0 the activation still bends, where it is not analytic: 0 for ReLU, 3 for HardSwish."""
        return max(KINKS.get(self.block.phi.name, (0.0,)))

    @property
    def one_each(self) -> bool:
        """Whether the replacement may have such units: they need their biases."""
        return self.bounded and self.hidden_bias and not self.drop_constant

    @property
    def target(self) -> Tensor:
        """The skip; without output biases with the constant as one more column."""
        return self.skip if self.output_bias else torch.cat([self.skip, self.const[:, None]], 1)

    @property
    def rows(self) -> Tensor:
        """The rows of the hidden layer, with the bias as one more column where the constant counts."""
        return self.up if self.output_bias else torch.cat([self.up, self.bias[:, None]], 1)

    @cached_property
    def size(self) -> float:
        """The Frobenius norm of the skip."""
        return float(self.target.norm())

    @cached_property
    def tolerance(self) -> float:
        """How far rounding of the stored weights may move the linear map, if all units were flipped."""
        lengths = self.long_up if self.output_bias else torch.hypot(self.long_up, self.long_bias)
        size = self.long_skip if self.output_bias else math.hypot(self.long_skip, float(self.const.norm()))
        bulk = math.hypot(abs(self.odd) * float((self.long_down * lengths).norm()), size)
        return max(4 * self.block.roundoff * bulk, 1e-12 * size)

    @cached_property
    def lengths(self) -> Tensor:
        """(h,) the norms of the rows."""
        return self.long_up if self.basis is None else self.up.norm(dim=1)

    @cached_property
    def columns(self) -> Tensor:
        """(h,) the norms of the columns."""
        return self.down.norm(dim=0) if "post" in self.block.norms else self.long_down

    @property
    def spread(self) -> Tensor:
        """By how much a relative rounding of each row, with its bias, has grown in the quotient; 1 without norms."""
        if self.basis is None:
            return torch.ones_like(self.bias)
        before, now = torch.hypot(self.long_up, self.long_bias), torch.hypot(self.lengths, self.bias)
        return (before / now.clamp(min=torch.finfo(now.dtype).tiny)).clamp(min=1.0)


def reduce(block: Block, width: int, hidden_bias: bool, output_bias: bool) -> Problem:
    """The problem behind a block whose norms stand after the sum or before the block, or that has none."""
    norms = block.norms
    up, down, skip = block.up.detach().double(), block.down.detach().double(), block.matrix
    h = block.width
    bias = up.new_zeros(h) if block.up_bias is None else block.up_bias.detach().to(up)
    const = up.new_zeros(len(down)) if block.down_bias is None else block.down_bias.detach().to(up)
    caveats: list[str] = []
    radius = basis = offset = None
    long_skip, long_up, long_bias, long_down = float(skip.norm()), up.norm(dim=1), bias.abs(), down.norm(dim=0)
    if "input" in norms:
        norm = norms["input"]
        basis, offset = _domain(norm, up)
        if norm.kind == "other":
            caveats.append("what the norm before the block gives is not known")
        if not norm.eps:
            caveats.append("with eps = 0 the inputs lie on a sphere, which has no interior")
        radius = math.sqrt(block.inputs)
        gain = up.new_ones(block.inputs) if norm.gain is None else norm.gain.detach().to(up)
        long_skip, long_up = float((skip * gain).norm()), (up * gain).norm(dim=1)
        long_bias = torch.hypot(long_bias, (up * offset).norm(dim=1))
        size = up.norm(dim=1) * basis.norm()
        bias = bias + up @ offset
        const = const + skip @ offset
        skip, up = skip @ basis, up @ basis
        up[up.norm(dim=1) <= 64 * block.inputs * EPS * size] = 0  # u ~ 1 / gamma sees nothing of the input
    if "post" in norms:
        norm = norms["post"]
        if norm.kind == "other":
            caveats.append("what the norm after the sum leaves of its input is not known")
        elif not norm.eps:
            caveats.append("with eps = 0 the norm after the sum also hides a scale")
        if norm.gain is not None and bool((norm.gain == 0).any()):
            caveats.append("the norm after the sum has gains that are zero and hides those channels")
        if norm.kind == "layernorm":
            size = down.norm(dim=0)
            skip, down, const = (value - value.mean(0, keepdim=True) for value in (skip, down, const))
            down[:, down.norm(dim=0) <= 64 * len(down) * EPS * size] = 0  # a column of ones is hidden
    if norms and float(skip.norm()) <= 64 * max(block.inputs, block.outputs) * EPS * long_skip:
        skip = torch.zeros_like(skip)  # the norms hide all of it
    caveat = "; ".join(caveats) or None
    # Without any bias there is no constant to make up, unless a unit that sees nothing gives one.
    still = bool(bias.any()) or bool(const.any()) or (block.phi.at_zero != 0 and not bool(up.any(dim=1).all()))
    drop, output_bias = not output_bias, output_bias or not still
    return Problem(
        block=block,
        width=width,
        hidden_bias=hidden_bias,
        output_bias=output_bias,
        drop_constant=drop,
        skip=skip,
        up=up,
        bias=bias,
        down=down,
        const=const,
        radius=radius,
        caveat=caveat,
        basis=basis,
        offset=offset,
        long_skip=long_skip,
        long_up=long_up,
        long_bias=long_bias,
        long_down=long_down,
    )


def _domain(norm: Norm, like: Tensor) -> tuple[Tensor, Tensor]:
    """What a norm gives as offset + basis s: the basis (d, n) and the offset (d,)."""
    d = like.shape[1]
    gain = like.new_ones(d) if norm.gain is None else norm.gain.detach().to(like)
    offset = like.new_zeros(d) if norm.bias is None else norm.bias.detach().to(like)
    basis = torch.diag(gain)
    if norm.kind == "layernorm":
        from scipy.linalg import helmert

        basis = basis @ torch.from_numpy(helmert(d)).mT.to(like)  # (d, d - 1): orthonormal, each sums to zero
    if bool((gain == 0).any()):  # fewer directions than coordinates
        left, values, _ = torch.linalg.svd(basis, full_matrices=False)
        keep = values > 1e-12 * values.max()
        basis = left[:, keep] * values[keep]
        basis[gain == 0] = 0
    return basis, offset
