"""Squaring gives the results of an eigendecomposition, for any gap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unskip.evals._eigen import _dense, _squared, second_eigenvectors
from unskip.evals._squaring import leading

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def symmetric(values: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """A symmetric matrix with these eigenvalues, and its first eigenvector."""
    draw = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(len(values), len(values), generator=draw, dtype=torch.float64))[0]
    matrix = basis @ values.diag() @ basis.T
    return (matrix + matrix.T) / 2, basis[:, 0]


def graphs(count: int, nodes: int, seed: int) -> Tensor:
    """Graphs of two clusters with few edges between them, like TokenCut's."""
    draw = torch.Generator().manual_seed(seed)
    first = torch.arange(nodes) < nodes // 3
    probability = torch.where(first[:, None] == first[None, :], 0.4, 0.05)
    edges = torch.rand(count, nodes, nodes, generator=draw) < probability
    return edges | edges.mT | torch.eye(nodes, dtype=torch.bool)


@given(st.floats(-7.5, -0.5), st.integers(1, 4), st.integers(0, 99))
def test_vector_and_gap(exponent: float, several: int, seed: int) -> None:
    gap = 10**exponent
    values = torch.linspace(0.9 * (1 - gap), 0, 24, dtype=torch.float64)
    values[0] = 0.95
    values[1 : 1 + several] = 0.95 * (1 - gap)
    matrix, first = symmetric(values, seed)
    vectors, ratio = leading(matrix[None])
    assert float(1 - (vectors[0] @ first).abs()) < 1e-12
    assert float(1 - ratio[0]) == pytest.approx(gap, rel=0.1)


def test_a_double_eigenvalue_has_no_gap() -> None:
    values = torch.tensor([0.7, 0.7, 0.2, 0.1, 0.0], dtype=torch.float64)
    matrix, _ = symmetric(values, 0)
    vectors, ratio = leading(matrix[None])
    assert float(1 - ratio[0]) < 1e-8
    torch.testing.assert_close(matrix @ vectors[0], 0.7 * vectors[0], atol=1e-9, rtol=0)


def test_graphs_match_the_eigendecomposition() -> None:
    edges = graphs(12, 64, seed=1)
    root = ((1 - 1e-5) * edges.double().sum(2) + 1e-5 * 64).sqrt()
    vectors, gaps = _squared(edges, root, 1e-5)
    values, expected = _dense(edges, 1e-5, root)
    assert float((1 - (vectors * expected).sum(1).abs()).max()) < 1e-12
    torch.testing.assert_close(gaps, values[:, 0] - values[:, 1], rtol=0.1, atol=1e-8)


@needs_cuda
@pytest.mark.parametrize("nodes", [49, 196])
def test_a_gpu_gives_the_results_of_a_cpu(nodes: int) -> None:
    edges = graphs(16, nodes, seed=2)
    vectors, gaps, _ = second_eigenvectors(edges, 1e-5)
    gpu_vectors, gpu_gaps, _ = second_eigenvectors(edges.cuda(), 1e-5)
    sign = (vectors * gpu_vectors.cpu()).sum(1, keepdim=True).sign()
    torch.testing.assert_close(gpu_vectors.cpu() * sign, vectors, atol=1e-8, rtol=0)
    torch.testing.assert_close(gpu_gaps.cpu(), gaps, rtol=0.25, atol=1e-7)
