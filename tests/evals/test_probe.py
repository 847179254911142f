"""Probes: comparison with scikit-learn and autograd, the formula of LARS, accuracies and bad input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from tests.evals.hosts import NoHost
from tests.evals.test_knn import blobs
from torch.nn import functional as F

from unskip import evals
from unskip.errors import BadInput
from unskip.evals import PROTOCOLS, _logistic, _probe
from unskip.evals._logistic import regression

PROBES = ["probe-mae-v1", "probe-decayed-v1", "probe-lbfgs-v1"]


def test_the_regression_matches_scikit_learn() -> None:
    x, labels = blobs(400, dim=6, classes=4)
    x = x * torch.tensor([1, 10, 0.1, 1, 1, 5.0]) + 3
    settings = PROTOCOLS["probe-lbfgs-v1"].settings
    weight, bias, mean, std = regression(x[None], labels, 4, settings, 2**20)
    scaler = StandardScaler().fit(x.double().numpy())
    peer = LogisticRegression(C=1.0, tol=1e-8, max_iter=5000).fit(scaler.transform(x.double().numpy()), labels.numpy())
    assert numpy.allclose(mean[0].numpy(), scaler.mean_, atol=1e-6)
    assert numpy.allclose(std[0].numpy(), scaler.scale_, atol=1e-6)
    assert numpy.allclose(weight[0].numpy(), peer.coef_, atol=2e-4)
    # A constant added to all biases has no effect.
    assert numpy.allclose((bias[0] - bias[0].mean()).numpy(), peer.intercept_ - peer.intercept_.mean(), atol=2e-4)
    y, truth = blobs(200, dim=6, classes=4, seed=1)
    y = y * torch.tensor([1, 10, 0.1, 1, 1, 5.0]) + 3
    accuracy = evals.linear_probe(x, labels, y, truth, "probe-lbfgs-v1")
    assert accuracy == pytest.approx(peer.score(scaler.transform(y.double().numpy()), truth.numpy()), abs=1e-9)


def test_a_changed_setting_reaches_the_probe() -> None:
    x, labels = blobs(60, dim=2, classes=4)
    arguments = (x, labels, x, labels, "probe-lbfgs-v1")
    assert evals.linear_probe(*arguments, changes={"iterations": 0}) < evals.linear_probe(*arguments)


def test_the_regression_in_chunks_is_the_same() -> None:
    x, labels = blobs(300)
    settings = PROTOCOLS["probe-lbfgs-v1"].settings
    whole, parts = (regression(x[None], labels, 5, settings, chunk)[0] for chunk in (2**20, 5 * 37))
    assert torch.allclose(parts, whole, atol=1e-6)


def correlated(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features like those of blocks: a few directions have most of the variance, and some columns are equal."""
    x, labels = blobs(count, dim=24, seed=seed)
    mix = torch.randn(24, 40, generator=torch.Generator().manual_seed(7)) * 0.5 ** torch.arange(24.0)[:, None]
    return torch.cat([x @ mix, (x @ mix)[:, :3]], 1), labels


@pytest.mark.parametrize("kind", ["correlated", "separable"])
def test_the_gradient_is_below_the_tolerance_after_the_regression(kind: str) -> None:
    """By autograd, on features that are hard to fit."""
    x, labels = correlated(600)
    if kind == "separable":
        x = x + 20 * F.one_hot(labels, x.shape[1])
    settings = PROTOCOLS["probe-lbfgs-v1"].settings
    solution = regression(x[None], labels, 5, settings, 2**20)
    weight, bias = (each[0].requires_grad_(True) for each in solution[:2])
    z = (x.double() - solution.mean) / solution.std
    loss = F.cross_entropy(z @ weight.T + bias, labels) + weight.square().sum() / (2 * settings["c"] * 600)
    loss.backward()
    assert max(float(weight.grad.abs().max()), float(bias.grad.abs().max())) <= 1.01e-6


