"""Effective rank: closed forms, constant features, rounding and bad input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unskip.errors import BadInput
from unskip.measures.rank import effective_rank, feature_matrix, rank_entropy


def matrix(sigma: list[float], samples: int, dim: int, *, centred: bool = False, seed: int = 0) -> Tensor:
    """A float64 matrix with these singular values; centred: its columns have mean zero."""
    g = torch.Generator().manual_seed(seed)
    left = torch.randn(samples, len(sigma), generator=g, dtype=torch.float64)
    if centred:
        left = left - left.mean(0)
    u = torch.linalg.qr(left).Q
    v = torch.linalg.qr(torch.randn(dim, len(sigma), generator=g, dtype=torch.float64)).Q
    return u @ torch.diag(torch.tensor(sigma, dtype=torch.float64)) @ v.mT


def entropy(sigma: list[float]) -> float:
    p = [s / sum(sigma) for s in sigma if s > 0]
    return -sum(q * math.log(q) for q in p)


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=8), st.booleans(), st.integers(9, 60))
def test_known_spectrum(sigma: list[float], center: bool, samples: int) -> None:
    x = matrix(sigma, samples, 8, centred=center)
    assert rank_entropy(x, center) == pytest.approx(entropy(sigma), abs=1e-8)
    assert effective_rank(x, center) == pytest.approx(math.exp(entropy(sigma)), rel=1e-8)


def test_centring_takes_one_sample() -> None:
    """The largest rank is N - 1, not min(N, D); a simplex reaches it."""
    x = torch.eye(6, dtype=torch.float64)
    assert effective_rank(x) == pytest.approx(5)
    assert effective_rank(x, center=False) == pytest.approx(6)


def test_rank_one() -> None:
    x = torch.outer(torch.linspace(-1, 2, 30, dtype=torch.float64), torch.linspace(1, 3, 12, dtype=torch.float64))
    assert effective_rank(x) == pytest.approx(1)
    assert rank_entropy(x, center=False) == pytest.approx(0, abs=1e-9)
    assert effective_rank(x.float()) == pytest.approx(1, abs=1e-4)  # up to float32 rounding


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_constant_features_have_rank_zero(dtype: torch.dtype) -> None:
    x = (torch.randn(16) * 3 + 100).to(dtype).expand(40, 16)
    assert effective_rank(x) == 0
    assert rank_entropy(x) == -math.inf
    assert effective_rank(x, center=False) == pytest.approx(1)
    assert effective_rank(torch.zeros(5, 3, dtype=dtype), center=False) == 0


def test_rounding_noise_of_constant_features_is_not_rank() -> None:
    base = torch.randn(16) * 3
    noisy = torch.nextafter(base.expand(400, 16), torch.randn(400, 16) * 1e6)  # one unit up or down
    assert noisy.double().std(0).max() > 0
    assert effective_rank(noisy) == 0
    assert effective_rank(noisy.double()) > 10  # in float64 the same numbers are not rounding


def test_a_large_constant_channel_hides_nothing() -> None:
    x = matrix([2.0, 1.0], 50, 8, centred=True).float()
    alone = effective_rank(x)
    with_constant = torch.cat([x, torch.full((50, 1), 3e4)], 1)
    assert effective_rank(with_constant) == pytest.approx(alone)


@given(st.floats(1e-150, 1e150))
def test_scale_does_not_matter(scale: float) -> None:
    x = matrix([3.0, 2.0, 1.0], 20, 5, centred=True)
    assert effective_rank(x * scale) == pytest.approx(effective_rank(x))


def test_feature_matrix() -> None:
    tokens = torch.randn(3, 5, 4)
    assert torch.equal(feature_matrix(tokens), tokens.reshape(15, 4))
    assert torch.allclose(feature_matrix(tokens, "pooled"), tokens.mean(1))
    assert feature_matrix(torch.full((1, 4, 2), 6e4).half(), "pooled").isfinite().all()
    with pytest.raises(BadInput, match="tokens, pooled"):
        feature_matrix(tokens, "cls")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"\(5, 4\)"):
        feature_matrix(tokens[0])


def test_bad_input_is_named() -> None:
    x = torch.randn(4, 3)
    x[2, 1] = math.nan
    with pytest.raises(BadInput, match=r"1 non-finite of 12.*\(2, 1\)"):
        effective_rank(x)
    with pytest.raises(BadInput, match=r"got shape \(2, 4, 3\)"):
        effective_rank(torch.randn(2, 4, 3))
    with pytest.raises(BadInput, match=r"torch.int64"):
        rank_entropy(torch.ones(3, 3, dtype=torch.int64))
    with pytest.raises(BadInput, match=r"not empty"):
        rank_entropy(torch.ones(0, 3))
    with pytest.raises(BadInput, match="list"):
        rank_entropy([[1.0]])  # type: ignore[arg-type]
