"""TokenCut against an implementation in scipy, graphs without a cut, and bad input."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg, ndimage
from torch import Tensor

from unskip import evals
from unskip.errors import BadInput
from unskip.evals import _eigen, _tokencut
from unskip.evals._eigen import second_eigenvectors
from unskip.evals._tokencut import GAP, boxes_of, connected


def oracle(features: Tensor, grid: tuple[int, int], tau: float = 0.2) -> tuple[Any, int, Any, float]:
    """The published algorithm for one image, in numpy and scipy."""
    x = features.double().numpy()
    x = x / numpy.maximum(numpy.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    affinity = numpy.where(x @ x.T > tau, 1.0, 1e-5)
    degrees = numpy.diag(affinity.sum(1))
    values, vectors = linalg.eigh(degrees - affinity, degrees, subset_by_index=[1, 2])
    y = vectors[:, 0]
    seed = int(numpy.argmax(numpy.abs(y)))
    side = y > y.mean()
    if not side[seed]:
        side, y = ~side, -y
    labels, _ = ndimage.label(side.reshape(grid))
    return labels == labels[numpy.unravel_index(seed, grid)], seed, y.reshape(grid), float(values[1] - values[0])


def scene(grid: tuple[int, int], noise: float, count: int = 1, seed: int = 0, dim: int = 24) -> Tensor:
    """Features of an object on a background, with noise."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = grid
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    inside = (((y - rows / 2) / (rows / 3)) ** 2 + ((x - columns / 3) / (columns / 4)) ** 2 < 1).flatten()
    two = torch.randn(count, 2, dim, generator=draw)
    pure = torch.where(inside[None, :, None], two[:, :1], two[:, 1:])
    return pure + noise * torch.randn(count, rows * columns, dim, generator=draw)


@pytest.mark.parametrize("grid", [(14, 14), (2, 20), (5, 5), (2, 2)])
@pytest.mark.parametrize("noise", [0.3, 1.0, 2.0])
def test_sure_masks_match_scipy(grid: tuple[int, int], noise: float) -> None:
    features = scene(grid, noise, count=8)
    discovery = evals.tokencut(features, grid)
    for index, each in enumerate(features):
        mask, _, y, gap = oracle(each, grid)
        assert float(discovery.gaps[index]) == pytest.approx(gap, rel=0.15, abs=1e-7)
        if not bool(discovery.sure[index]):
            continue
        assert (discovery.masks[index].numpy() == mask).all()
        assert numpy.allclose(discovery.eigenvectors[index].numpy(), y, atol=1e-7 * numpy.abs(y).max())
        rows, columns = numpy.nonzero(mask)
        box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert discovery.boxes[index].tolist() == box
    assert int(discovery.sure.sum()) >= (4 if len(features[0]) > 20 else 1)  # otherwise nothing was compared
    assert discovery.masks.dtype == torch.bool


@given(
    st.tuples(st.integers(2, 9), st.integers(2, 9)),
    st.floats(0.1, 3.0),
    st.floats(-0.3, 0.6),
    st.integers(0, 10_000),
)
@settings(max_examples=60)
def test_sure_masks_match_scipy_for_any_graph(grid: tuple[int, int], noise: float, tau: float, seed: int) -> None:
    features = scene(grid, noise, seed=seed, dim=8).double()
    discovery = evals.tokencut(features, grid, tau)
    if bool(discovery.sure[0]):
        mask, _, _, gap = oracle(features[0], grid, tau)
        assert gap > GAP / 2
        assert (discovery.masks[0].numpy() == mask).all()
        # The mask contains its seed and is connected.
        assert bool(discovery.masks[0].flatten()[discovery.seeds[0]])
        assert ndimage.label(discovery.masks[0].numpy())[1] == 1


def test_images_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    features = scene((8, 9), 1.0, count=5)
    together = evals.tokencut(features, (8, 9))
    monkeypatch.setattr("unskip.evals._tokencut._BYTES", {"cpu": 1})  # one image at a time
    alone = evals.tokencut(features, (8, 9))
    assert torch.equal(together.masks, alone.masks)
    assert torch.allclose(together.eigenvectors, alone.eigenvectors, atol=1e-8)


def test_scale_and_half_precision_do_not_change_masks() -> None:
    features = scene((8, 8), 0.5, count=3)
    discovery = evals.tokencut(features, (8, 8))
    assert torch.equal(discovery.masks, evals.tokencut(features * 7, (8, 8)).masks)
    assert torch.equal(discovery.masks, evals.tokencut(features.bfloat16(), (8, 8)).masks)


def test_graphs_without_a_cut_have_empty_masks() -> None:
    """Non-finite features, all edges, no edges: empty masks, seed -1, not sure. The last image has a cut."""
    grid = (4, 5)
    features = scene(grid, 0.3, count=5, dim=32)
    features[0, 3, 2] = float("nan")
    features[1] = 1.0
    features[2] = torch.eye(20, 32)  # only self-loops
    features[3] = 0.0  # not even self-loops
    discovery = evals.tokencut(features, grid)
    assert discovery.seeds[:4].tolist() == [-1] * 4
    assert not discovery.masks[:4].any()
    assert (discovery.boxes[:4] == 0).all()
    assert not discovery.sure[:4].any()
    assert discovery.eigenvectors[:4].isnan().all()
    assert discovery.seeds[4] >= 0
    assert (discovery.masks[4].numpy() == oracle(features[4], grid)[0]).all()


