"""How well activations survive rounding to few bits: excess kurtosis and the signal to quantisation noise ratio.

    excess kurtosis = m_4 / m_2^2 - 3, of central moments     (0: Gaussian; large: few entries far out)
    SQNR = 10 log10( sum x^2 / sum (x - x_q)^2 ) dB,   x_q = d round(x / d),   d = max |x| / (2^(bits - 1) - 1)

symmetric round-to-nearest with the scale that the largest entry sets. One outlier stretches the step d for all that
share the scale, so heavy tails cost bits. That residual streams have heavier tails than residual-free ones is the
argument of arXiv 2605.25880 on the quantisation of residual-free transformers.
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from unskip._checks import whole
from unskip.errors import BadInput
from unskip.measures._input import centred, floats


@overload
def excess_kurtosis(x: Tensor, per: Literal["tensor"] = "tensor") -> float: ...
@overload
def excess_kurtosis(x: Tensor, per: Literal["channel"]) -> Tensor: ...
def excess_kurtosis(x: Tensor, per: Literal["tensor", "channel"] = "tensor") -> float | Tensor:
    """m_4 / m_2^2 - 3 over all entries of x (..., dim), or (dim,) with one for each channel; nan where x is constant.

    The plain (biased) estimate, as scipy.stats.kurtosis gives by default.
    """
    if per not in ("tensor", "channel"):
        raise BadInput(f"excess_kurtosis: per must be 'tensor' or 'channel', got {per!r}")
    wide = floats("excess_kurtosis", "x", x, "(..., dim)", 1)
    away = centred(wide.reshape(-1, 1 if per == "tensor" else wide.shape[-1]), x.dtype)
    away = away / away.abs().amax(0)  # fourth powers stay in range; 0 / 0 is the nan of a constant
    each = (away**4).mean(0) / (away**2).mean(0) ** 2 - 3
    return float(each) if per == "tensor" else each


def sqnr(x: Tensor, bits: int, per: Literal["tensor", "token", "channel"] = "tensor") -> float:
    """The SQNR in dB of x (..., dim) under `bits`, with one scale for all, for each token or for each channel.

    inf where rounding changes nothing, nan for a zero tensor. All-zero tokens or channels cost nothing.
    """
    bits = whole("sqnr", "bits", bits, low=2)
    if per not in ("tensor", "token", "channel"):
        raise BadInput(f"sqnr: per must be 'tensor', 'token' or 'channel', got {per!r}")
    wide = floats("sqnr", "x", x, "(..., dim)", 1)
    wide = wide.reshape(-1, wide.shape[-1])  # (tokens, dim)
    largest = wide.abs().max()
    if largest == 0:
        return math.nan
    wide = wide / largest  # squares stay in range
    axes = {"tensor": (0, 1), "token": (1,), "channel": (0,)}[per]
    step = wide.abs().amax(axes, keepdim=True) / (2 ** (bits - 1) - 1)
    step = torch.where(step > 0, step, 1.0)
    noise = float((wide - step * (wide / step).round()).square().sum())
    # Dividing and multiplying by the step rounds; an error of that size is none.
    if noise <= wide.numel() * (4 * torch.finfo(torch.float64).eps) ** 2:
        return math.inf
    return 10 * math.log10(float(wide.square().sum()) / noise)
