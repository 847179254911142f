"""Similarity of two layers: linear centred kernel alignment (CKA) between feature matrices of the same samples.

    CKA = HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)),   K = X X^T,   L = Y Y^T

Kornblith et al. 2019, "Similarity of Neural Network Representations Revisited". The plain estimate of HSIC,
|Y^T X|_F^2 of centred features, is biased upwards where features outnumber samples. The unbiased one (Song et al. 2012;
for CKA, Nguyen, Raghu & Kornblith 2021), which is used here, leaves the diagonals of K and L out and can be slightly
negative. It is computed from (dim, dim) products, without the (samples, samples) kernels.
"""

from __future__ import annotations

import math

from torch import Tensor

from unskip.errors import BadInput
from unskip.measures._input import centred, floats, same_rows


def cka(x: Tensor, y: Tensor) -> float:
    """Unbiased linear CKA between x (samples, dim) and y (samples, other dim); nan where either does not vary."""
    wide_x, wide_y = floats("cka", "x", x, "(samples, dim)", 2, 2), floats("cka", "y", y, "(samples, dim)", 2, 2)
    same_rows("cka", wide_x, wide_y)
    if len(x) < 4:
        raise BadInput(f"cka: the unbiased estimate needs 4 samples or more, got {len(x)}")
    # It does not depend on means or scale; taking both out first keeps the digits.
    a, b = _scaled(centred(wide_x, x.dtype)), _scaled(centred(wide_y, y.dtype))
    own = _hsic(a, a) * _hsic(b, b)
    return _hsic(a, b) / math.sqrt(own) if own > 0 else math.nan


def _scaled(x: Tensor) -> Tensor:
    norm = x.norm() / math.sqrt(len(x))
    return x / norm if norm > 0 else x


def _hsic(x: Tensor, y: Tensor) -> float:
    """HSIC_1 of Song et al., times samples * (samples - 3)."""
    n = len(x)
    own_x, own_y = x.square().sum(1), y.square().sum(1)  # the diagonals, to be left out
    rows_x, rows_y = x @ x.sum(0) - own_x, y @ y.sum(0) - own_y  # K 1 and L 1 without them
    trace = (x.mT @ y).square().sum() - own_x @ own_y
    return float(trace + rows_x.sum() * rows_y.sum() / ((n - 1) * (n - 2)) - 2 * (rows_x @ rows_y) / (n - 2))
