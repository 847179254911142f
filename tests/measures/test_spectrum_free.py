"""Matrix-free estimates of the singular values of Jacobians, with error bars, and products with Jacobians."""

import json
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measures.matrices import DOUBLE, SHARES, free, gauss, linear, with_values
from torch import Tensor

from unskip.errors import BadInput
from unskip.measures._jacobian import Jacobian
from unskip.measures._lanczos import bidiagonalise
from unskip.measures.spectrum import jacobian_spectrum

# --- Matrix-free ------------------------------------------------------------------------------------------------------


def realistic(name: str, n: int) -> Tensor:
    """Matrices with spectra like those of Jacobians."""
    eye = torch.eye(n, dtype=DOUBLE)
    if name == "gauss":
        return gauss(n, n, 1)
    if name == "wide":
        return gauss(n - n // 20, n, 1)
    if name == "product":
        return gauss(n, n, 1) @ gauss(n, n, 2)
    if name == "identity and low rank":
        return eye + 4 * gauss(n, n // 16, 1) @ gauss(n // 16, n, 2)
    if name == "residual layers":
        return torch.linalg.multi_dot([eye + 0.5 * gauss(n, n, seed) for seed in range(6)])
    return with_values(torch.logspace(0, -2, n, dtype=DOUBLE))


NAMES = ["gauss", "wide", "product", "identity and low rank", "residual layers", "decades"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("identity and low rank", "decades") else pytest.mark.full)
        for name in NAMES
    ],
)
def test_within_five_percent_of_exact(name: str) -> None:
    # The spectrum of a product is steep at its lower end, where one of 500 singular values is a few percent.
    a = realistic(name, 800 if name == "product" else 500)
    spectrum = free(a, probes=64, steps=128)
    exact = jacobian_spectrum(*linear(a), exact=True)
    assert not spectrum.exact
    assert spectrum.values is None
    assert spectrum.sigma_max == pytest.approx(exact.sigma_max, rel=1e-6)
    assert spectrum.sigma_max <= exact.sigma_max * (1 + 1e-12)
    assert spectrum.stable_rank == pytest.approx(exact.stable_rank, rel=0.03)
    assert abs(spectrum.stable_rank - exact.stable_rank) <= 2 * spectrum.stable_rank_error + 1e-9
    for share in SHARES:
        assert spectrum.quantiles[share] == pytest.approx(exact.quantiles[share], rel=0.05)
        assert abs(spectrum.quantiles[share] - exact.quantiles[share]) <= spectrum.errors[share]
    assert spectrum.sigma_min_bound is not None
    assert exact.sigma_min is not None
    assert spectrum.sigma_min_bound >= exact.sigma_min * (1 - 1e-9)
    assert spectrum.condition <= exact.condition * (1 + 1e-9)
    assert spectrum.null == exact.null


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_within_five_percent_of_exact_with_the_defaults(name: str) -> None:
    a = realistic(name, 3000)
    exact, result = jacobian_spectrum(*linear(a), exact=True), free(a)
    assert result.sigma_max == pytest.approx(exact.sigma_max, rel=1e-6)
    for share in SHARES:
        assert math.isfinite(result.errors[share])
        assert result.quantiles[share] == pytest.approx(exact.quantiles[share], rel=0.05)


def test_copies_of_a_multiple_singular_value_are_merged() -> None:
    """Rounding adds slightly different copies of it to the Krylov space; it is still one step of F."""
    a = realistic("identity and low rank", 1200)
    spectrum = free(a, probes=2, steps=128)
    assert [spectrum.quantiles[share] for share in SHARES] == pytest.approx([1, 1, 1])
    assert max(spectrum.errors.values()) < 1e-9


def test_the_coverage_of_error_bars() -> None:
    """About 95%; of 16 draws of 3 quantiles at least 90% must be inside, and the bars must not be too wide."""
    inside, tight = 0, 0
    for seed in range(16):
        a = gauss(200, 200, seed)
        values = torch.linalg.svdvals(a)
        spectrum = free(a, probes=4, steps=60, generator=torch.Generator().manual_seed(seed))
        for share in SHARES:
            error = abs(spectrum.quantiles[share] - float(torch.quantile(values, share)))
            inside += error <= spectrum.errors[share]
            tight += error > 0.2 * spectrum.errors[share]
    assert inside >= 43
    assert tight >= 16


def test_unresolved_quantiles_are_marked_as_bounds() -> None:
    """40 steps cannot resolve twelve decades, so the low quantiles are bounds."""
    sigma = torch.logspace(0, -12, 400, dtype=DOUBLE)
    spectrum = free(with_values(sigma), probes=8, steps=40)
    for share in (0.1, 0.5):
        assert math.isinf(spectrum.errors[share])
        assert spectrum.quantiles[share] >= float(torch.quantile(sigma, share))
    assert "10% <= " in str(spectrum)
    assert spectrum.to_dict()["errors"]["0.1"] is None


