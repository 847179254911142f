"""Exact singular values of Jacobians: known matrices, the printed form, and bad input."""

import json
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.measures.matrices import DOUBLE, SHARES, block, free, gauss, linear, with_values
from torch import nn

from unskip.errors import BadInput
from unskip.measures.spectrum import jacobian_spectrum

# --- Exact ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 20))
def test_the_spectrum_of_a_linear_map(rows: int, columns: int, seed: int) -> None:
    a = gauss(rows, columns, seed)
    spectrum = jacobian_spectrum(*linear(a))
    values = torch.linalg.svdvals(a)
    assert spectrum.exact
    assert torch.allclose(spectrum.values, values)
    assert spectrum.shape == (rows, columns)
    assert spectrum.sigma_max == pytest.approx(float(values[0]))
    assert spectrum.sigma_min == pytest.approx(float(values[-1]))
    assert spectrum.condition == pytest.approx(float(values[0] / values[-1]))
    assert spectrum.stable_rank == pytest.approx(float(a.square().sum() / values[0] ** 2))
    assert spectrum.null == max(0, columns - rows)
    padded = torch.cat([values, torch.zeros(max(0, columns - rows), dtype=DOUBLE)])
    for share in SHARES:
        assert spectrum.quantiles[share] == pytest.approx(float(torch.quantile(padded, share)))


def test_a_transformer_block_against_torch() -> None:
    model, x = block(), torch.randn(5, 12, dtype=DOUBLE)
    wanted = torch.autograd.functional.jacobian(lambda z: model(z[None])[0], x).reshape(60, 60)
    spectrum = jacobian_spectrum(lambda z: model(z[None])[0], x)
    assert torch.allclose(spectrum.values, torch.linalg.svdvals(wanted))
    assert all(p.grad is None for p in model.parameters())
    assert not x.requires_grad


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_the_callers_context_does_not_matter(context: Callable[[], object]) -> None:
    model, x = block(), torch.randn(5, 12, dtype=DOUBLE)
    plain = jacobian_spectrum(lambda z: model(z[None])[0], x)
    with context():  # type: ignore[attr-defined]
        inside = jacobian_spectrum(lambda z: model(z[None])[0], x)
        outside = jacobian_spectrum(lambda z: model(z[None])[0], x, exact=False)
    assert inside.sigma_max == pytest.approx(plain.sigma_max)
    assert outside.sigma_max == pytest.approx(plain.sigma_max)


def test_layer_norm_is_singular_by_construction() -> None:
    norm, x = nn.LayerNorm(8, eps=0.0).double(), torch.randn(3, 8, dtype=DOUBLE)
    spectrum = jacobian_spectrum(norm, x, null=6)  # the mean and the scale of each of three tokens
    # In all other directions of a token its factor is 1 / std.
    std = x.var(-1, correction=0).sqrt()
    assert spectrum.condition == pytest.approx(float(std.max() / std.min()))
    assert spectrum.null_max == pytest.approx(0, abs=1e-12)
    assert jacobian_spectrum(norm, x).condition == math.inf


def test_null_max_is_the_largest_value_counted_as_null() -> None:
    a = torch.diag(torch.tensor([4.0, 2.0, 1e-3], dtype=DOUBLE))
    spectrum = jacobian_spectrum(*linear(a), null=1)
    assert spectrum.null_max == pytest.approx(1e-3)
    assert spectrum.condition == pytest.approx(2)
    assert spectrum.sigma_min == pytest.approx(2)


def test_rounding_is_not_a_condition_number() -> None:
    sigma = torch.logspace(0, -20, 30, dtype=DOUBLE)
    spectrum = jacobian_spectrum(*linear(with_values(sigma)))
    assert spectrum.condition == math.inf
    assert spectrum.resolution == pytest.approx(math.sqrt(30) * torch.finfo(DOUBLE).eps)
    reached = jacobian_spectrum(*linear(with_values(torch.logspace(0, -10, 30, dtype=DOUBLE))))
    assert reached.condition == pytest.approx(1e10, rel=1e-3)


def test_a_zero_jacobian() -> None:
    for exact in (True, False):
        spectrum = jacobian_spectrum(lambda x: x * 0, torch.ones(5, dtype=DOUBLE), exact=exact)
        assert spectrum.sigma_max == 0
        assert math.isnan(spectrum.condition)
        assert math.isnan(spectrum.stable_rank)
        assert set(spectrum.quantiles.values()) == {0.0}
        json.dumps(spectrum.to_dict(), allow_nan=False)
        assert str(spectrum)


# --- Printed form and bad input ---------------------------------------------------------------------------------------


def test_str_and_to_dict() -> None:
    a = torch.diag(torch.tensor([4.0, 2.0, 1.0], dtype=DOUBLE))
    assert str(jacobian_spectrum(*linear(a))) == (
        "3 x 3 exact float64: sigma_max 4, sigma_min 1, condition 4 outside of 0 null directions, stable rank 1.312, "
        "quantiles 10% 1.2, 50% 2, 90% 3.6"
    )
    text = str(free(a))
    assert "matrix-free" in text
    assert "sigma_min <= 1, condition >= 4" in text
    data = jacobian_spectrum(*linear(a)).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["shape"] == [3, 3]
    assert data["quantiles"]["0.5"] == pytest.approx(2)
    assert "values" not in data


def test_bad_input_is_named() -> None:
    x = torch.ones(3, dtype=DOUBLE)
    with pytest.raises(BadInput, match=r"torch.float16 \(3,\)"):
        jacobian_spectrum(torch.sin, x.half())
    with pytest.raises(BadInput, match=r"got list"):
        jacobian_spectrum(torch.sin, [1.0])  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"x has 3 non-finite"):
        jacobian_spectrum(torch.sin, x * math.nan)
    with pytest.raises(BadInput, match=r"f\(x\) has 3 non-finite"):
        jacobian_spectrum(lambda z: z / 0, x)
    with pytest.raises(BadInput, match="got tuple"):
        jacobian_spectrum(lambda z: (z, z), x)  # type: ignore[arg-type, return-value]
    with pytest.raises(BadInput, match=r"without detach"):
        jacobian_spectrum(lambda z: z.detach() * 2, x)
    with pytest.raises(BadInput, match="eval"):
        jacobian_spectrum(nn.Dropout(0.5), torch.ones(50, dtype=DOUBLE))
    with pytest.raises(BadInput, match="null is 4"):
        jacobian_spectrum(torch.sin, x, null=4)
    with pytest.raises(BadInput, match="steps must be"):
        jacobian_spectrum(torch.sin, x, steps=1)
    with pytest.raises(BadInput, match="probes must be"):
        jacobian_spectrum(torch.sin, x, probes=0, exact=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("exact", [True, False])
def test_the_same_on_a_gpu(exact: bool) -> None:
    model, x = block(), torch.randn(5, 12, dtype=DOUBLE)
    cpu = jacobian_spectrum(lambda z: model(z[None])[0], x, exact=exact)
    model = model.cuda()
    gpu = jacobian_spectrum(lambda z: model(z[None])[0], x.cuda(), exact=exact)
    assert gpu.sigma_max == pytest.approx(cpu.sigma_max)
    assert list(gpu.quantiles.values()) == pytest.approx(list(cpu.quantiles.values()), rel=1e-6)
