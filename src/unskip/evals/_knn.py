"""Weighted kNN accuracy of features, as in DINO (arXiv 2104.14294).

    cos_i = <x, x_i> / (|x| |x_i|);   score(c) = sum over the k nearest i of class c of exp(cos_i / T)

The cosines of a chunk of test samples with all training samples are one matrix product. The top k of a long row lie in
the k groups of columns with the highest maxima, so only these groups are searched. Votes are summed as integers,
because integer sums do not depend on their order: results are deterministic, also on a GPU.
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
_CHUNK_BYTES = {"cpu": 2**27, "cuda": 2**32}  # of cosines at a time
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
    """The accuracy on `test` for each k of the protocol. Features are (samples, dim); runs on the device of `train`.

    `changes` overrides settings of the protocol; record them with the numbers.
    """
    return _accuracies(train, train_labels, test, test_labels, **find(protocol, evaluate_knn).settings_with(changes))


@register(
    "knn-dino-v1",
    needs="features",
    about="kNN by cosine, votes weighted by exp(cosine / T), on the mean of all tokens: arXiv 2104.14294.",
    fractions=("knn*",),
    positive=("k", "temperature"),
    k=(10, 20, 100, 200),
    temperature=0.07,
)
@register(
    "knn-cls-v1",
    needs="features",
    about="knn-dino-v1 on the class token, normalised to mean 0 and variance 1, as DINO trains it.",
    fractions=("knn*",),
    pool="cls",
    norm="layer",
    positive=("k", "temperature"),
    k=(10, 20, 100, 200),
    temperature=0.07,
)
def evaluate_knn(train: Split, test: Split, **settings: Any) -> dict[str, float]:
    """The accuracies for the features of one block."""
    accuracies = _accuracies(train.features, train.labels, test.features, test.labels, **settings)
    return {f"knn{k}": accuracy for k, accuracy in accuracies.items()}


def check_knn(train_labels: Tensor, test_labels: Tensor) -> None:
    """Raises BadInput for sets that kNN cannot be evaluated on, so that a run can check before its first step."""
    _check_k(len(train_labels), find("knn-dino-v1").settings["k"])
    check_classes("knn", train_labels, test_labels)


def _check_k(count: int, ks: Sequence[int]) -> None:
    if count < max(ks):
        raise BadInput(
            f"knn: k is up to {max(ks)}, but there are only {count} training samples; add some, or choose a "
            'smaller k: changes={"k": (10,)}, or `unskip eval` with --change knn-dino-v1.k=10'
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
    # Padded to whole groups, with cosines of -inf below.
    unit = x.new_zeros(count + -count % _GROUP, x.shape[1])
    _unit(x, unit[:count])
    rows = max(1, _CHUNK_BYTES.get(x.device.type, 2**30) // (4 * len(unit)))
    classes = int(torch.maximum(labels.max(), wanted.max())) + 1
    correct = torch.zeros(len(k), dtype=torch.int64, device=x.device)
    for part, truth in zip(y.split(rows), wanted.split(rows), strict=True):
        cosines = _unit(part, torch.empty_like(part)) @ unit.T
        cosines[:, count:] = -torch.inf
        values, neighbours = best(cosines, max(k))
        votes = ((values - values[:, :1]) / temperature).double().exp().mul(_ONE).round().long()
        near = labels[neighbours]
        for index, nearest in enumerate(k):
            scores = votes.new_zeros(len(part), classes).scatter_add_(1, near[:, :nearest], votes[:, :nearest])
            correct[index] += (scores.argmax(1) == truth).sum()
    return {each: hits / len(y) for each, hits in zip(k, correct.tolist(), strict=True)}


def _unit(x: Tensor, out: Tensor) -> Tensor:
    """Rows at unit length; zeros stay zero. Divided by the largest entry first, so that squares stay in range."""
    tiny = torch.finfo(x.dtype).tiny
    torch.div(x, torch.linalg.vector_norm(x, torch.inf, 1, keepdim=True).clamp_min(tiny), out=out)
    return out.div_(out.norm(dim=1, keepdim=True).clamp_min(tiny))


def best(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest values of each row and their columns, in descending order. Columns are a multiple of 64."""
    groups = values.view(len(values), -1, _GROUP)
    if groups.shape[1] <= 8 * k:  # the groups would cover a large part of the row
        top = values.topk(k)
        return top.values, top.indices
    chosen = groups.amax(2).topk(k).indices  # (rows, k)
    inside = groups.gather(1, chosen[:, :, None].expand(-1, -1, _GROUP)).flatten(1)  # (rows, k * 64)
    top = inside.topk(k)
    columns = chosen.gather(1, top.indices // _GROUP) * _GROUP + top.indices % _GROUP
    return top.values, columns
