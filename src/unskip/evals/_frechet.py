"""Fréchet distance of two feature sets, modelled as Gaussians, in float64.

    FD = |m_1 - m_2|^2 + tr C_1 + tr C_2 - 2 tr (C_1^1/2 C_2 C_1^1/2)^1/2

With C = F^T F the last trace is the sum of the singular values of F_1 F_2^T. This needs no square root of a product,
stays real, and works for rank-deficient covariances. C is the sample covariance, divided by n - 1. Heusel et al., arXiv
1706.08500. With the standard Inception weights this is FID; with any other extractor it is FD-<extractor>.

The distance of two samples from the same distribution is not 0: it has a bias of order dim / n, and for n <= dim the
covariance is rank-deficient. Compare only distances of the same n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unskip._checks import finite, kind_of
from unskip._warn import warn
from unskip.errors import BadInput


@dataclass
class Moments:
    """Mean and covariance of features, updated batch by batch (Chan et al. 1979), float64."""

    count: int = 0
    mean: Tensor | None = None  # (dim,)
    scatter: Tensor | None = None  # (dim, dim): sum of (x - mean) (x - mean)^T

    @torch.no_grad()
    def update(self, features: Tensor) -> None:
        """Adds a batch (samples, dim)."""
        if not isinstance(features, Tensor) or not features.is_floating_point() or features.ndim != 2:
            raise BadInput(f"frechet: features must be floating (samples, dim), got {kind_of(features)}")
        if not len(features):
            return
        finite("frechet", "features", features)
        x = features.detach().double()
        mean = x.mean(0)
        x = x - mean
        scatter = x.T @ x
        if self.mean is None or self.scatter is None:
            self.count, self.mean, self.scatter = len(x), mean, scatter
            return
        if len(mean) != len(self.mean):
            raise BadInput(f"frechet: features of dim {len(mean)} after features of dim {len(self.mean)}")
        total = self.count + len(x)
        shift = mean.to(self.mean.device) - self.mean
        self.scatter += scatter.to(self.mean.device) + torch.outer(shift, shift) * (self.count * len(x) / total)
        self.mean = self.mean + shift * (len(x) / total)
        self.count = total

    @property
    def covariance(self) -> Tensor:
        """The sample covariance (dim, dim)."""
        if self.scatter is None or self.count < 2:
            raise BadInput(f"frechet: a covariance needs at least two samples, got {self.count}")
        return self.scatter / (self.count - 1)

    def state(self) -> dict[str, Tensor]:
        """The tensors to save."""
        assert self.mean is not None
        assert self.scatter is not None
        return {"count": torch.tensor(self.count), "mean": self.mean.cpu(), "scatter": self.scatter.cpu()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Moments:
        """From the tensors of `state`."""
        return Moments(int(state["count"]), state["mean"], state["scatter"])


def frechet(features_a: Tensor | Moments, features_b: Tensor | Moments) -> float:
    """The distance of two feature sets (samples, dim), or of their moments. Warns if there are too few samples.

    A singular covariance is allowed: the features do not vary in some direction.
    """
    first, second = (_moments(each) for each in (features_a, features_b))
    assert first.mean is not None
    assert second.mean is not None
    dim = len(first.mean)
    if dim != len(second.mean):
        raise BadInput(f"frechet: features of dim {dim} and {len(second.mean)}; use the same extractor for both")
    fewest = min(first.count, second.count)
    if fewest <= dim:
        warn(
            f"frechet: {fewest} samples of {dim} features: the covariance is rank-deficient, and the distance is too "
            f"large by a bias that falls as 1 / samples. Compare it only with distances of {fewest} samples, or use "
            f"more than {dim} samples ({5 * dim} are better)."
        )
    device = first.mean.device
    one, two = first.covariance, second.covariance.to(device)
    shift = first.mean - second.mean.to(device)
    overlap = torch.linalg.svdvals(_factor(one) @ _factor(two).T).sum()
    value = shift @ shift + one.trace() + two.trace() - 2 * overlap
    return max(0.0, float(value))  # rounding can make it negative


def _moments(features: Tensor | Moments) -> Moments:
    if isinstance(features, Moments):
        moments = features
    else:
        moments = Moments()
        moments.update(features)
    if moments.mean is None or moments.count < 2:
        raise BadInput(f"frechet: needs at least two samples, got {moments.count}")
    return moments


def _factor(covariance: Tensor) -> Tensor:
    """F with F^T F = C."""
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    factor: Tensor = values.clamp_min(0).sqrt()[:, None] * vectors.T
    return factor
