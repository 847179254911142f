"""Interpolants, the loss, noise by index, and samplers against a flow in closed form.

For data N(m, c^2) the velocity field is v(x, t) = a' E[x_1 | x] + s' E[e | x], with expectations linear in x, and its
flow maps noise z to m + c z exactly.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from unskip.errors import BadInput
from unskip.models import Drawn, Flow, Sampling
from unskip.models import draw as batches
from unskip.models._noise import normal

SHAPE = (1, 2, 3)
MEAN, DEVIATION = 0.7, 0.4
NONE = 3


class Gaussian(nn.Module):
    """The optimal prediction for data N(mean of the label, std^2), computed in float64."""

    def __init__(self, flow: Flow, shift: float = 0.0) -> None:
        super().__init__()
        self.flow, self.shift, self.sizes = flow, shift, list[int]()

    def forward(self, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        self.sizes.append(len(x))
        x, time = x.double(), time.double().reshape(-1, 1, 1, 1)
        mean = MEAN + self.shift * labels.double().reshape(-1, 1, 1, 1)
        a, s, da, ds = self.flow.path(time)
        variance = (a * DEVIATION) ** 2 + s**2
        data = mean + a * DEVIATION**2 / variance * (x - a * mean)
        noise = s / variance * (x - a * mean)
        result = {"velocity": da * data + ds * noise, "noise": noise, "data": data}[self.flow.target]
        return result.float()


def draw(*given: Any, **options: Any) -> Drawn:
    """All drawn batches, concatenated."""
    return Drawn(*map(torch.cat, zip(*batches(*given, **options), strict=True)))


def made(flow: Flow, count: int = 7, **options: Any) -> tuple[Tensor, Tensor]:
    """Samples, and the exact values of the flow for their noise."""
    sampling = Sampling(**options)
    labels = torch.arange(count) % NONE
    drawn_samples = draw(Gaussian(flow), labels, SHAPE, NONE, flow, sampling)
    z = normal(sampling.seed, torch.arange(count), 0, SHAPE)
    return drawn_samples.values, MEAN + DEVIATION * z


@pytest.mark.parametrize("interpolant", ["linear", "gvp"])
@pytest.mark.parametrize("target", ["velocity", "noise", "data"])
def test_velocity_noise_and_data_from_a_prediction(interpolant: Any, target: Any) -> None:
    flow = Flow(interpolant, target)
    draws = torch.Generator().manual_seed(0)
    data, noise = (torch.randn(16, *SHAPE, generator=draws, dtype=torch.float64) for _ in range(2))
    time = torch.rand(16, generator=draws, dtype=torch.float64) * 0.9 + 0.05
    x = flow.mixed(data, noise, time)
    parts = flow.parts(x, flow.wanted(data, noise, time), time)
    step = 1e-6
    slope = (flow.mixed(data, noise, time + step) - flow.mixed(data, noise, time - step)) / (2 * step)
    for mine, theirs in ((parts.data, data), (parts.noise, noise), (parts.velocity, slope)):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-7)
    for at, end in ((torch.zeros(16), noise), (torch.ones(16), data)):
        torch.testing.assert_close(flow.mixed(data, noise, at.double()), end, rtol=0, atol=1e-15)


@pytest.mark.parametrize("interpolant", ["linear", "gvp"])
@pytest.mark.parametrize(("sampler", "order"), [("euler", 1), ("heun", 2)])
def test_fixed_steps_converge_at_their_order_to_the_exact_flow(interpolant: Any, sampler: Any, order: int) -> None:
    flow = Flow(interpolant)
    errors = []
    for steps in (20, 40):
        result, exact = made(flow, sampler=sampler, steps=steps)
        errors.append(float((result - exact).abs().max()))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.35)
    assert errors[1] < (0.1 if order == 1 else 0.005)


@pytest.mark.parametrize("interpolant", ["linear", "gvp"])
@pytest.mark.parametrize("target", ["velocity", "noise", "data"])
def test_the_error_of_dopri5_is_within_its_tolerance(interpolant: Any, target: Any) -> None:
    flow = Flow(interpolant, target)
    # Times end 0.001 early if the velocity is singular as a function of the predicted noise or data.
    room = 2e-4 if target == "velocity" else 4e-3
    result, exact = made(flow, sampler="dopri5", tolerance=1e-5)
    assert (result - exact).abs().max() < room
    if target == "velocity":
        rough, _ = made(flow, sampler="dopri5", tolerance=1e-2)
        assert (rough - exact).abs().max() > 3 * (result - exact).abs().max()


def test_dopri5_matches_scipy() -> None:
    """One step of each has the same result and error estimate."""
    from scipy.integrate import RK45

    from unskip.models import _samplers

    for mine, theirs in zip(_samplers._A[1:6], RK45.A[1:], strict=True):
        assert mine == pytest.approx(theirs[: len(mine)])
    assert _samplers._A[6] == pytest.approx(RK45.B)
    assert _samplers._C[:6] == pytest.approx(RK45.C)
    assert pytest.approx(-RK45.E) == _samplers._E


@pytest.mark.parametrize("interpolant", ["linear", "gvp"])
def test_euler_maruyama_has_the_marginals_of_the_flow(interpolant: Any) -> None:
    flow = Flow(interpolant)
    labels = torch.zeros(1500, dtype=torch.int64)
    drawn_samples = draw(Gaussian(flow), labels, SHAPE, NONE, flow, Sampling("euler-maruyama", steps=200), batch=1500)
    values = drawn_samples.values.double().flatten()
    # 9000 values: three standard errors are 0.013 for the mean and 0.009 for the std; the last step adds a small error.
    assert float(values.mean()) == pytest.approx(MEAN, abs=0.02)
    assert float(values.std()) == pytest.approx(DEVIATION, abs=0.02)
    noise = normal(0, torch.arange(1500), 0, SHAPE).double().flatten()
    assert (
        abs(float(torch.corrcoef(torch.stack([values, noise]))[0, 1])) < 0.5
    )  # not a deterministic function of the initial noise
    assert (drawn_samples.evaluations == 201).all()


@pytest.mark.parametrize("sampler", ["euler", "heun", "dopri5", "euler-maruyama"])
def test_a_sample_does_not_depend_on_its_batch(sampler: Any) -> None:
    flow, sampling = Flow(), Sampling(sampler, steps=6, cfg=1.5, seed=4)
    labels = torch.arange(11) % NONE
    network = Gaussian(flow, shift=0.5)
    whole = draw(network, labels, SHAPE, NONE, flow, sampling, batch=11)
    parts = draw(network, labels, SHAPE, NONE, flow, sampling, batch=3)
    assert torch.equal(whole.values, parts.values)
    assert torch.equal(whole.evaluations, parts.evaluations)
    other = draw(network, labels, SHAPE, NONE, flow, Sampling(sampler, steps=6, cfg=1.5, seed=5))
    assert (whole.values - other.values).flatten(1).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize(("sampler", "each"), [("euler", 1), ("heun", 2), ("euler-maruyama", 1)])
def test_function_evaluations_are_counted_correctly(sampler: Any, each: int) -> None:
    flow, labels = Flow(), torch.tensor([0, 1])
    last = sampler == "euler-maruyama"
    for cfg, twice in ((1.0, 1), (0.0, 1), (2.0, 2)):
        network = Gaussian(flow)
        drawn_samples = draw(network, labels, SHAPE, NONE, flow, Sampling(sampler, steps=5, cfg=cfg))
        assert (drawn_samples.evaluations == twice * (5 * each + last)).all()
        assert sum(network.sizes) == int(drawn_samples.evaluations.sum())


def test_guidance_matches_the_formula() -> None:
    """With means m_y and m_none the guided flow of this Gaussian has the mean m_none + cfg (m_y - m_none)."""
    flow, labels = Flow(), torch.tensor([0, 1, NONE])
    network = Gaussian(flow, shift=0.5)
    z = normal(0, torch.arange(3), 0, SHAPE)
    for cfg in (0.0, 0.5, 1.0, 3.0):
        result = draw(network, labels, SHAPE, NONE, flow, Sampling("dopri5", cfg=cfg)).values
        none, own = MEAN + 0.5 * NONE, MEAN + 0.5 * labels.reshape(-1, 1, 1, 1)
        torch.testing.assert_close(result, none + cfg * (own - none) + DEVIATION * z, rtol=0, atol=1e-3)


def test_the_loss_of_the_optimal_network_is_the_conditional_variance() -> None:
    """E |v - E[v | x_t]|^2 at t: the variance of a' x + s' e given a x + s e, in closed form."""
    flow = Flow("gvp", label_dropout=0.0)
    draws = torch.Generator().manual_seed(0)
    data = MEAN + DEVIATION * torch.randn(20_000, *SHAPE, generator=draws)
    labels = torch.zeros(len(data), dtype=torch.int64)
    for at in (0.2, 0.7):
        a, s, da, ds = (float(value) for value in flow.path(torch.tensor(at, dtype=torch.float64)))
        known = (a * da * DEVIATION**2 + s * ds) ** 2 / ((a * DEVIATION) ** 2 + s**2)
        expected = (da * DEVIATION) ** 2 + ds**2 - known
        time = torch.full((len(data),), at)
        result = flow.loss(Gaussian(flow), data, labels, NONE, time=time, generator=draws).mean()
        assert float(result) == pytest.approx(expected, rel=0.02)


def test_label_dropout_rate_and_distribution_of_times() -> None:
    seen: list[Tensor] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
            seen.append(torch.stack([time, labels.float()]))
            return x

    draws = torch.Generator().manual_seed(0)
    data, labels = torch.zeros(4000, *SHAPE), torch.ones(4000, dtype=torch.int64)
    for flow in (Flow(label_dropout=0.25), Flow(times="logit-normal", time_mean=-0.5, time_std=0.8)):
        flow.loss(Spy(), data, labels, NONE, generator=draws)
    (uniform, left), (logit, _) = seen
    assert float((left == NONE).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert set(left.tolist()) == {1.0, float(NONE)}
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-3
    assert stats.kstest(torch.logit(logit).double().numpy(), "norm", (-0.5, 0.8)).pvalue > 1e-3


# --- Noise by index ---------------------------------------------------------------------------------------------------


def test_noise_is_normal_and_independent() -> None:
    values = normal(3, torch.arange(400), 0, (250,)).double()
    assert stats.kstest(values.flatten().numpy(), "norm").pvalue > 1e-3
    for moment, expected, room in ((1, 0, 0.015), (2, 1, 0.02), (3, 0, 0.06), (4, 3, 0.15)):
        assert float((values**moment).mean()) == pytest.approx(expected, abs=room)
    others = [
        normal(4, torch.arange(400), 0, (250,)),  # another seed
        normal(3, torch.arange(400), 1, (250,)),  # another step
        normal(3, torch.arange(1, 401), 0, (250,)),  # another sample
        values.roll(1, 1),  # another position
        values.roll(125, 1),  # its partner of Box and Muller
    ]
    for other in others:
        pair = torch.stack([values.flatten(), other.double().flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.015
        assert abs(float(torch.corrcoef(pair.square())[0, 1])) < 0.015


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 1000), st.integers(1, 9))
def test_noise_of_a_sample_does_not_depend_on_the_batch(seed: int, sample: int, step: int, size: int) -> None:
    alone = normal(seed, torch.tensor([sample]), step, (size,))
    among = normal(seed, torch.tensor([sample + 1, sample, 0]), step, (size,))
    assert torch.equal(alone[0], among[1])
    assert alone.dtype == torch.float32
    assert bool(alone.isfinite().all())


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (Flow, "interpolant", "cubic"),
        (Flow, "label_dropout", 1.0),
        (Flow, "time_std", 0.0),
        (Flow, "time_mean", math.nan),
        (Sampling, "sampler", "ddim"),
        (Sampling, "steps", 0),
        (Sampling, "cfg", -1.0),
        (Sampling, "tolerance", 0.0),
    ],
)
def test_invalid_flows_and_sampling_options_are_refused(kind: Any, field: str, value: Any) -> None:
    with pytest.raises(BadInput, match=f"{field} .*{value}"):
        kind(**{field: value})


def test_sampling_errors() -> None:
    network = Gaussian(Flow())
    with pytest.raises(BadInput, match="0 samples"):
        draw(network, torch.zeros(0, dtype=torch.int64), SHAPE, NONE)
    with pytest.raises(BadInput, match="batches of 0"):
        next(batches(network, torch.zeros(3, dtype=torch.int64), SHAPE, NONE, batch=0))
    with pytest.raises(BadInput, match="label 7"):
        draw(network, torch.tensor([0, 7]), SHAPE, NONE)

    class Broken(nn.Module):
        def forward(self, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
            return x * torch.where(labels == 1, torch.nan, 1.0).reshape(-1, 1, 1, 1)

    for sampler in ("heun", "dopri5"):
        with pytest.raises(BadInput, match=r"sample 1 .* \(1 of 3\)"):
            draw(Broken(), torch.tensor([0, 1, 0]), SHAPE, NONE, sampling=Sampling(sampler))


def test_a_tolerance_below_rounding_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unskip.models._samplers._MOST", 30)
    with pytest.raises(BadInput, match="use a larger one"):
        draw(Gaussian(Flow()), torch.tensor([0]), SHAPE, NONE, sampling=Sampling("dopri5", tolerance=1e-12))
