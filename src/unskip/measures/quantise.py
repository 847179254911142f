"""The effect of quantisation on activations: excess kurtosis, outlier channels, signal-to-quantisation-noise ratio.

    excess kurtosis = m_4 / m_2^2 - 3, of central moments     (0: Gaussian; large: a few extreme entries)
    outlier channels = max_c rms(x_c) / median_c rms(x_c)     (1: equal; the "outlier features" of arXiv 2208.07339)
    SQNR = 10 log10( sum x^2 / sum (x - x_q)^2 ) dB,   x_q = d round(x / d),   d = max |x| / (2^(bits - 1) - 1)

This is symmetric rounding to nearest, with the scale of the largest entry. One outlier increases the step d for all
entries, so heavy tails cost bits. arXiv 2605.25880, on the quantisation of residual-free transformers, argues that
residual streams have heavier tails than residual-free ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip._checks import whole
from unskip.measures._input import centred, floats


def excess_kurtosis(x: Tensor) -> float:
    """m_4 / m_2^2 - 3 over all entries of x; nan if x is constant.

    This is the biased estimate, as in scipy.stats.kurtosis by default.
    """
    wide = floats("excess_kurtosis", "x", x, "(..., dim)", 1)
    wide = centred(wide.reshape(-1, 1), x.dtype)
    wide = wide / wide.abs().max()  # fourth powers stay in range; a constant gives 0 / 0 = nan
    return float((wide**4).mean() / (wide**2).mean() ** 2 - 3)


def outlier_channels(x: Tensor) -> float:
    """The largest RMS of a channel over the median RMS of channels; nan if x is zero."""
    wide = floats("outlier_channels", "x", x, "(..., dim)", 2)
    wide = wide / wide.abs().max()  # squares stay in range; zeros give 0 / 0 = nan
    rms = wide.reshape(-1, wide.shape[-1]).square().mean(0).sqrt()
    return float(rms.max() / rms.quantile(0.5))


def sqnr(x: Tensor, bits: int) -> float:
    """The SQNR in dB of x at `bits`, with one scale for all entries; inf if x does not change, nan for zeros."""
    bits = whole("sqnr", "bits", bits, low=2)
    wide = floats("sqnr", "x", x, "(..., dim)", 1)
    largest = wide.abs().max()
    if largest == 0:
        return math.nan
    wide = wide / largest  # squares stay in range
    step = 1 / (2 ** (bits - 1) - 1)
    noise = float((wide - step * (wide / step).round()).square().sum())
    # Division and multiplication by the step round too; errors of that size count as zero.
    if noise <= wide.numel() * (4 * torch.finfo(torch.float64).eps) ** 2:
        return math.inf
    return 10 * math.log10(float(wide.square().sum()) / noise)
