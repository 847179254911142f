"""Attention by head: its entropy, the self-attention mass, and the condition number of its matrix.

    entropy = mean over queries of -sum_k p_k log p_k        (0: one key each; log(keys): uniform)
    self-attention mass = mean over tokens of p_tt           (1: tokens attend only to themselves; 1 / keys: uniform)
    condition = sigma_max / sigma_min of the matrix p        (near-uniform attention is close to rank one)

for probabilities p (..., heads, queries, keys) after the softmax. Without a skip, the conditioning of the sub-layer's
Jacobian depends on p and W_V W_O: "Cutting the Skip: Training Residual-Free Transformers", arXiv 2510.00345.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip.errors import BadInput
from unskip.measures._input import floats


def attention_entropy(p: Tensor) -> Tensor:
    """The entropy of each head in nats, (heads,), the mean over queries and leading axes."""
    wide = _probabilities("attention_entropy", p)
    return _by_head(torch.special.entr(wide).sum(-1).mean(-1)).mean(0)  # entr(0) = 0


def self_attention_mass(p: Tensor) -> Tensor:
    """The attention of tokens to themselves in each head, (heads,), the mean over tokens and samples."""
    wide = _probabilities("self_attention_mass", p)
    if wide.shape[-1] != wide.shape[-2]:
        raise BadInput(
            f"self_attention_mass: queries and keys must be the same tokens, got {wide.shape[-2]} queries and "
            f"{wide.shape[-1]} keys; cross-attention and cached keys have no diagonal"
        )
    return _by_head(wide.diagonal(dim1=-2, dim2=-1).mean(-1)).mean(0)


def attention_condition(p: Tensor) -> Tensor:
    """The condition number of each head's p, (heads,), the median over leading axes; inf if numerically singular."""
    _probabilities("attention_condition", p)
    return _by_head(condition(p)).median(0).values


def condition(matrices: Tensor) -> Tensor:
    """sigma_max / sigma_min of matrices (..., rows, columns), over the min(rows, columns) singular values.

    inf if sigma_min is within the rounding error of the matrix' dtype, eps |A|_F; nan for a zero matrix.
    """
    wide = floats("condition", "matrices", matrices, "(..., rows, columns)", 2)
    sigma = torch.linalg.svdvals(wide)
    rounding = torch.finfo(matrices.dtype).eps * wide.flatten(-2).norm(dim=-1)
    ratio = sigma[..., 0] / torch.where(sigma[..., -1] > rounding, sigma[..., -1], 0.0)
    return torch.where(sigma[..., 0] > 0, ratio, math.nan)


def value_output_condition(value: Tensor, out: Tensor) -> Tensor:
    """The condition number of W_O W_V, from the weights of nn.Linear: value (inner, dim) and out (dim, inner).

    All heads together are one (dim, dim) map. If inner < dim it is singular by construction, so only the largest
    `inner` singular values count.
    """
    wide_value = floats("value_output_condition", "value", value, "(inner, dim)", 2, 2)
    wide_out = floats("value_output_condition", "out", out, "(dim, inner)", 2, 2)
    if wide_out.shape[1] != wide_value.shape[0]:
        raise BadInput(
            f"value_output_condition: out {tuple(out.shape)} does not match value {tuple(value.shape)}; pass (inner, "
            "dim) and (dim, inner), with shared key-value heads repeated"
        )
    sigma = torch.linalg.svdvals(wide_out @ wide_value)
    last = min(len(sigma), wide_value.shape[0]) - 1
    rounding = torch.finfo(torch.promote_types(value.dtype, out.dtype)).eps * sigma.norm()
    ratio = sigma[0] / torch.where(sigma[last] > rounding, sigma[last], 0.0)
    return torch.where(sigma[0] > 0, ratio, math.nan)


def _by_head(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])  # (samples, heads)


def _probabilities(who: str, p: Tensor) -> Tensor:
    wide = floats(who, "p", p, "(..., heads, queries, keys)", 3)
    tolerance = 1e-3 if p.dtype in (torch.float32, torch.float64) else 5e-2
    wrong = ((wide.sum(-1) - 1).abs() > tolerance) | (wide < 0).any(-1)
    if bool(wrong.any()):
        row = tuple(wrong.nonzero()[0].tolist())
        raise BadInput(
            f"{who}: p must be probabilities over its last axis; row {row} sums to {float(wide[row].sum()):.4g}, with "
            f"minimum {float(wide[row].min()):.3g}; pass attention after the softmax, without masked-out queries"
        )
    return wide
