"""kNN: comparison with scikit-learn, chunks of any size, and bad input."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier

from unskip import evals
from unskip.errors import BadInput
from unskip.evals import _knn
from unskip.evals._knn import best

KS = (10, 20, 100, 200)


def blobs(count: int, dim: int = 8, classes: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    return centres[labels] + 1.5 * torch.randn(count, dim, generator=draw), labels


@pytest.mark.parametrize("dim", [3, 16])
def test_knn_matches_scikit_learn(dim: int) -> None:
    x, labels = blobs(600, dim)
    y, truth = blobs(150, dim, seed=1)
    accuracies = evals.knn(x, labels, y, truth)
    assert list(accuracies) == list(KS)
    for k, accuracy in accuracies.items():
        peer = KNeighborsClassifier(k, metric="cosine", weights=lambda far: numpy.exp((1 - far) / 0.07))
        expected = peer.fit(x.numpy(), labels.numpy()).score(y.numpy(), truth.numpy())
        assert accuracy == pytest.approx(expected, abs=1e-9)
        assert 0.3 < accuracy < 1  # otherwise the comparison would be trivial


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 640 * 7, 2**40])
def test_the_chunk_size_does_not_matter(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = blobs(600)
    y, truth = blobs(50, seed=1)
    whole = evals.knn(x, labels, y, truth)
    monkeypatch.setitem(_knn._CHUNK_BYTES, "cpu", chunk_bytes)
    assert evals.knn(x, labels, y, truth) == whole


@pytest.mark.parametrize("scale", [1e-30, 3.0, 1e30])
def test_huge_and_tiny_features_have_the_same_neighbours(scale: float) -> None:
    """The norm of features does not matter, even if their squares are out of the range of float32."""
    x, labels = blobs(300)
    y, truth = blobs(60, seed=1)
    assert evals.knn(x * scale, labels, y * scale, truth) == evals.knn(x, labels, y, truth)
    assert evals.knn(x, labels, torch.zeros(2, 8), truth[:2])[10] <= 1  # zeros are allowed


def test_autocast_does_not_change_results() -> None:
    x, labels = blobs(600)
    y, truth = blobs(400, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        accuracies = evals.knn(x, labels, y, truth)
        probe = evals.linear_probe(x, labels, y, truth, "probe-decayed-v1")
    assert accuracies == evals.knn(x, labels, y, truth)
    assert probe == evals.linear_probe(x, labels, y, truth, "probe-decayed-v1")


def test_changed_settings_are_used() -> None:
    x, labels = blobs(300)
    y, truth = blobs(200, seed=1)
    accuracies = evals.knn(x, labels, y, truth, changes={"k": (1,)})
    peer = KNeighborsClassifier(1, metric="cosine").fit(x.numpy(), labels.numpy())
    assert accuracies == {1: pytest.approx(peer.score(y.numpy(), truth.numpy()))}
    uniform = KNeighborsClassifier(200, metric="cosine").fit(x.numpy(), labels.numpy())
    warm = evals.knn(x, labels, y, truth, changes={"temperature": 1e4})  # high enough for equal votes
    assert warm[200] == pytest.approx(uniform.score(y.numpy(), truth.numpy()), abs=0.011)  # up to ties


@given(st.integers(1, 9), st.integers(1, 60), st.integers(1, 7), st.integers(0, 10))
def test_best_matches_a_full_sort(rows: int, groups: int, k: int, seed: int) -> None:
    values = torch.randn(rows, groups * 64, generator=torch.Generator().manual_seed(seed))
    best_values, columns = best(values, k)
    expected = values.sort(1, descending=True)
    assert torch.equal(best_values, expected.values[:, :k])
    assert torch.equal(columns, expected.indices[:, :k])


def test_fewer_samples_than_neighbours() -> None:
    x, labels = blobs(199)
    with pytest.raises(BadInput, match=r"200.*199 training"):
        evals.knn(x, labels, x, labels)


def test_bad_features_and_labels_are_refused() -> None:
    x, labels = blobs(300)
    broken = x.clone()
    broken[17, 3] = torch.nan
    with pytest.raises(BadInput, match=r"test .* nan at \(17, 3\)"):
        evals.knn(x, labels, broken, labels)
    with pytest.raises(BadInput, match=r"train has .* non-finite"):  # in float32
        evals.knn(x.double() * 1e300, labels, x, labels)
    with pytest.raises(BadInput, match="class 4"):
        evals.knn(x[labels < 4], labels[labels < 4], x, labels)
    with pytest.raises(BadInput, match="300 whole numbers"):
        evals.knn(x, labels[:-1], x, labels)
    with pytest.raises(BadInput, match="classes count from 0"):
        evals.knn(x, labels - 1, x, labels)
    with pytest.raises(BadInput, match="must be the same"):
        evals.knn(x, labels, x[:, :5], labels)
    with pytest.raises(BadInput, match="floating features"):
        evals.knn(x.long(), labels, x, labels)
    with pytest.raises(BadInput, match=r"must be \(samples, dim\)"):
        evals.knn(x[None], labels, x[None], labels)
    with pytest.raises(BadInput, match="knn-dino-v1"):
        evals.knn(x, labels, x, labels, protocol="knn-dino")
    with pytest.raises(BadInput, match="rank-v1"):
        evals.knn(x, labels, x, labels, protocol="rank-v1")
