"""Effective rank of features. See `unskip.measures.rank` for the formulas.

Features collapse in two ways. If images become similar, the rank of their pooled features falls (rank-v1). If the
patches of each image become similar while images still differ, as in attention without skips (arXiv 2103.03404), the
rank of the patches within an image falls (patchrank-v1).
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from torch import Tensor

from unskip.evals._registry import protocol, register
from unskip.evals._split import Split
from unskip.measures import effective_rank, rank_entropy

# Patches whose relative difference is smaller count as equal. Rounding in a float32 network is 3e-7 to 2e-6 and has
# nearly full rank: with 1e-6 of it, a single direction of 1e-5 has a measured rank of 11, and one of 1e-4 of 1.7.
_SAME = 1e-4


def rank(features: Tensor) -> dict[str, float]:
    """The rank of features (samples, dim) by rank-v1: the entropy of the singular values, and its exponential."""
    return _ranks(features, **protocol("rank-v1").settings)


@register(
    "rank-v1",
    needs="features",
    about="Effective rank of pooled features, as entropy and its exponential: arXiv 2404.10947; Roy & Vetterli 2007.",
    train=False,
    positive=("samples",),
    samples=10_000,
    center=True,
)
def evaluate_rank(train: Split, test: Split, **settings: Any) -> dict[str, float]:
    """The rank of the features of one block."""
    return _ranks(test.features, **settings)


def _ranks(features: Tensor, samples: int, center: bool) -> dict[str, float]:
    entropy = rank_entropy(features[:samples], center)
    return {"rank": math.exp(entropy), "rank_entropy": entropy}


@register(
    "patchrank-v1",
    needs="patches",
    about="Effective rank of the patches within an image, the mean over the first 16 images.",
    exact=True,  # nearly equal patches differ mostly by rounding
    train=False,
    positive=("samples",),
    samples=16,
)
def evaluate_patch_rank(train: Split, test: Split, samples: int) -> dict[str, float]:
    """The rank of the patches of one block. An image whose patches differ only by rounding counts 0."""
    # On the CPU, because a GPU computes the singular values of many small matrices one by one.
    return {"patchrank": statistics.mean(_rank_within(each) for each in test.patches[:samples].float().cpu())}


def _rank_within(patches: Tensor) -> float:
    spread = (patches - patches.mean(0)).norm()
    return effective_rank(patches) if spread > _SAME * patches.norm() else 0.0
