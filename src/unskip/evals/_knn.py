"""Weighted kNN accuracy of features, as in DINO (arXiv 2104.14294).

    cos_i = <x, x_i> / (|x| |x_i|);   score(c) = sum over the k nearest i of class c of exp(cos_i / T)

The cosines of a chunk of test samples with all training samples are one matrix product. The best k of a long row are
found in one more pass over it: a value among the best k is in one of the k groups with the highest maxima, so only
those groups are searched. Votes are summed as integers, in which the order of a sum does not matter: the same features
give the same numbers on a GPU too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unskip.errors import BadInput
from unskip.evals._input import check_classes, checked, full_precision
from unskip.evals._registry import protocol as find
from unskip.evals._registry import register
from unskip.evals._split import Split

_GROUP = 64
_CHUNK_BYTES = {"cpu": 2**27, "cuda": 2**32}  # of cosines held at a time
_ONE = 2**40  # the vote of the nearest neighbour as an integer


def knn(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor,
    test_labels: Tensor,
    protocol: str = "knn-dino-v1",
    *,
    changes: Mapping[str, Any] | None = None,
) -> dict[int, float]:
    """The accuracy on `test` for each k of the protocol. Features are (samples, dim); it runs where `train` lies.

    `changes` sets some of the protocol's settings otherwise; record them with the numbers.
    """
    return _accuracies(train, train_labels, test, test_labels, **find(protocol, evaluate_knn).settings_with(changes))


@register(
    "knn-dino-v1",
    needs="features",
    about="kNN by cosine, each neighbour voting with exp(cosine / T), on the mean of all tokens: arXiv 2104.14294.",
    fractions=("knn*",),
    positive=("k", "temperature"),
    k=(10, 20, 100, 200),
    temperature=0.07,
)
@register(
    "knn-cls-v1",
    needs="features",
    about="The same on the class token, brought to mean 0 and variance 1: what DINO trains.",
    fractions=("knn*",),
    pool="cls",
    norm="layer",
    positive=("k", "temperature"),
    k=(10, 20, 100, 200),
    temperature=0.07,
)
def evaluate_knn(train: Split, test: Split, **settings: Any) -> dict[str, float]:
    """Of the features of one block."""
    accuracies = _accuracies(train.features, train.labels, test.features, test.labels, **settings)
    return {f"knn{k}": accuracy for k, accuracy in accuracies.items()}


def check_knn(train_labels: Tensor, test_labels: Tensor, protocol: str = "knn-dino-v1") -> None:
    """Raises BadInput for sets that kNN cannot be evaluated on: a run asks before its first step."""
    _check_k(len(train_labels), find(protocol, evaluate_knn).settings["k"])
    check_classes("knn", train_labels, test_labels)


def _check_k(count: int, ks: Sequence[int]) -> None:
    if count < max(ks):
        raise BadInput(
            f"knn: k is up to {max(ks)}, and there are {count} training samples; take more, or a "
            'smaller k: changes={"k": (10,)}, or --change knn-dino-v1.k=10 of `unskip eval`'
        )


@full_precision
@torch.no_grad()
def _accuracies(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, k: Sequence[int], temperature: float
) -> dict[int, float]:
    x, labels, y, wanted = checked("knn", train, train_labels, test, test_labels)
    if x.ndim != 2:
        raise BadInput(f"knn: features must be (samples, dim), got {tuple(x.shape)}")
    count = len(x)
    _check_k(count, k)
    # Whole groups: the rows that are added can never be neighbours.
    unit = x.new_zeros(count + -count % _GROUP, x.shape[1])
    _unit(x, unit[:count])
    x = unit
    rows = max(1, _CHUNK_BYTES.get(x.device.type, 2**30) // (4 * len(x)))
    classes = int(torch.maximum(labels.max(), wanted.max())) + 1
    right = torch.zeros(len(k), dtype=torch.int64, device=x.device)
    for part, truth in zip(y.split(rows), wanted.split(rows), strict=True):
        cosines = _unit(part, torch.empty_like(part)) @ x.T
        cosines[:, count:] = -torch.inf
        values, places = best(cosines, max(k))
        votes = ((values - values[:, :1]) / temperature).double().exp().mul(_ONE).round().long()
        classes_near = labels[places]
        for index, nearest in enumerate(k):
            scores = votes.new_zeros(len(part), classes).scatter_add_(1, classes_near[:, :nearest], votes[:, :nearest])
            right[index] += (scores.argmax(1) == truth).sum()
    return {each: hits / len(y) for each, hits in zip(k, right.tolist(), strict=True)}


def _unit(x: Tensor, out: Tensor) -> Tensor:
    """Rows at length 1, zeros as zeros. By their largest entry first: squares of huge or tiny ones leave the range."""
    tiny = torch.finfo(x.dtype).tiny
    torch.div(x, torch.linalg.vector_norm(x, torch.inf, 1, keepdim=True).clamp_min(tiny), out=out)
    return out.div_(out.norm(dim=1, keepdim=True).clamp_min(tiny))


def best(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest of each row (rows, columns) and their columns, falling. Columns come in whole groups of 64."""
    groups = values.view(len(values), -1, _GROUP)
    if groups.shape[1] <= 8 * k:  # the groups would hold a large part of the row
        top = values.topk(k)
        return top.values, top.indices
    chosen = groups.amax(2).topk(k).indices  # (rows, k)
    inside = groups.gather(1, chosen[:, :, None].expand(-1, -1, _GROUP)).flatten(1)  # (rows, k * 64)
    top = inside.topk(k)
    columns = chosen.gather(1, top.indices // _GROUP) * _GROUP + top.indices % _GROUP
    return top.values, columns
