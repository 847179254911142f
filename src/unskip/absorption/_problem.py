"""Reduces a block to a problem without norms, on all inputs or on a domain.

The output of a LayerNorm after the sum (eps > 0) determines its input up to a shift, so

    LN(F(x)) = LN(G(x))  for all x    <=>    P F(x) = P G(x),  P = I - 1 1^T / d.

The output of an RMSNorm (eps > 0) determines its input. If a norm does neither, `caveat` says why: then the block may
be `possible` although the reduced problem is `impossible`. The search and the check of a certificate each build their
own `Problem`.
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

EPS = 2.0**-53
MAX_SHARE = 0.05  # the largest share of the skip that a replacement may miss
Biases = Literal["as-is", "allowed", "none"]


@dataclass(frozen=True, eq=False)
class Problem:
    """A x + W_down phi(W_up x + b) + const on R^d or on a domain, in float64. `skip` is (o, d), `up` (h, d)."""

    block: Block
    width: int  # of the replacement
    hidden_bias: bool  # whether the replacement may have hidden biases
    output_bias: bool  # whether it may have output biases, or needs none
    no_output_bias: bool  # whether it may not have output biases
    skip: Tensor
    up: Tensor
    bias: Tensor
    down: Tensor
    const: Tensor
    domain: Domain | None
    caveat: str | None
    # Norms before the projection P. Rounding is relative to them, because P may remove most of the weights.
    raw_skip_norm: float
    raw_down_norms: Tensor  # (h,)

    @property
    def odd(self) -> float:
        odd = self.block.phi.odd
        return float(odd) if odd is not None else math.nan

    @property
    def affine_possible(self) -> bool:
        """Whether units can be affine on the domain. One such unit represents any rank-one map."""
        return self.domain is not None and self.block.phi.homogeneous

    @property
    def affine_allowed(self) -> bool:
        """Whether the replacement may have units that are affine on the domain, which need biases."""
        return self.affine_possible and self.hidden_bias and not self.no_output_bias

    @property
    def target(self) -> Tensor:
        """The skip; without output biases, with the scaled constant as one more column."""
        return self.skip if self.output_bias else torch.cat([self.skip, self.constant_scale * self.const[:, None]], 1)

    @property
    def rows(self) -> Tensor:
        """The rows of the hidden layer; without output biases, with the scaled bias as one more column."""
        return self.up if self.output_bias else torch.cat([self.up, self.constant_scale * self.bias[:, None]], 1)

    @cached_property
    def constant_scale(self) -> float:
        """The power of two that scales constants to the size of the linear maps: tiny ones matter on tiny inputs."""
        linear = math.hypot(self.raw_skip_norm, float((self.raw_down_norms * self.row_norms).norm()))
        constant = math.hypot(float(self.const.norm()), float((self.raw_down_norms * self.bias).norm()))
        return 2.0 ** round(math.log2(linear / constant)) if linear and constant else 1.0

    @cached_property
    def row_norms(self) -> Tensor:
        """(h,) the norms of the rows."""
        lengths: Tensor = self.up.norm(dim=1)
        return lengths

    @cached_property
    def column_norms(self) -> Tensor:
        """(h,) the norms of the columns."""
        return self.down.norm(dim=0) if "post" in self.block.norms else self.raw_down_norms

    @cached_property
    def skip_norm(self) -> float:
        """The Frobenius norm of the skip."""
        return float(self.target.norm())

    @cached_property
    def rank_one_norms(self) -> Tensor:
        """(h,) the norms of the rank-one terms, before the projection P."""
        return self.raw_down_norms * (
            self.row_norms if self.output_bias else torch.hypot(self.row_norms, self.constant_scale * self.bias)
        )

    @cached_property
    def rounding_scale(self) -> float:
        """The size that rounding of the linear map is relative to: the norm of the skip and all units together."""
        size = (
            self.raw_skip_norm
            if self.output_bias
            else math.hypot(self.raw_skip_norm, self.constant_scale * float(self.const.norm()))
        )
        return math.hypot(abs(self.odd) * float(self.rank_one_norms.norm()), size)

    def rounding_tolerance(self, roundoff: float, bulk: float | None = None) -> float:
        """The largest distance from the skip that counts as rounding of weights, at most a small share of the skip."""
        most = min(
            4 * roundoff * (self.rounding_scale if bulk is None else bulk),
            min(MAX_SHARE, math.sqrt(roundoff)) * self.skip_norm,
        )
        return max(most, 1e-12 * self.skip_norm)

    @cached_property
    def tolerance(self) -> float:
        """The distance that an obstruction has to exceed. It depends on the values of the weights, not on the dtype."""
        return self.rounding_tolerance(self.block.grain)

    def max_parallel_rows(self) -> int:
        """The largest number of parallel rows."""
        unit = self.up[self.row_norms > 0] / self.row_norms[self.row_norms > 0, None]
        counts = [int(((part @ unit.mT).abs() > 1 - 1e-6).sum(1).max()) for part in unit.split(1024) if len(part)]
        return max(counts, default=0)

    def with_output_bias(self) -> Problem:
        """The same problem with output biases allowed. If this is impossible, so is the problem without them."""
        return self if self.output_bias else replace(self, output_bias=True)


def singular_values(matrix: Tensor) -> list[float]:
    """The singular values, largest first. LAPACK takes several times as long for wide as for tall matrices."""
    values: list[float] = torch.linalg.svdvals(matrix if len(matrix) >= matrix.shape[1] else matrix.mT).tolist()
    return values


def allowed_biases(block: Block, biases: Biases) -> tuple[bool, bool]:
    """Whether the replacement may have hidden biases, and output biases."""
    if biases == "as-is":
        return block.up_bias is not None or block.gate_bias is not None, block.down_bias is not None
    return (True, True) if biases == "allowed" else (False, False)


def problem_of(block: Block, width: int, biases: Biases, domain: Domain | None = None) -> Problem:
    """Reduces a block to a Problem. Of its norms only one after the sum is taken into account."""
    up, down, skip = block.up.detach().double(), block.down.detach().double(), block.matrix
    hidden_bias, output_bias = allowed_biases(block, biases)
    bias = up.new_zeros(len(up)) if block.up_bias is None else block.up_bias.detach().to(up)
    const = up.new_zeros(len(down)) if block.down_bias is None else block.down_bias.detach().to(up)
    caveats: list[str] = []
    raw_skip_norm, raw_down_norms = float(skip.norm()), down.norm(dim=0)
    if "post" in block.norms:
        norm = block.norms["post"]
        if norm.kind == "other":
            caveats.append("the norm after the sum is neither a LayerNorm nor an RMSNorm")
        elif not norm.eps:
            caveats.append("with eps = 0 the norm after the sum also removes the scale of its input")
        if norm.gain is not None and bool((norm.gain == 0).any()):
            caveats.append("the norm after the sum has gains of zero, which remove those channels")
        if norm.kind == "layernorm":
            skip, down, const = (value - value.mean(0, keepdim=True) for value in (skip, down, const))
            rounding = 64 * len(down) * EPS
            down[:, down.norm(dim=0) <= rounding * raw_down_norms] = 0  # the norm removes columns of equal entries
            if float(skip.norm()) <= rounding * raw_skip_norm:
                skip = torch.zeros_like(skip)
    # Without biases there is no constant to reproduce, unless a unit with a zero row adds one.
    still = bool(bias.any()) or bool(const.any()) or (block.phi.at_zero != 0 and not bool(up.any(dim=1).all()))
    return Problem(
        block=block,
        width=width,
        hidden_bias=hidden_bias,
        output_bias=output_bias or not still,
        no_output_bias=not output_bias,
        skip=skip,
        up=up,
        bias=bias,
        down=down,
        const=const,
        domain=None if domain is None else domain.on(up.device),
        caveat="; ".join(caveats) or None,
        raw_skip_norm=raw_skip_norm,
        raw_down_norms=raw_down_norms,
    )
