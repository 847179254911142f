"""Similarity of two layers by linear centred kernel alignment (CKA), and of the tokens of a sample by their cosine.

    CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)),   K = X X^T,   L = Y Y^T

Kornblith et al. 2019, "Similarity of Neural Network Representations Revisited". The plain estimate of HSIC,
|Y^T X|_F^2 of centred features, is biased upwards if there are more features than samples. This module uses the
unbiased estimate (Song et al. 2012; for CKA, Nguyen, Raghu & Kornblith 2021), which leaves out the diagonals of K and L
and can be slightly negative. It is computed from (dim, dim) products, without the (samples, samples) kernels.

    token cosine = mean over pairs of different tokens of <x_i, x_j> / (|x_i| |x_j|)

It approaches 1 under rank collapse (arXiv 2103.03404), which is typical for attention without skips.
"""

from __future__ import annotations

import math

from torch import Tensor

from unskip.errors import BadInput
from unskip.measures._input import centred, floats, same_rows


def cka(x: Tensor, y: Tensor) -> float:
    """Unbiased linear CKA between x (samples, dim) and y (samples, other dim); nan if either does not vary."""
    wide_x, wide_y = floats("cka", "x", x, "(samples, dim)", 2, 2), floats("cka", "y", y, "(samples, dim)", 2, 2)
    same_rows("cka", wide_x, wide_y)
    if len(x) < 4:
        raise BadInput(f"cka: the unbiased estimate needs 4 samples or more, got {len(x)}")
    # CKA does not depend on means or scale; removing both first keeps precision.
    a, b = _scaled(centred(wide_x, x.dtype)), _scaled(centred(wide_y, y.dtype))
    product = _hsic(a, a) * _hsic(b, b)
    return _hsic(a, b) / math.sqrt(product) if product > 0 else math.nan


def token_cosine(x: Tensor) -> float:
    """The mean cosine between different tokens of a sample, x (samples, tokens, dim); nan if any token is zero."""
    unit = floats("token_cosine", "x", x, "(samples, tokens, dim)", 3, 3)
    count = unit.shape[1]
    if count < 2:
        raise BadInput("token_cosine: samples have only one token; at least two are needed")
    unit = unit / unit.norm(dim=-1, keepdim=True)
    # |sum of unit vectors|^2 counts every pair twice, and every token with itself once.
    return float((unit.sum(1).square().sum(-1) - count).mean() / (count * (count - 1)))


def _scaled(x: Tensor) -> Tensor:
    norm = x.norm() / math.sqrt(len(x))
    return x / norm if norm > 0 else x


def _hsic(x: Tensor, y: Tensor) -> float:
    """HSIC_1 of Song et al., times samples * (samples - 3)."""
    n = len(x)
    diagonal_x, diagonal_y = x.square().sum(1), y.square().sum(1)
    rows_x, rows_y = x @ x.sum(0) - diagonal_x, y @ y.sum(0) - diagonal_y  # row sums of K and L without the diagonals
    trace = (x.mT @ y).square().sum() - diagonal_x @ diagonal_y
    return float(trace + rows_x.sum() * rows_y.sum() / ((n - 1) * (n - 2)) - 2 * (rows_x @ rows_y) / (n - 2))
