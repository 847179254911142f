"""Quality and diversity of generated samples, from features or logits.

precision   fraction of samples within a ball around a real image, whose radius is the distance to the k-th nearest
            other real image (Kynkäänniemi et al., arXiv 1904.06991)
recall      the same with both sets exchanged
kid         unbiased MMD^2 with the kernel (x.y / dim + 1)^3, over whole sets (Bińkowski et al., arXiv 1801.01401)
score       exp of the mean KL(p(y | x) || p(y)): the Inception score (arXiv 1606.03498), for any classifier
"""

from __future__ import annotations

import torch
from torch import Tensor

from unskip._checks import finite
from unskip.errors import BadInput

_CHUNK = 2**26  # distances at a time


@torch.no_grad()
def precision_recall(samples: Tensor, reference: Tensor, k: int = 3) -> tuple[float, float]:
    """Precision and recall from features (samples, dim), computed on the device of the reference."""
    _check("precision_recall", samples, reference)
    if k < 1:
        raise BadInput(f"precision_recall: k is {k}; it must be 1 or more")
    fewest = min(len(samples), len(reference))
    if fewest <= k:
        raise BadInput(f"precision_recall: k is {k}, but there are only {fewest} samples; use more than k")
    mean = reference.float().mean(0)  # after centring, float32 is precise enough
    fake, real = (each.to(reference.device).float() - mean for each in (samples, reference))
    return _covered(fake, real, _radii(real, k)), _covered(real, fake, _radii(fake, k))


def _radii(points: Tensor, k: int) -> Tensor:
    """The distance of each point to its k-th nearest other point."""
    rows = max(1, _CHUNK // len(points))
    # The nearest is the point itself.
    return torch.cat([torch.cdist(part, points).kthvalue(k + 1, 1).values for part in points.split(rows)])


def _covered(points: Tensor, centres: Tensor, radii: Tensor) -> float:
    """The fraction of points within a ball around any centre."""
    rows = max(1, _CHUNK // len(centres))
    inside = sum(int((torch.cdist(part, centres) <= radii).any(1).sum()) for part in points.split(rows))
    return inside / len(points)


@torch.no_grad()
def kid(samples: Tensor, reference: Tensor) -> float:
    """Kernel distance of two feature sets (samples, dim), float64."""
    _check("kid", samples, reference)
    if min(len(samples), len(reference)) < 2:
        raise BadInput("kid: needs at least two samples in each set")
    x, y = samples.double(), reference.to(samples.device).double()

    def total(a: Tensor, b: Tensor) -> Tensor:
        rows = max(1, _CHUNK // len(b))
        parts = [((part @ b.T / a.shape[1] + 1) ** 3).sum() for part in a.split(rows)]
        return torch.stack(parts).sum()

    def within(a: Tensor) -> Tensor:
        diagonal = ((a.square().sum(1) / a.shape[1] + 1) ** 3).sum()
        return (total(a, a) - diagonal) / (len(a) * (len(a) - 1))

    return float(within(x) + within(y) - 2 * total(x, y) / (len(x) * len(y)))


@torch.no_grad()
def score(logits: Tensor) -> float:
    """The Inception score of logits (samples, classes), without splits: from 1 to the number of classes."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.ndim != 2 or not len(logits):
        raise BadInput("score: logits must be non-empty floating (samples, classes)")
    finite("score", "logits", logits)
    p = logits.double().softmax(1)
    # Mean KL = entropy of the mean - mean entropy, which also holds for probabilities of 0.
    return float((torch.special.entr(p.mean(0)).sum() - torch.special.entr(p).sum(1).mean()).exp())


def _check(who: str, samples: Tensor, reference: Tensor) -> None:
    for name, value in (("samples", samples), ("reference", reference)):
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim != 2 or not len(value):
            raise BadInput(f"{who}: {name} must be non-empty floating features (samples, dim)")
        finite(who, name, value)
    if samples.shape[1] != reference.shape[1]:
        raise BadInput(
            f"{who}: samples have {samples.shape[1]} features, but the reference {reference.shape[1]}; use the same "
            "extractor for both"
        )
