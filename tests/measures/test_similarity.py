"""CKA against its definition with full kernels, and its invariances; the cosine between tokens."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unskip.errors import BadInput
from unskip.measures.similarity import cka, token_cosine


def hsic(k: Tensor, l: Tensor) -> float:  # noqa: E741
    """By double centring without the diagonal (U-centring), unlike the formula of the package."""
    n = len(k)

    def centre(a: Tensor) -> Tensor:
        a = a - torch.diag(a.diagonal())
        rows = a.sum(1) / (n - 2)
        out = a - rows[:, None] - rows[None] + a.sum() / ((n - 1) * (n - 2))
        return out - torch.diag(out.diagonal())

    return float((centre(k) * centre(l)).sum())


@given(samples=st.integers(5, 30), wide=st.integers(1, 40), other=st.integers(1, 9), seed=st.integers(0, 99))
def test_against_the_definition(samples: int, wide: int, other: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, wide, generator=g, dtype=torch.float64) + 2
    y = torch.randn(samples, other, generator=g, dtype=torch.float64) + x[:, :1]
    k, l = x @ x.mT, y @ y.mT  # noqa: E741
    wanted = hsic(k, l) / math.sqrt(hsic(k, k) * hsic(l, l))
    assert cka(x, y) == pytest.approx(wanted, rel=1e-7, abs=1e-9)


def test_invariances() -> None:
    x = torch.randn(50, 8, dtype=torch.float64)
    y = x[:, :5] ** 2 + torch.randn(50, 5, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
    plain = cka(x, y)
    assert cka(x, x) == pytest.approx(1)
    assert cka(x, -3 * x @ rotation + 100) == pytest.approx(1)
    assert cka(1e-9 * x @ rotation + 4, y * 1e9) == pytest.approx(plain, rel=1e-6)
    assert cka(y, x) == pytest.approx(plain)
    stretch = torch.diag(torch.logspace(0, 2, 8, dtype=torch.float64))
    assert cka(x, x @ stretch) < 0.9  # a general linear map changes it


def test_cka_of_constant_features_is_nan() -> None:
    x = torch.randn(10, 3)
    assert math.isnan(cka(x, torch.ones(10, 2)))
    assert math.isnan(cka(torch.nextafter(torch.ones(10, 2), torch.randn(10, 2) * 9), x))


def test_bad_input_is_named() -> None:
    x = torch.randn(4, 3)
    with pytest.raises(BadInput, match=r"4 samples .* got 3"):
        cka(x[:3], x[:3])
    with pytest.raises(BadInput, match=r"4 rows and 2"):
        cka(x, x[:2])
    with pytest.raises(BadInput, match=r"y has 12 non-finite"):
        cka(x, x * math.nan)


def test_token_cosine_counts_pairs_of_different_tokens() -> None:
    x = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pairs = [torch.cosine_similarity(s[i], s[j], dim=0) for s in x for i in range(7) for j in range(7) if i != j]
    assert token_cosine(x) == pytest.approx(float(torch.stack(pairs).mean()))
    assert token_cosine(torch.eye(4)[None]) == pytest.approx(0)
    assert token_cosine(torch.ones(2, 3, 4)) == pytest.approx(1)
    with pytest.raises(BadInput, match="one token"):
        token_cosine(x[:, :1])