def test_the_regression_of_wide_features_with_two_threads() -> None:
    """torch.linalg.inv fails on some CPUs for batches of matrices with 193 rows or more and several threads."""
    draw = torch.Generator().manual_seed(0)
    x, labels = torch.randn(2, 300, 192, generator=draw), torch.arange(300) % 3
    settings = PROTOCOLS["probe-lbfgs-v1"].settings
    one = regression(x, labels, 3, settings, 2**20)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        two = regression(x, labels, 3, settings, 2**20)
    finally:
        torch.set_num_threads(threads)
    assert torch.allclose(one.weight, two.weight, atol=1e-6)


def test_the_regression_takes_few_passes_over_correlated_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each pass launches about twenty kernels, which dominates the time of a short evaluation."""
    passes = []
    softmax = torch.Tensor.log_softmax
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda x, dim: passes.append(1) or softmax(x, dim))
    x, labels = correlated(600)
    settings = PROTOCOLS["probe-lbfgs-v1"].settings
    regression(torch.stack([x, 3 * x.roll(1, 0)]), labels, 5, settings, 2**20)
    assert 3 < len(passes) < 100


def test_a_regression_with_tolerance_zero_stops_at_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = correlated(600)
    settings = {**PROTOCOLS["probe-lbfgs-v1"].settings, "tolerance": 0.0}
    exact = regression(x[None], labels, 5, settings, 2**20)
    monkeypatch.setattr(_logistic, "EXACT", 0)  # so that it runs in float32
    rounded = regression(x[None], labels, 5, settings, 2**20)
    z = (x.double() - exact.mean) / exact.std
    a, b = ((z @ each.weight[0].T + each.bias[0]).softmax(1) for each in (exact, rounded))
    assert torch.allclose(a, b, atol=1e-2)


def test_the_gradient_matches_autograd() -> None:
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(3, 7, 4, generator=draw, dtype=torch.float64)
    weight = torch.randn(3, 5, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, 5, generator=draw, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 3, 4, 4, 0])
    loss = sum(F.cross_entropy(z[i] @ weight[i].T + bias[i], labels) for i in range(3))
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    with torch.no_grad():
        by_weight, by_bias = _probe._gradient(z, labels, weight, bias)
    assert torch.allclose(by_weight, weight.grad)
    assert torch.allclose(by_bias, bias.grad)


def test_lars_updates_are_proportional_to_the_norm_of_a_matrix() -> None:
    weight, bias = torch.full((2, 3, 4), 2.0), torch.zeros(2, 3)
    weight[1] *= 10
    before = weight.clone()
    gradients = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(2, 3)
    optimizer = _probe._Lars([weight, bias], {"momentum": 0.9, "trust": 0.001, "weight_decay": 0.0})
    rate = optimizer.rates(torch.tensor([0.5]))[0]
    optimizer.step(gradients, rate)
    change = (weight - before).flatten(1).norm(dim=1)
    assert torch.allclose(change, 0.5 * 0.001 * before.flatten(1).norm(dim=1), rtol=1e-4)
    assert torch.allclose(bias, torch.full((2, 3), -0.5))
    optimizer.step(gradients, rate)  # the same gradient: momentum adds 0.9 of the last step
    assert torch.allclose(bias, torch.full((2, 3), -0.5 - 0.5 * 1.9))


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_adamw_matches_torch(weight_decay: float) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64)
    expected = weight.clone().requires_grad_(True)
    rates = torch.tensor([0.5, 0.4, 0.1, 0.0, 0.2], dtype=torch.float64)
    peer = torch.optim.AdamW([expected], weight_decay=weight_decay)
    optimizer = _probe._AdamW([weight], {"weight_decay": weight_decay})
    for lr, rate in zip(rates.tolist(), optimizer.rates(rates), strict=True):
        gradient = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64)
        optimizer.step((gradient,), rate)
        peer.param_groups[0]["lr"], expected.grad = lr, gradient
        peer.step()
        assert torch.allclose(weight, expected, atol=1e-12)


@pytest.mark.parametrize("protocol", ["probe-mae-v1", "probe-decayed-v1"])
def test_an_epoch_of_a_probe_can_be_captured_as_a_cuda_graph(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads no number on the host, copies nothing between devices, and declares the state that it changes."""
    x, labels = blobs(300)
    seen = []

    def watched(work: Callable[[], None], state: Sequence[torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            with NoHost():
                work()
            seen.append(len(state))

        return run

    monkeypatch.setattr(_probe, "replayed", watched)
    evals.linear_probe(x, labels, x, labels, protocol, changes={"epochs": 2, "warmup": 0})
    assert seen == [6 if protocol == "probe-mae-v1" else 8] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("protocol", ["probe-mae-v1", "probe-decayed-v1"])
def test_a_probe_with_a_cuda_graph_gives_the_same(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = (each.cuda() for each in blobs(2000))
    settings = {**PROTOCOLS[protocol].settings, "epochs": 20, "warmup": 2}
    result = _probe._descent(x[None], labels, 5, settings, 0)
    monkeypatch.setattr(_probe, "replayed", lambda work, state: work)
    for replayed, plain in zip(result, _probe._descent(x[None], labels, 5, settings, 0), strict=True):
        torch.testing.assert_close(replayed, plain, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("protocol", PROBES)
def test_a_probe_reaches_the_optimal_accuracy(protocol: str) -> None:
    x, labels = blobs(2000, dim=12)
    y, truth = blobs(500, dim=12, seed=1)
    centres = torch.stack([x[labels == c].mean(0) for c in range(5)])
    nearest = (torch.cdist(y, centres).argmin(1) == truth).float().mean()  # optimal, up to errors of the centres
    assert evals.linear_probe(x, labels, y, truth, protocol) == pytest.approx(float(nearest), abs=0.03)


@pytest.mark.full
@pytest.mark.parametrize("protocol", PROBES)
def test_sets_probed_together_give_the_same_as_alone(protocol: str) -> None:
    x, labels = blobs(300)
    y, truth = blobs(100, seed=1)
    other_x, other_y = x.roll(1, 1)[:, :8] * 3 + 1, y.roll(1, 1)[:, :8] * 3 + 1
    train, test = (evals.Split(a, torch.stack(b)) for a, b in ((labels, [x, other_x]), (truth, [y, other_y])))
    probe = PROTOCOLS[protocol]
    together = [value for each in probe.function(train, test, **probe.settings) for value in each.values()]
    alone = [evals.linear_probe(a, labels, b, truth, protocol) for a, b in ((x, y), (other_x, other_y))]
    assert together == pytest.approx(alone, abs=0.011)  # products of another shape round differently


@pytest.mark.full
def test_a_seed_determines_a_probe() -> None:
    x, labels = blobs(300)
    y, truth = blobs(1000, seed=1)
    result = [evals.linear_probe(x, labels, y, truth, "probe-mae-v1", seed=seed) for seed in (0, 0, 1)]
    assert result[0] == result[1]
    assert result[0] != result[2]


def test_bad_input_is_refused() -> None:
    x, labels = blobs(300)
    with pytest.raises(BadInput, match="non-finite"):
        evals.linear_probe(x * torch.inf, labels, x, labels)
    with pytest.raises(BadInput, match="class 2"):
        evals.linear_probe(x[labels != 2], labels[labels != 2], x, labels)
    with pytest.raises(BadInput, match=r"\(samples, dim\)"):
        evals.linear_probe(x[None], labels, x[None], labels)
    with pytest.raises(BadInput, match="got list"):
        evals.linear_probe([[1.0]], labels, x, labels)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="batch norm"):
        evals.linear_probe(x[:1], labels[:1], x[:1], labels[:1])
