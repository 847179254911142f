"""Eigenbases of SOAP: blocked orthogonalisation against QR, orthogonality in hard cases, and the refresh schedule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unskip.optim import _basis
from unskip.optim._basis import eigenbasis, inverse_lower, orthonormal_rows_, refresh
from unskip.optim._refresh_schedule import STEPS_PER_CHUNK, WAIT, Chunk, Side, refresh_schedule


def defect(basis: Tensor) -> float:
    basis = basis.double()
    return float((basis @ basis.mT - torch.eye(basis.shape[-1])).abs().max())


def random_basis(rows: int, size: int) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, size, size, dtype=torch.float64)).Q


def statistics(kind: str, size: int) -> tuple[Tensor, Tensor]:
    """The statistics L and the initial basis of the iteration, (2, n, n) each."""
    if kind == "zero":
        return torch.zeros(2, size, size, dtype=torch.float64), random_basis(2, size)
    if kind == "low rank":
        thin = torch.randn(2, size, 5, dtype=torch.float64)
        return thin @ thin.mT, eigenbasis(thin @ thin.mT)
    vectors = random_basis(2, size)
    spectrum = vectors * torch.logspace(0, -9, size, dtype=torch.float64) @ vectors.mT
    if kind == "near":
        return spectrum, vectors.mT.contiguous()
    if kind == "far":
        return spectrum, random_basis(2, size)
    scale = torch.logspace(0, -4, size, dtype=torch.float64)[:, None]  # "moving": ten gradients after the first
    gradients = [scale * torch.randn(2, size, size // 4, dtype=torch.float64) for _ in range(11)]
    first = 0.05 * gradients[0] @ gradients[0].mT
    total = first
    for gradient in gradients[1:]:
        total = 0.95 * total + 0.05 * gradient @ gradient.mT
    return total, eigenbasis(first)


KINDS = ["zero", "low rank", "near", "far", "moving"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [30, 150])
@pytest.mark.parametrize("blocked", [False, True])
def test_a_refreshed_basis_is_orthogonal(kind: str, size: int, blocked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_basis, "_fast_float64", lambda device: blocked)
    matrix, basis = statistics(kind, size)
    result = refresh(matrix.float(), basis.float().contiguous())
    assert not result.held.any()
    assert defect(result.basis) < 2e-4
    if kind != "far":
        assert defect(result.basis) < 2e-6
    assert (result.order.sort(-1).values == torch.arange(size)).all()


def unused_tokens(tokens: int, used: int, dim: int) -> Tensor:
    """The statistics of an embedding's gradient, (1, tokens, tokens), of rank `dim` at most."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.zeros(1, tokens, dim)
    gradient[:, torch.randperm(tokens, generator=generator)[:used]] = torch.randn(1, used, dim, generator=generator)
    return gradient @ gradient.mT


@pytest.mark.parametrize("sizes", [(256, 80, 32), (704, 202, 64)], ids=str)
def test_the_statistics_of_an_embedding_with_unused_tokens_have_a_basis(sizes: tuple[int, int, int]) -> None:
    """MKL's solver does not converge for these in float32."""
    matrix = unused_tokens(*sizes)
    basis = eigenbasis(matrix)
    assert basis.dtype == torch.float32
    assert defect(basis) < 1e-5
    quotients = (basis @ matrix @ basis.mT)[0].double()
    assert (quotients - quotients.diagonal().diag()).abs().max() < 1e-5 * quotients.max()
    assert (quotients.diagonal()[: sizes[2]] > 1e-3 * quotients.max()).all()


