"""The question that is left once the norms are taken care of: a plain block on a simple domain.

A norm after the sum sees its input only up to a shift (LayerNorm, eps > 0) or exactly (RMSNorm, eps > 0), so

    LN(F(x)) = LN(G(x))  for all x    <=>    P F(x) = P G(x),  P = I - 1 1^T / d.

A block that reads what a norm gives has x = beta + B s with s in an open ball of radius sqrt(d), B = diag(gamma) Q and
Q a basis of the vectors that sum to zero (all of R^d for RMSNorm). What cannot be carried over is said as a caveat:
with it an `impossible` of the reduced question says nothing about the block.

The search and the check of a certificate each build their own `Problem`: the check takes the basis from the
certificate and tests it, the search computes one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._domain import Domain
from unskip.absorption._norm import Norm

EPS = 2.0**-53
SHARE = 0.05  # of the skip, that a replacement may leave over at most
Biases = Literal["as-is", "allowed", "none"]


@dataclass(frozen=True, eq=False)
class Problem:
    """A x + W_down phi(W_up x + b) + const on R^n or on a domain, in float64. `skip` is (o, n), `up` (h, n)."""

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
    domain: Domain | None  # in the coordinates of `up`
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
        return self.domain is not None and not self.block.phi.analytic

    @property
    def bend(self) -> float:
        """How far from 0 the activation still bends, where it is not analytic: 0 for ReLU, 3 for HardSwish."""
        return max(self.block.phi.kinks)

    @property
    def one_each(self) -> bool:
        """Whether the replacement may have units that are affine on the domain: they need their biases."""
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
    def bulk(self) -> float:
        """What rounding of the linear map is relative to: the sizes of the skip and of all units together."""
        lengths = self.long_up if self.output_bias else torch.hypot(self.long_up, self.long_bias)
        size = self.long_skip if self.output_bias else math.hypot(self.long_skip, float(self.const.norm()))
        return math.hypot(abs(self.odd) * float((self.long_down * lengths).norm()), size)

    def near(self, roundoff: float, bulk: float | None = None) -> float:
        """How far from the skip counts as rounding of weights with this roundoff: never more than a small share."""
        most = min(4 * roundoff * (self.bulk if bulk is None else bulk), min(SHARE, math.sqrt(roundoff)) * self.size)
        return max(most, 1e-12 * self.size)

    @cached_property
    def tolerance(self) -> float:
        """What an obstruction has to exceed. It depends on the numbers that the weights are, not on their dtype."""
        return self.near(self.block.grain)

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
        """(h,) by how much a relative rounding of each row, with its bias, has grown in the quotient."""
        if self.basis is None:
            return torch.ones_like(self.bias)
        before, now = torch.hypot(self.long_up, self.long_bias), torch.hypot(self.lengths, self.bias)
        return (before / now.clamp(min=torch.finfo(now.dtype).tiny)).clamp(min=1.0)

    def parallel_rows(self) -> int:
        """The most rows that share a direction."""
        unit = self.up[self.lengths > 0] / self.lengths[self.lengths > 0, None]
        counts = [int(((part @ unit.mT).abs() > 1 - 1e-6).sum(1).max()) for part in unit.split(1024) if len(part)]
        return max(counts, default=0)

    def with_constant(self) -> Problem:
        """The same with output biases allowed: what is impossible then is impossible without them too."""
        return self if self.output_bias else replace(self, output_bias=True)


def allowed(block: Block, biases: Biases) -> tuple[bool, bool]:
    """Whether the replacement may have hidden biases, and output biases."""
    if biases == "as-is":
        return block.up_bias is not None or block.gate_bias is not None, block.down_bias is not None
    return (True, True) if biases == "allowed" else (False, False)


def reduce(
    block: Block, width: int, biases: Biases, domain: Domain | None = None, basis: Tensor | None = None
) -> Problem:
    """The problem behind a block whose norms stand after the sum or before the block, or that has none.

    `basis` is that of a certificate which is being checked.
    """
    norms = block.norms
    up, down, skip = block.up.detach().double(), block.down.detach().double(), block.matrix
    hidden_bias, output_bias = allowed(block, biases)
    bias = up.new_zeros(len(up)) if block.up_bias is None else block.up_bias.detach().to(up)
    const = up.new_zeros(len(down)) if block.down_bias is None else block.down_bias.detach().to(up)
    caveats: list[str] = []
    offset = None
    domain = None if domain is None else domain.on(up.device)
    long_skip, long_up, long_bias, long_down = float(skip.norm()), up.norm(dim=1), bias.abs(), down.norm(dim=0)
    if "input" in norms:
        norm = norms["input"]
        gain = up.new_ones(block.inputs) if norm.gain is None else norm.gain.detach().to(up)
        offset = up.new_zeros(block.inputs) if norm.bias is None else norm.bias.detach().to(up)
        if norm.kind == "other":
            caveats.append("what the norm before the block gives is not known")
        if not norm.eps:
            caveats.append("with eps = 0 the inputs lie on a sphere, which has no interior")
        if basis is None:
            basis = _basis(norm, gain)
        elif not _is_basis(basis, norm, gain, ball=not block.phi.analytic):
            caveats.append("the basis of the certificate does not fit the norm")
        long_skip, long_up = float((skip * gain).norm()), (up * gain).norm(dim=1)
        long_bias = torch.hypot(long_bias, (up * offset).norm(dim=1))
        size = up.norm(dim=1) * basis.norm()
        bias, const = bias + up @ offset, const + skip @ offset
        skip, up = skip @ basis, up @ basis
        up[up.norm(dim=1) <= 64 * block.inputs * EPS * size] = 0  # u ~ 1 / gamma sees nothing of the input
        radius = math.sqrt(block.inputs)
        zero = up.new_zeros(up.shape[1])
        domain = Domain(f"what the {norm.kind} before the block gives (an open ball)", None, None, zero, zero + radius)
    else:
        basis = None
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
    # Without any bias there is no constant to make up, unless a unit that sees nothing gives one.
    still = bool(bias.any()) or bool(const.any()) or (block.phi.at_zero != 0 and not bool(up.any(dim=1).all()))
    return Problem(
        block=block,
        width=width,
        hidden_bias=hidden_bias,
        output_bias=output_bias or not still,
        drop_constant=not output_bias,
        skip=skip,
        up=up,
        bias=bias,
        down=down,
        const=const,
        domain=domain,
        caveat="; ".join(caveats) or None,
        basis=basis,
        offset=offset,
        long_skip=long_skip,
        long_up=long_up,
        long_bias=long_bias,
        long_down=long_down,
    )


def _basis(norm: Norm, gain: Tensor) -> Tensor:
    """The directions (d, n) of what a norm gives."""
    d = len(gain)
    basis = torch.diag(gain)
    if norm.kind == "layernorm":  # orthonormal, each sums to zero: a reflection that takes 1 to an axis, without it
        mirror = torch.full_like(gain, d**-0.5)
        mirror[0] += 1.0
        flip = torch.eye(d, dtype=gain.dtype, device=gain.device) - 2 * torch.outer(mirror, mirror) / (mirror @ mirror)
        basis = basis @ flip[:, 1:]
    if bool((gain == 0).any()):  # fewer directions than coordinates
        left, values, _ = torch.linalg.svd(basis, full_matrices=False)
        keep = values > 1e-12 * values.max()
        basis = left[:, keep] * values[keep]
        basis[gain == 0] = 0
    return basis


def _is_basis(basis: Tensor, norm: Norm, gain: Tensor, ball: bool) -> bool:
    """Whether offset + basis s, |s| < sqrt(d), are outputs of the norm; for analytic units the directions do."""
    inner = torch.where(gain[:, None] != 0, basis / gain[:, None], 0.0)
    if bool(basis[gain == 0].any()):
        return False
    hidden = int((gain == 0).sum()) if norm.kind == "layernorm" else 0
    # Directions that sum to zero, unless hidden channels make up the sum.
    sums = inner.sum(0)
    if norm.kind == "layernorm" and not hidden and bool((sums.abs() > 1e-9 * (1 + inner.abs().sum(0))).any()):
        return False
    if not ball or not basis.numel():
        return True
    square = inner.mT @ inner
    if hidden:
        square = square + torch.outer(sums, sums) / hidden
    if float(square.abs().sum(1).max()) <= 1 + 1e-9:
        return True
    return float(torch.linalg.eigvalsh(square)[-1]) <= 1 + 1e-9
