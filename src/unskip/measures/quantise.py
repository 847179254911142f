"""How well activations survive rounding to few bits: excess kurtosis, outlier channels, signal to quantisation noise.

    excess kurtosis = m_4 / m_2^2 - 3, of central moments     (0: Gaussian; large: few entries far out)
    outlier channels = max_c rms(x_c) / median_c rms(x_c)     (1: alike; the "outlier features" of arXiv 2208.07339)
    SQNR = 10 log10( sum x^2 / sum (x - x_q)^2 ) dB,   x_q = d round(x / d),   d = max |x| / (2^(bits - 1) - 1)

symmetric round-to-nearest with the scale that the largest entry sets. One outlier stretches the step d for all, so
heavy tails cost bits. That residual streams have heavier tails than residual-free ones is the argument of arXiv
2605.25880 on the quantisation of residual-free transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip._checks import whole
from unskip.measures._input import centred, floats


def excess_kurtosis(x: Tensor) -> float:
    """m_4 / m_2^2 - 3 over all entries of x; nan where x is constant.

    The plain (biased) estimate, as scipy.stats.kurtosis gives by default.
    """
    wide = floats("excess_kurtosis", "x", x, "(..., dim)", 1)
    away = centred(wide.reshape(-1, 1), x.dtype)
    away = away / away.abs().max()  # fourth powers stay in range; 0 / 0 is the nan of a constant
    return float((away**4).mean() / (away**2).mean() ** 2 - 3)


def outlier_channels(x: Tensor) -> float:
    """The largest RMS of a channel, over all tokens, in units of the median channel's; nan where x is zero."""
    wide = floats("outlier_channels", "x", x, "(..., dim)", 2)
    wide = wide / wide.abs().max()  # squares stay in range; 0 / 0 is the nan of zeros
    rms = wide.reshape(-1, wide.shape[-1]).square().mean(0).sqrt()
    return float(rms.max() / rms.quantile(0.5))


def sqnr(x: Tensor, bits: int) -> float:
    """The SQNR in dB of x under `bits`, with one scale for all; inf where rounding changes nothing, nan for zeros."""
    bits = whole("sqnr", "bits", bits, low=2)
    wide = floats("sqnr", "x", x, "(..., dim)", 1)
    largest = wide.abs().max()
    if largest == 0:
        return math.nan
    wide = wide / largest  # squares stay in range
    step = 1 / (2 ** (bits - 1) - 1)
    noise = float((wide - step * (wide / step).round()).square().sum())
    # Dividing and multiplying by the step rounds; an error of that size is none.
    if noise <= wide.numel() * (4 * torch.finfo(torch.float64).eps) ** 2:
        return math.inf
    return 10 * math.log10(float(wide.square().sum()) / noise)