@pytest.mark.parametrize("float64", [True, False], ids=["works", "fails too"])
def test_only_matrices_whose_decomposition_fails_are_decomposed_in_float64(
    float64: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three fails: it gets the same vectors, or the identity where float64 fails as well."""
    matrix = torch.randn(3, 6, 6)
    matrix = matrix @ matrix.mT
    matrix[1, 0, 1:] = matrix[1, 1:, 0] = 0
    expected, solve, calls = eigenbasis(matrix), torch.linalg.eigh, []

    def failing(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append((len(x), x.dtype))
        if (x[:, 0, 1] == 0).any() and not (float64 and x.dtype == torch.float64):
            raise torch.linalg.LinAlgError("failed to converge")
        return solve(x)

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    basis = eigenbasis(matrix)
    assert calls == [(3, torch.float32), *[(1, torch.float32)] * 2, (1, torch.float64), (1, torch.float32)]
    assert torch.equal(basis[[0, 2]], expected[[0, 2]])
    if float64:
        assert (basis[1] @ expected[1].T).abs().allclose(torch.eye(6), atol=1e-4)
    else:
        assert torch.equal(basis[1], torch.eye(6))


@pytest.mark.parametrize("panel", [7, 16, 64])
@pytest.mark.parametrize("size", [5, 16, 33, 64])
def test_blocked_orthogonalisation_matches_qr(panel: int, size: int) -> None:
    rows = torch.randn(3, size, size, dtype=torch.float64) * torch.logspace(0, -3, size, dtype=torch.float64)[:, None]
    ours, theirs = orthonormal_rows_(rows.clone(), panel), torch.linalg.qr(rows.mT).Q.mT
    signs = (ours * theirs).sum(-1, keepdim=True).sign()
    assert (ours - signs * theirs).abs().max() < 1e-9


@settings(max_examples=25)
@given(st.integers(1, 100), st.integers(0, 1000))
def test_the_inverse_of_a_triangular_matrix(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(2, size, size, generator=generator, dtype=torch.float64).tril()
    factor.diagonal(dim1=-2, dim2=-1).abs_().add_(size**0.5)
    inverse = inverse_lower(factor)
    assert torch.allclose(inverse @ factor, torch.eye(size, dtype=torch.float64).expand(2, -1, -1), atol=1e-8)
    assert torch.equal(inverse, inverse.tril())


@pytest.mark.parametrize("blocked", [False, True])
def test_refreshes_converge_to_the_eigenvectors(blocked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_basis, "_fast_float64", lambda device: blocked)
    values = torch.tensor([5.0, 4.0, 2.0, 1.0, 0.1])
    vectors = random_basis(1, 5).float()
    matrix, basis = vectors * values @ vectors.mT, random_basis(1, 5).float()
    for _ in range(60):
        basis = refresh(matrix, basis).basis
    assert torch.allclose((basis @ matrix @ basis.mT)[0], values.diag(), atol=1e-5)


def test_the_order_has_the_previous_index_of_each_vector() -> None:
    matrix = torch.diag(torch.tensor([1.0, 3.0, 2.0])).double()[None]
    result = refresh(matrix, torch.eye(3).double()[None])
    assert result.order.tolist() == [[1, 2, 0]]
    assert torch.allclose(result.basis.abs(), torch.eye(3).double()[result.order])


def test_a_basis_with_zero_statistics_does_not_change() -> None:
    basis = random_basis(2, 6)
    result = refresh(torch.zeros(2, 6, 6, dtype=torch.float64), basis)
    assert result.order.tolist() == [list(range(6))] * 2
    assert torch.allclose((result.basis * basis).sum(-1).abs(), torch.ones(2, 6).double())


def test_a_refresh_without_an_orthogonal_result_keeps_the_old_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails for one of two matrices, which keeps its basis; the other is refreshed."""
    matrix, basis = statistics("moving", 20)

    def broken(rows: Tensor) -> Tensor:
        result = orthonormal_rows_(rows)
        result[0, 3] += 0.1
        return result

    monkeypatch.setattr(_basis, "_fast_float64", lambda device: True)
    monkeypatch.setattr(_basis, "orthonormal_rows_", broken)
    result = refresh(matrix, basis)
    assert result.held.tolist() == [True, False]
    assert torch.equal(result.basis[0], basis[0])
    assert result.order[0].tolist() == list(range(20))
    assert not torch.equal(result.basis[1], basis[1])


# --- The refresh schedule ---------------------------------------------------------------------------------------------

many_sides = st.lists(st.tuples(st.integers(2, 400), st.integers(1, 30)), min_size=1, max_size=8).map(
    lambda pairs: [Side(i, "left", size, rows) for i, (size, rows) in enumerate(pairs)]
)


@given(many_sides, st.integers(1, 25), st.booleans())
def test_every_basis_is_refreshed_once_per_interval(sides: list[Side], every: int, stagger: bool) -> None:
    steps = refresh_schedule(sides, every, stagger)
    assert len(steps) == every
    seen = sorted(
        (chunk.side.stack, row) for chunks in steps for chunk in chunks for row in range(chunk.start, chunk.stop)
    )
    assert seen == sorted((side.stack, row) for side in sides for row in range(side.rows))
    if not stagger:
        assert not any(steps[1:])


@given(many_sides, st.integers(STEPS_PER_CHUNK, 25))
def test_refreshes_are_spread_evenly_over_steps(sides: list[Side], every: int) -> None:
    def cost(chunks: list[Chunk]) -> int:
        work = sum((chunk.stop - chunk.start) * chunk.side.size**3 for chunk in chunks)
        return work + sum(WAIT * size for size in {chunk.side.size for chunk in chunks})

    steps = refresh_schedule(sides, every)
    sizes = {side.size for side in sides}
    share = sum(cost([Chunk(side, 0, side.rows) for side in sides if side.size == size]) for size in sizes)
    share /= every // STEPS_PER_CHUNK
    # A part costs at most 1.5 shares and one row, which bounds the most and the least expensive step.
    limit = 2.5 * share + max(sizes) ** 3 + WAIT * max(sizes) * (every // STEPS_PER_CHUNK)
    assert max(map(cost, steps)) <= limit