def test_graphs_without_a_cut_are_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collapsed model has only such graphs, and all of them would reach the slowest solver."""
    solved: list[int] = []

    def count(edges: Tensor, floor: float) -> Any:
        solved.append(len(edges))
        return second_eigenvectors(edges, floor)

    monkeypatch.setattr(_tokencut, "second_eigenvectors", count)
    evals.tokencut(torch.ones(5, 36, 4), (6, 6))
    assert solved == []
    mixed = torch.ones(5, 36, 4)
    mixed[2] = torch.randn(36, 4, generator=torch.Generator().manual_seed(0))
    mixed[4] = torch.nan
    discovery = evals.tokencut(mixed, (6, 6))
    assert solved == [1]
    alone = evals.tokencut(mixed[2:3], (6, 6))
    assert torch.equal(discovery.masks[2], alone.masks[0])
    assert torch.equal(discovery.boxes[2], alone.boxes[0])
    assert discovery.seeds.tolist() == [-1, -1, int(alone.seeds), -1, -1]


def test_a_graph_of_two_components_is_cut_between_them() -> None:
    grid = (6, 6)
    features = torch.zeros(1, 36, 2)
    left = (torch.arange(36) % 6) < 2
    features[0, left, 0] = 1.0
    features[0, ~left, 1] = 1.0
    discovery = evals.tokencut(features, grid)
    mask = discovery.masks[0]
    assert torch.equal(mask.flatten(), left)  # |y| is larger on the smaller side
    assert discovery.boxes[0].tolist() == [0, 0, 2, 6]
    assert bool(discovery.sure[0])


def test_components_of_equal_size_are_unsure() -> None:
    """With three equal components the second and third eigenvalue are equal, so the cut is not unique."""
    features = torch.zeros(1, 36, 3)
    features[0, torch.arange(36), torch.arange(36) // 12] = 1.0
    discovery = evals.tokencut(features, (6, 6))
    assert not bool(discovery.sure[0])
    assert float(discovery.gaps[0]) < GAP


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=40)
def test_connected_parts_and_boxes(seed: int, rows: int, columns: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    masks = torch.rand(3, rows, columns, generator=draw) < 0.6
    seeds = torch.randint(rows * columns, (3,), generator=draw)
    components = connected(masks, seeds)
    for mask, index, component, box in zip(masks, seeds, components, boxes_of(components), strict=True):
        labels, _ = ndimage.label(mask.numpy())
        label = labels[numpy.unravel_index(int(index), (rows, columns))]
        assert (component.numpy() == ((labels == label) & (label > 0))).all()
        where = ndimage.find_objects(component.numpy().astype(int))
        expected = [where[0][1].start, where[0][0].start, where[0][1].stop, where[0][0].stop] if where else [0] * 4
        assert box.tolist() == expected


# --- The eigenvector --------------------------------------------------------------------------------------------------


def graphs(count: int, nodes: int, density: float, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    edges = torch.rand(count, nodes, nodes, generator=draw) < density
    edges = edges | edges.mT
    edges.diagonal(dim1=1, dim2=2).fill_(True)
    return edges


def path(nodes: int) -> Tensor:
    """A path of nodes, with small gaps, for which Lanczos' method converges slowly."""
    indices = torch.arange(nodes)
    return ((indices[:, None] - indices).abs() <= 1)[None]


@pytest.mark.parametrize(
    "edges",
    [graphs(4, 50, 0.05), graphs(4, 40, 0.5), graphs(2, 120, 0.01), path(60), path(150), graphs(3, 20, 0.2), path(33)],
    ids=["sparse", "dense", "disconnected", "path", "long path", "small", "short path"],
)
def test_eigenvectors_solve_the_problem(edges: Tensor) -> None:
    y, gaps, root = _eigen.second_eigenvectors(edges, 1e-5)
    affinity = torch.where(edges, 1.0, torch.tensor(1e-5, dtype=torch.float64))
    degrees = affinity.sum(2)
    assert torch.allclose(root.square(), degrees)
    values = torch.stack(
        [
            torch.from_numpy(linalg.eigvalsh((d.diag() - a).numpy(), d.diag().numpy()))
            for a, d in zip(affinity, degrees, strict=True)
        ]
    )
    assert torch.allclose(gaps, values[:, 2] - values[:, 1], rtol=0.12, atol=2e-8)
    assert torch.allclose((y * degrees * y).sum(1), torch.ones(len(y), dtype=torch.float64))
    image = degrees * y - torch.einsum("nij,nj->ni", affinity, y)
    assert float((image - values[:, 1, None] * degrees * y).abs().max()) < 1e-8


def test_graphs_that_do_not_converge_are_solved_by_eigh(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, gaps, _ = _eigen.second_eigenvectors(path(80), 1e-5)
    monkeypatch.setattr(_eigen, "_STEPS", 1)
    dense, dense_gaps, _ = _eigen.second_eigenvectors(path(80), 1e-5)
    assert torch.allclose(dense * torch.sign(dense[:, :1]), expected * torch.sign(expected[:, :1]), atol=1e-8)
    assert torch.allclose(gaps, dense_gaps, rtol=0.12)


@pytest.mark.parametrize(
    ("features", "grid", "tau", "message"),
    [
        (torch.zeros(2, 17, 4), (4, 4), 0.2, "leave out the 1 tokens"),
        (torch.zeros(2, 16, 4), (4, 5), 0.2, "grid of 4 x 5"),
        (torch.zeros(16, 4), (4, 4), 0.2, "floating \\(batch, tokens, dim\\)"),
        (torch.zeros(2, 1, 4), (1, 1), 0.2, "two patches or more"),
        (torch.zeros(2, 16, 4), (4, 4), 1.5, "tau is 1.5"),
    ],
)
def test_tokencut_refuses(features: Any, grid: tuple[int, int], tau: float, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        evals.tokencut(features, grid, tau)