def test_an_invariant_krylov_space_is_exact() -> None:
    """With three distinct values the space is invariant after three steps, and all numbers are exact."""
    sigma = torch.tensor([3.0] * 20 + [1.0] * 60 + [0.5] * 20, dtype=DOUBLE)
    spectrum = free(with_values(sigma), probes=40, steps=50)
    assert [round(spectrum.quantiles[share], 9) for share in SHARES] == [0.5, 1.0, 3.0]
    assert spectrum.sigma_min_bound == pytest.approx(0.5)
    assert spectrum.condition == pytest.approx(6)
    assert spectrum.stable_rank == pytest.approx((20 * 9 + 60 + 20 * 0.25) / 9, rel=0.05)


def test_null_directions_do_not_enter_the_bound() -> None:
    sigma = torch.cat([torch.linspace(1, 2, 80), torch.zeros(20)]).to(DOUBLE)
    a = with_values(sigma)
    with_null = free(a, null=20, steps=100)
    assert with_null.sigma_min_bound is not None
    assert 1 - 1e-9 <= with_null.sigma_min_bound <= 1.5
    assert 1.3 <= with_null.condition <= 2 + 1e-9
    without = free(a, steps=100)
    assert without.sigma_min_bound == pytest.approx(0, abs=1e-9)
    assert without.condition > 1e12
    assert without.quantiles[0.1] == pytest.approx(0, abs=1e-9)


def test_the_stable_rank_is_accurate_with_one_strong_direction() -> None:
    """A plain Hutchinson estimate would be off by sqrt(2 / 16) here."""
    a = gauss(300, 300, 0) * 0.01
    a[0, 0] += 50
    exact, result = jacobian_spectrum(*linear(a)), free(a, probes=1, steps=20)
    assert result.stable_rank == pytest.approx(exact.stable_rank, rel=1e-4)


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 9), st.integers(1, 4), st.integers(2, 9))
def test_small_matrices(rows: int, columns: int, seed: int, probes: int, steps: int) -> None:
    a = gauss(rows, columns, seed)
    if seed % 3 == 0:
        a[:, 0] = 0
    exact, result = jacobian_spectrum(*linear(a)), free(a, probes=probes, steps=steps)
    assert result.sigma_max <= exact.sigma_max * (1 + 1e-9) + 1e-15
    if steps >= min(rows, columns) + 1:
        assert result.sigma_max == pytest.approx(exact.sigma_max, rel=1e-6, abs=1e-12)
    assert str(result)
    json.dumps(result.to_dict(), allow_nan=False)


def test_bidiagonalise_gives_orthonormal_bases() -> None:
    a = realistic("identity and low rank", 200)
    (result,) = bidiagonalise(lambda v: v @ a.mT, lambda u: u @ a, gauss(1, 200, 9), 200, 80, 1e-13)
    k = len(result.bidiagonal)
    assert k < 80  # the number of distinct values is about 25
    eye = torch.eye(k, dtype=DOUBLE)
    assert torch.allclose(result.right @ result.right.mT, eye, atol=1e-12)
    assert torch.allclose(result.left @ result.left.mT, eye, atol=1e-12)
    assert torch.allclose(a @ result.right.mT, result.left.mT @ result.bidiagonal, atol=1e-12)
    assert torch.equal(result.bidiagonal, result.bidiagonal.triu().tril(1))


# --- Products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("f", [torch.sin, lambda x: x @ gauss(7, 4, 0), lambda x: x.softmax(-1).cumsum(-1)])
def test_products_match_the_matrix(f: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 7, dtype=DOUBLE)
    jacobian = Jacobian(f, x)
    wanted = torch.autograd.functional.jacobian(f, x).reshape(jacobian.shape)
    assert torch.allclose(jacobian.matrix(4), wanted)
    v, w = torch.randn(5, jacobian.shape[1], dtype=DOUBLE), torch.randn(5, jacobian.shape[0], dtype=DOUBLE)
    assert torch.allclose(jacobian.times(v), v @ wanted.T)
    assert torch.allclose(jacobian.transposed_times(w), w @ wanted)
    assert torch.allclose(jacobian.times(v[:1]), v[:1] @ wanted.T)


def test_without_batching() -> None:
    """Operations that torch cannot batch run one vector at a time."""
    x = torch.randn(6, dtype=DOUBLE)

    class NotBatched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, z: Tensor) -> Tensor:
            return z.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad * float(grad.sum().item() * 0 + 2)  # .item() has no batched form

    jacobian = Jacobian(lambda z: NotBatched.apply(z), x)
    assert torch.equal(jacobian.matrix(3), 2 * torch.eye(6, dtype=DOUBLE))
    assert not jacobian.batched


def test_a_backward_pass_with_a_wrong_derivative_is_refused() -> None:
    """It raises no error, so the products have to check it."""

    class Detached(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad + grad.detach()

    x = torch.ones(4, dtype=DOUBLE)
    with pytest.raises(BadInput, match="not differentiable"):
        jacobian_spectrum(lambda z: Detached.apply(z), x, exact=False)
    assert jacobian_spectrum(lambda z: Detached.apply(z), x).sigma_max == pytest.approx(2)


def test_a_backward_pass_without_a_derivative_is_refused() -> None:
    class OnceDifferentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad * 2

    x = torch.ones(4, dtype=DOUBLE)
    with pytest.raises(BadInput, match="second derivatives"):
        jacobian_spectrum(lambda z: OnceDifferentiable.apply(z), x, exact=False)
    assert jacobian_spectrum(lambda z: OnceDifferentiable.apply(z), x).sigma_max == pytest.approx(2)
