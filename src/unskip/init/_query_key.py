"""Queries and keys: W_Q W_K^T ~ noise Z + identity I, Z_ij ~ N(0, 1/d), the best approximation of each head's rank.

From "Cutting the Skip: Training Residual-Free Transformers" (arXiv 2510.00345), where noise is alpha and identity beta.
The paper does not say how one matrix is split over heads; here every head has its own Z.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip.anatomy import AttentionParts
from unskip.init._draw import Draw


def query_key_(part: AttentionParts, noise: float, identity: float, draw: Draw) -> None:
    """Fills W_Q and W_K of one attention; their biases become 0."""
    groups, width, dim = part.k.shape
    share = part.heads // groups
    queries = part.q.unflatten(0, (groups, share))
    for group in range(groups):
        target = _target(draw, noise, identity, dim, share)
        left, right = factors(target, min(width, dim))  # (share * dim, rank), (dim, rank)
        if width > dim:  # rotated into the full width of the head, because rows of zeros would get no gradient
            rotation = draw.orthogonal(width, dim).float()
            left, right = left @ rotation.T, right @ rotation.T
        queries[group].copy_(left.reshape(share, dim, width).mT)
        part.k[group].copy_(right.T)
    for bias in (part.q_bias, part.k_bias):
        if bias is not None:
            bias.zero_()


def factors(target: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Left and right factors of the best approximation of a rank, of equal norm. float32 is enough for all checks."""
    u, s, v = torch.linalg.svd(target.float(), full_matrices=False)
    root = s[..., None, :rank].sqrt()
    return u[..., :rank] * root, v[..., :rank, :].mT * root


def _target(draw: Draw, noise: float, identity: float, dim: int, count: int) -> Tensor:
    """(count * dim, dim) blocks noise Z + identity I, one for each query head that shares the key."""
    blocks = [noise * draw.normal(dim, dim) / math.sqrt(dim) + identity * torch.eye(dim).double() for _ in range(count)]
    return torch.cat(blocks)
