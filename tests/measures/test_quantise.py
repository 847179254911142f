"""Kurtosis against scipy and known distributions; SQNR against its closed form for uniform noise."""

import math

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from unskip.errors import BadInput
from unskip.measures.quantise import excess_kurtosis, outlier_channels, sqnr


def test_against_scipy() -> None:
    x = torch.randn(3, 40, 5, dtype=torch.float64) ** 3 + 2
    assert excess_kurtosis(x) == pytest.approx(scipy.stats.kurtosis(x.numpy(), axis=None))


def test_known_distributions() -> None:
    n = 400_000
    assert excess_kurtosis(torch.randn(n)) == pytest.approx(0, abs=0.05)
    assert excess_kurtosis(torch.rand(n)) == pytest.approx(-1.2, abs=0.02)
    assert excess_kurtosis(torch.tensor([1.0, -1.0])) == pytest.approx(-2)
    n = 1000
    spike = torch.zeros(n)
    spike[7] = 5.0  # Bernoulli(1/n): (1 - 6 p (1 - p)) / (p (1 - p))
    assert excess_kurtosis(spike) == pytest.approx((1 - 6 / n * (1 - 1 / n)) / (1 / n * (1 - 1 / n)))


@given(st.floats(1e-70, 1e70), st.floats(-5, 5))
def test_scale_and_shift_do_not_matter(scale: float, shift: float) -> None:
    x = torch.linspace(-1, 1, 30, dtype=torch.float64) ** 3
    assert excess_kurtosis((x + shift) * scale) == pytest.approx(excess_kurtosis(x), abs=1e-6)


def test_constant_is_nan() -> None:
    assert math.isnan(excess_kurtosis(torch.full((5, 3), 2.0)))
    assert math.isnan(excess_kurtosis(torch.nextafter(torch.ones(500), torch.randn(500) * 9)))


def test_outlier_channels() -> None:
    signs = torch.randn(6, 7, 5).sign() * torch.tensor([1.0, 2.0, 3.0, 50.0, 0.0])  # the RMS of each channel
    assert outlier_channels(signs.double() * 1e200) == outlier_channels(signs.double() * 1e-200) == pytest.approx(25)
    assert math.isnan(outlier_channels(torch.zeros(4, 3)))
    assert outlier_channels(torch.tensor([[0.0, 0.0, 0.0, 1.0]])) == math.inf
    with pytest.raises(BadInput, match=r"outlier_channels: x must be \(\.\.\., dim\)"):
        outlier_channels(torch.ones(3))


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_uniform_noise(bits: int) -> None:
    """A^2 / 3 over d^2 / 12 with 2^bits - 2 steps in 2 A: 20 log10(2^bits - 2), 6.02 dB per bit in the limit."""
    x = torch.rand(200_000, dtype=torch.float64) * 2 - 1
    x[0] = 1.0
    assert sqnr(x, bits) == pytest.approx(20 * math.log10(2**bits - 2), abs=0.05)


def test_by_hand() -> None:
    """2 bits: levels -1, 0, 1 times the largest entry. 1 -> 1, .4 -> 0, -.6 -> -1: the error is .16 + .16."""
    x = torch.tensor([1.0, 0.4, -0.6], dtype=torch.float64)
    assert sqnr(x, 2) == pytest.approx(10 * math.log10(1.52 / 0.32))


def test_zero_and_exact() -> None:
    assert math.isnan(sqnr(torch.zeros(4, 4), 8))
    assert sqnr(torch.arange(-7, 8).float() * 0.3, 4) < math.inf  # 0.3 in float32 times 5 is rounded
    assert sqnr(torch.arange(-7, 8).double() * 0.25, 4) == math.inf


def test_bad_input_is_named() -> None:
    x = torch.ones(3)
    with pytest.raises(BadInput, match=r"bits.*2 or more, got 1"):
        sqnr(x, 1)
    with pytest.raises(BadInput, match=r"first inf at \(1,\)"):
        sqnr(torch.tensor([1.0, math.inf]), 8)
