"""How good and how varied samples are, by features alone.

precision   the share of samples within a ball around a real image; its radius is the distance to the k-th nearest
            other real image (Kynkäänniemi et al., arXiv 1904.06991)
recall      the same with both sets exchanged
kid         MMD^2 with the kernel (x.y / dim + 1)^3, without bias, over whole sets (Bińkowski et al., 1801.01401)
score       exp of the mean KL(p(y | x) || p(y)): the Inception score (arXiv 1606.03498), over any classifier
"""

from __future__ import annotations

import torch
from torch import Tensor

from unskip._checks import finite
from unskip.errors import BadInput

_CHUNK = 2**26  # distances held at a time


@torch.no_grad()
def precision_recall(samples: Tensor, reference: Tensor, k: int = 3) -> tuple[float, float]:
    """Of features (samples, dim); it runs where the reference lies. Centred first, so that float32 is enough."""
    _check("precision_recall", samples, reference)
    if k < 1:
        raise BadInput(f"precision_recall: k is {k}; take one or more")
    if min(len(samples), len(reference)) <= k:
        raise BadInput(f"precision_recall: k is {k}, of {min(len(samples), len(reference))} samples; take more")
    middle = reference.float().mean(0)
    fake, real = (each.to(reference.device).float() - middle for each in (samples, reference))
    return _covered(fake, real, _radii(real, k)), _covered(real, fake, _radii(fake, k))


def _radii(points: Tensor, k: int) -> Tensor:
    """The distance of each to its k-th nearest other."""
    rows = max(1, _CHUNK // len(points))
    # The nearest is the point itself.
    return torch.cat([torch.cdist(part, points).kthvalue(k + 1, 1).values for part in points.split(rows)])


def _covered(points: Tensor, centres: Tensor, radii: Tensor) -> float:
    rows = max(1, _CHUNK // len(centres))
    inside = sum(int((torch.cdist(part, centres) <= radii).any(1).sum()) for part in points.split(rows))
    return inside / len(points)


@torch.no_grad()
def kid(samples: Tensor, reference: Tensor) -> float:
    """Kernel distance of two feature sets (samples, dim), float64."""
    _check("kid", samples, reference)
    if min(len(samples), len(reference)) < 2:
        raise BadInput("kid: it takes two samples or more")
    x, y = samples.double(), reference.to(samples.device).double()

    def total(a: Tensor, b: Tensor) -> Tensor:
        rows = max(1, _CHUNK // len(b))
        parts = [((part @ b.T / a.shape[1] + 1) ** 3).sum() for part in a.split(rows)]
        return torch.stack(parts).sum()

    def own(a: Tensor) -> Tensor:
        alone = ((a.square().sum(1) / a.shape[1] + 1) ** 3).sum()
        return (total(a, a) - alone) / (len(a) * (len(a) - 1))

    return float(own(x) + own(y) - 2 * total(x, y) / (len(x) * len(y)))


@torch.no_grad()
def score(logits: Tensor) -> float:
    """The Inception score of logits (samples, classes), over all samples at once: from 1 to the number of classes."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.ndim != 2 or not len(logits):
        raise BadInput("score: logits are floating (samples, classes) and not empty")
    finite("score", "logits", logits)
    p = logits.double().softmax(1)
    # Mean KL = entropy of the mean - mean entropy, which a probability of exactly 0 does not spoil.
    return float((torch.special.entr(p.mean(0)).sum() - torch.special.entr(p).sum(1).mean()).exp())


def _check(who: str, samples: Tensor, reference: Tensor) -> None:
    for name, value in (("samples", samples), ("reference", reference)):
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim != 2 or not len(value):
            raise BadInput(f"{who}: {name} must be floating features (samples, dim) and not empty")
        finite(who, name, value)
    if samples.shape[1] != reference.shape[1]:
        raise BadInput(
            f"{who}: samples of {samples.shape[1]} and reference of {reference.shape[1]} features; take one extractor"
        )
