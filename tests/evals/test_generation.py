"""Generation metrics: closed forms for Gaussians, comparison with torchmetrics, streamed statistics."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg
from tests.evals.pixels import Pixels, pictures
from torch import Tensor

from unskip.errors import BadInput, UnskipWarning
from unskip.evals import Moments, frechet, generation, kid, precision_recall, score


def gaussian(count: int, dim: int, seed: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return shift + scale * torch.randn(count, dim, generator=draw, dtype=torch.float64)


def exact(count: int, mean: Tensor, covariance: Tensor, seed: int = 0) -> Tensor:
    """Samples whose mean and covariance are exactly these."""
    x = gaussian(count, len(mean), seed)
    x = x - x.mean(0)
    root = torch.linalg.cholesky(x.T @ x / (count - 1))
    wanted = torch.from_numpy(linalg.sqrtm(covariance.numpy()).real)
    return torch.linalg.solve_triangular(root, x.T, upper=False).T @ wanted + mean


def textbook(m1: Tensor, c1: Tensor, m2: Tensor, c2: Tensor) -> float:
    root = linalg.sqrtm((c1 @ c2).numpy())
    return float((m1 - m2) @ (m1 - m2) + c1.trace() + c2.trace() - 2 * numpy.trace(root).real)


# --- Fréchet distance -------------------------------------------------------------------------------------------------


def test_frechet_of_gaussians_in_closed_form() -> None:
    mean, other = torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor([0.0, 1.0, 0.5]).double()
    # Diagonal: |m - n|^2 + sum (a - b)^2.
    a, b = torch.tensor([1.0, 4.0, 9.0]).double(), torch.tensor([4.0, 4.0, 0.25]).double()
    x, y = exact(50, mean, a.diag()), exact(60, other, b.diag(), 1)
    assert frechet(x, y) == pytest.approx(10 + 1 + 0 + 2.5**2, rel=1e-10)
    # Any two: the textbook formula.
    draw = gaussian(2, 9, 5).reshape(2, 3, 3)
    c, d = (each @ each.T + 0.1 * torch.eye(3) for each in draw)
    distance = frechet(exact(50, mean, c), exact(60, other, d, 1))
    assert distance == pytest.approx(textbook(mean, c, other, d), rel=1e-8)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 10_000), st.floats(0.1, 5), st.floats(-3, 3))
def test_frechet_is_symmetric_zero_for_equal_sets_and_exact_for_scale_and_shift(
    dim: int, seed: int, scale: float, shift: float
) -> None:
    x, y = gaussian(30, dim, seed), gaussian(30, dim, seed + 1, 2.0, 1.0)
    assert frechet(x, x) == pytest.approx(0, abs=1e-9)
    assert frechet(x, y) == pytest.approx(frechet(y, x), rel=1e-8)
    assert frechet(x, x + shift) == pytest.approx(dim * shift**2, rel=1e-8, abs=1e-9)
    spread = float(torch.cov(x.T).trace()) if dim > 1 else float(x.var())
    mean = float(x.mean(0).square().sum())
    assert frechet(x, scale * x) == pytest.approx((1 - scale) ** 2 * (spread + mean), rel=1e-6, abs=1e-8)


def test_frechet_with_a_singular_covariance() -> None:
    x, y = gaussian(40, 3, 0), gaussian(40, 3, 1, 2.0)
    # A constant feature adds only the squared difference of its values.
    more = [torch.cat([each, torch.full((40, 1), value)], 1) for each, value in ((x, 1.0), (y, 3.0))]
    assert frechet(*more) == pytest.approx(frechet(x, y) + 4, rel=1e-7)
    constant = torch.ones(10, 4)
    assert frechet(constant, 3 * constant) == pytest.approx(16)


def test_too_few_samples_give_a_warning() -> None:
    few, many = gaussian(10, 20, 0), gaussian(400, 20, 1)
    with pytest.warns(UnskipWarning, match="10 samples of 20 features"):
        small = frechet(few, many)
    assert small > frechet(gaussian(300, 20, 2), many)  # the bias in the warning


def test_moments_by_batch_match_moments_of_the_whole() -> None:
    x = gaussian(101, 5, 0, 3.0, 1000.0)  # with this mean a sum of squares would lose digits
    whole, parts = Moments(), Moments()
    whole.update(x)
    for part in x.split([1, 40, 0, 37, 23]):
        parts.update(part)
    assert parts.count == 101
    torch.testing.assert_close(parts.mean, x.mean(0), rtol=1e-13, atol=0)
    torch.testing.assert_close(parts.covariance, torch.cov(x.T), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(whole.covariance, parts.covariance, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Metric `.*:UserWarning")
def test_frechet_and_kid_match_torchmetrics() -> None:
    peers: Any = pytest.importorskip("torchmetrics.image.fid", reason="torchmetrics is not installed")
    from torchmetrics.image.kid import poly_mmd

    module = Pixels()
    real, fake = pictures(300, 0), pictures(200, 1, 60)
    metric = peers.FrechetInceptionDistance(feature=module, input_img_size=(3, 4, 4))
    metric.update(real, real=True)
    metric.update(fake, real=False)
    metrics = generation(fake, real, module)
    assert metrics["FD-Pixels"] == pytest.approx(float(metric.compute()), rel=1e-4)
    a, b = module(fake).detach().double(), module(real).detach().double()
    a, b = a[:200], b[:200]  # torchmetrics needs sets of equal size
    assert kid(a, b) == pytest.approx(float(poly_mmd(a, b)), rel=1e-6)


# --- Precision, recall, score -----------------------------------------------------------------------------------------


def brute(samples: Tensor, reference: Tensor, k: int) -> float:
    inside = 0
    for x in samples:
        for index, centre in enumerate(reference):
            others = [float((centre - y).norm()) for j, y in enumerate(reference) if j != index]
            inside += float((x - centre).norm()) <= sorted(others)[k - 1]
            if float((x - centre).norm()) <= sorted(others)[k - 1]:
                break
    return inside / len(samples)


def test_precision_and_recall_match_their_definition() -> None:
    fake, real = gaussian(25, 2, 0, 0.6, 0.5).float(), gaussian(30, 2, 1).float()
    for k in (1, 3):
        precision_and_recall = precision_recall(fake, real, k)
        assert precision_and_recall == pytest.approx((brute(fake, real, k), brute(real, fake, k)))
    assert 0 < precision_and_recall[1] < precision_and_recall[0]  # narrow samples: good, but not diverse


def test_extreme_precision_and_recall() -> None:
    x = gaussian(50, 3, 0).float()
    assert precision_recall(x, x) == (1.0, 1.0)
    assert precision_recall(x, x + 100) == (0.0, 0.0)
    # One mode of two: all samples are good, but cover half of the reference.
    two = torch.cat([x, x + 100])
    assert precision_recall(x, two) == (1.0, 0.5)
    assert precision_recall(two, x) == (0.5, 1.0)


def test_score_in_closed_form() -> None:
    sure = 100.0 * torch.eye(5).repeat(4, 1)
    assert score(sure) == pytest.approx(5)  # certain, with equal class frequencies
    assert score(sure[:1].repeat(7, 1)) == pytest.approx(1)  # one class
    assert score(torch.zeros(7, 5)) == pytest.approx(1)  # uniform predictions
    assert score(100 * sure) == pytest.approx(5)  # the other probabilities are exactly 0
    assert score(100 * sure[:1].repeat(7, 1)) == pytest.approx(1)
    p = torch.tensor([[0.8, 0.2], [0.4, 0.6]]).double()
    middle = p.mean(0)
    expected = math.exp(float((p * (p / middle).log()).sum(1).mean()))
    assert score(p.log()) == pytest.approx(expected)


def test_bad_input_is_refused() -> None:
    module, real = Pixels(), pictures(20, 0)
    with pytest.raises(BadInput, match="no image"):
        generation(real[:0], real, module)
    with pytest.raises(BadInput, match="images must be bytes"):
        generation(real.float(), real, module)
    with pytest.raises(BadInput, match="got 1"):
        frechet(gaussian(1, 2, 0), gaussian(5, 2, 0))
    with pytest.raises(BadInput, match="2 and 3"):
        frechet(gaussian(5, 2, 0), gaussian(5, 3, 0))
    with pytest.raises(BadInput, match="features"):
        frechet(torch.full((5, 2), math.nan), gaussian(5, 2, 0))
    with pytest.raises(BadInput, match="k is 3"):
        precision_recall(gaussian(3, 2, 0), gaussian(5, 2, 0))
    with pytest.raises(BadInput, match="the same extractor"):
        precision_recall(gaussian(9, 2, 0), gaussian(9, 3, 0))
    with pytest.raises(BadInput, match="logits must be"):
        score(torch.zeros(0, 3))
    with pytest.raises(BadInput, match="k is 0"):
        generation(real, real, module, k=0)
    for wrong in ({"batch": 0}, {"manifold": 0}):
        with pytest.raises(BadInput, match="each must be 1 or more"):
            generation(real, real, module, **wrong)
    with torch.no_grad():
        module.weight.fill_(math.nan)
    with pytest.raises(BadInput, match="finite"):
        generation(real, real, module)
