"""Echo: cosine, ridge against scikit-learn, and frequencies of known waves."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from torch import Tensor

from unskip.errors import BadInput
from unskip.measures.echo import cosine, feature_norm, held_out, high_frequency_share, ridge_r2, ridge_scores


def test_cosine() -> None:
    x = torch.randn(2, 5, 8)
    assert cosine(x, x) == pytest.approx(1)
    assert cosine(x, -3 * x) == pytest.approx(-1)
    a, b = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 2.0], [5.0, 5.0]])
    assert cosine(a, b) == pytest.approx((0 + math.sqrt(0.5)) / 2)
    assert math.isnan(cosine(a, b * 0))
    with pytest.raises(BadInput, match="same shape"):
        cosine(a, b[:1])


def test_feature_norm() -> None:
    assert feature_norm(torch.tensor([[[3.0, 4.0], [0.0, 1.0]]])) == pytest.approx(3)
    assert feature_norm(torch.full((1, 4), 6e4).half()) == pytest.approx(1.2e5, rel=1e-3)


def noisy(samples: int = 120, wide: int = 7, out: int = 4, noise: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, wide, generator=g, dtype=torch.float64) * torch.logspace(0, -2, wide) + 3
    y = x @ torch.randn(wide, out, generator=g, dtype=torch.float64)
    return x, y + noise * torch.randn(samples, out, generator=g, dtype=torch.float64) - 5


@pytest.mark.parametrize("ridge", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("wide", [7, 200])
def test_against_scikit_learn(ridge: float, wide: int) -> None:
    x, y = noisy(wide=wide)
    mask = torch.arange(120) % 4 == 0
    peer = Ridge(alpha=ridge, solver="svd").fit(x[~mask].numpy(), y[~mask].numpy()).predict(x[mask].numpy())
    wanted = r2_score(y[mask].numpy(), peer, multioutput="variance_weighted")
    largest = float(torch.linalg.svdvals(x[~mask] - x[~mask].mean(0))[0])
    assert ridge_scores(x[~mask], y[~mask], x[mask], y[mask], (ridge / largest**2,)) == pytest.approx([wanted])


def test_the_ridge_is_chosen() -> None:
    """With more features than samples, the chosen ridge must be close to the best one on the test samples."""
    x, y = noisy(wide=300, noise=3.0)
    mask = held_out(torch.arange(120), torch.Generator().manual_seed(0))
    ridges = tuple(10.0**power for power in np.arange(-8, 3, 0.5))
    scores = ridge_scores(x[~mask], y[~mask], x[mask], y[mask], ridges)
    chosen = ridge_r2(x, y)
    assert max(scores) - 0.1 < chosen <= max(scores) + 1e-3
    assert chosen > scores[-1] + 0.01


def test_r2_of_a_linear_map_and_of_independent_features() -> None:
    x, y = noisy(noise=0.0)
    assert ridge_r2(x, y) == pytest.approx(1, abs=1e-6)
    independent = torch.randn(400, 5, dtype=torch.float64), torch.randn(400, 3, dtype=torch.float64)
    assert abs(ridge_r2(*independent)) < 0.05


def test_groups_are_held_out_whole() -> None:
    """Tokens with a code of their image are predictable from the same image, but not from other images."""
    codes = torch.randn(40, 30)
    groups = torch.arange(40).repeat_interleave(10)
    x, y = torch.eye(40)[groups], codes[groups]  # x is the image's index, useless for an unseen image
    assert ridge_r2(x, y) > 0.99
    assert ridge_r2(x, y, groups=groups) < 0.05


def test_constants() -> None:
    x, y = noisy()
    assert math.isnan(ridge_r2(x, torch.ones(120, 2)))
    assert math.isnan(ridge_r2(x, torch.nextafter(torch.ones(120, 2), torch.randn(120, 2) * 9)))
    assert ridge_r2(torch.ones(120, 3), y) <= 0  # only the mean can be predicted


def test_ridge_bad_input() -> None:
    x, y = noisy()
    with pytest.raises(BadInput, match=r"120 rows and 119"):
        ridge_r2(x, y[:-1])
    with pytest.raises(BadInput, match="measure more samples"):
        ridge_r2(x, y, groups=torch.zeros(120))
    with pytest.raises(BadInput, match="120 samples"):
        ridge_r2(x, y, groups=torch.zeros(3))


def wave(rows: int, cols: int, down: int, across: int) -> Tensor:
    """(1, rows * cols, 1): a cosine with `down` and `across` periods."""
    r, c = torch.arange(rows, dtype=torch.float64)[:, None], torch.arange(cols, dtype=torch.float64)[None]
    return torch.cos(2 * math.pi * (down * r / rows + across * c / cols)).reshape(1, -1, 1)


def test_checkerboard_is_all_high_and_a_slow_wave_all_low() -> None:
    assert high_frequency_share(wave(8, 8, 4, 4) + 5, (8, 8)) == pytest.approx(1)
    assert high_frequency_share(wave(8, 8, 1, 0) + 5, (8, 8)) == pytest.approx(0, abs=1e-12)
    assert high_frequency_share(wave(8, 8, 1, 0) + 2 * wave(8, 8, 4, 4), (8, 8)) == pytest.approx(
        # a wave at Nyquist has mean square 1, another 1/2
        4 / 4.5
    )


@pytest.mark.parametrize(
    ("rows", "cols", "down", "across"), [(8, 12, 1, 4), (8, 12, 3, 0), (9, 7, 2, 1), (1, 16, 0, 5)]
)
def test_the_radius_of_a_wave(rows: int, cols: int, down: int, across: int) -> None:
    radius = math.hypot(2 * down / rows, 2 * across / cols)
    tokens = wave(rows, cols, down, across)
    assert high_frequency_share(tokens, (rows, cols), cutoff=radius - 0.01) == pytest.approx(1)
    assert high_frequency_share(tokens, (rows, cols), cutoff=radius + 0.01) == pytest.approx(0, abs=1e-12)


@given(st.integers(2, 9), st.integers(2, 9), st.integers(0, 5))
def test_high_and_low_frequencies_add_up(rows: int, cols: int, seed: int) -> None:
    """By Parseval's theorem."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randn(2, rows * cols, 3, generator=g, dtype=torch.float64)
    spectrum = torch.fft.fft2(tokens.unflatten(1, (rows, cols)), dim=(1, 2))
    down, across = 2 * np.fft.fftfreq(rows), 2 * np.fft.fftfreq(cols)
    low = [spectrum[:, i, j].abs().square().sum() for i in range(rows) for j in range(cols) if
           0 < math.hypot(down[i], across[j]) <= 0.5]  # fmt: skip
    total = (tokens - tokens.mean(1, keepdim=True)).square().sum() * rows * cols
    assert high_frequency_share(tokens, (rows, cols)) == pytest.approx(1 - float(sum(low) / total), abs=1e-9)


def test_constant_tokens_have_no_share() -> None:
    assert math.isnan(high_frequency_share(torch.randn(2, 1, 5).expand(2, 16, 5), (4, 4)))
    noisy_constant = torch.nextafter(torch.ones(1, 16, 5), torch.randn(1, 16, 5) * 9)
    assert math.isnan(high_frequency_share(noisy_constant, (4, 4)))


def test_the_grid_must_fit() -> None:
    with pytest.raises(BadInput, match=r"17 tokens.*4 x 4"):
        high_frequency_share(torch.randn(1, 17, 3), (4, 4))
    with pytest.raises(BadInput, match=r"non-finite"):
        high_frequency_share(torch.full((1, 16, 3), math.inf), (4, 4))
