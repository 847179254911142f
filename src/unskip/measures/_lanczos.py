"""Golub-Kahan bidiagonalisation of a matrix known by its products, and the singular value distribution read off it.

From a unit vector v_1, k steps give orthonormal V, U and an upper bidiagonal B with J V = U B. The singular values s_j
of B are Ritz values of J, off by no more than r_j = |J^T u_j - s_j v_j|, and w_j = (first entry of B's right singular
vector)^2 are their weights: the Gauss quadrature of the measure that v_1 sees,

    F(s) = sum over singular values sigma_i <= s of <v_1, right vector i>^2.

For a random v_1 the mean of F is the distribution of J's singular values over the n directions of the input, and F(s)
follows Beta(q n / 2, (1 - q) n / 2) exactly, where q is the true share: its spread is known, not estimated. Working
with J rather than with J^T J keeps the small values, whose rounding error is eps sigma_max and not sqrt(eps) sigma_max.

Golub & Kahan 1965; Golub & Welsch 1969; Ubaru, Chen & Saad 2017, "Fast estimation of tr(f(A)) via stochastic Lanczos
quadrature". At the nodes the bounds of Chebyshev, Markov and Stieltjes hold: F lies between the sums of the weights
before and up to the node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Product = Callable[[Tensor], Tensor]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Krylov:
    """What k steps from one start vector leave behind."""

    bidiagonal: Tensor  # (k, k), float64 on the CPU
    rest: float  # norm of what the next step would start from; 0 where the space is invariant
    right: Tensor  # V (k, inputs)
    left: Tensor  # U (k, outputs)


@dataclass(frozen=True)
class Nodes:
    """Ritz values of one start vector, smallest first."""

    values: Array
    weights: Array
    residuals: Array


def bidiagonalise(
    times: Product, transposed: Product, starts: Tensor, outputs: int, steps: int, tiny: float
) -> list[Krylov]:
    """One Krylov for each row of starts (probes, inputs), orthogonalised in full, in the memory of both bases.

    A probe ends where its next vector is shorter than `tiny` times the longest so far: the space is invariant.
    """
    probes, inputs = starts.shape
    size = {"dtype": torch.float64, "device": starts.device}
    right, left = torch.zeros(probes, steps, inputs, **size), torch.zeros(probes, steps, outputs, **size)  # type: ignore[call-overload]
    alphas, betas = torch.zeros(probes, steps, **size), torch.zeros(probes, steps, **size)  # type: ignore[call-overload]
    v, scale = starts / starts.norm(dim=1, keepdim=True), torch.zeros(probes, **size)  # type: ignore[call-overload]
    ends, u = [steps] * probes, v
    for step in range(steps):
        right[:, step] = v
        # The last vector is all that is in the way but for rounding; the whole basis is taken out for that.
        ahead = times(v) if step == 0 else times(v) - betas[:, step - 1, None] * u
        alphas[:, step], u, scale = _unit(_orthogonal(ahead, left[:, :step]), scale, tiny)
        left[:, step] = u
        ahead = transposed(u) - alphas[:, step, None] * v
        betas[:, step], v, scale = _unit(_orthogonal(ahead, right[:, : step + 1]), scale, tiny)
        for probe in ((alphas[:, step] == 0) | (betas[:, step] == 0)).nonzero()[:, 0].tolist():
            ends[probe] = min(ends[probe], step + 1)
        if max(ends) <= step + 1:
            break
    krylovs = []
    for probe, end in enumerate(ends):
        alpha, beta = alphas[probe, :end].cpu(), betas[probe, :end].cpu()
        small = torch.diag(alpha) + torch.diag(beta[:-1], 1)
        krylovs.append(Krylov(small, float(beta[-1]), right[probe, :end], left[probe, :end]))
    return krylovs


def _orthogonal(x: Tensor, basis: Tensor) -> Tensor:
    """x (probes, size) less what lies in the basis (probes, vectors, size)."""
    before = x.norm(dim=1)
    for _ in range(2):  # twice is enough, and once where little was taken away
        # One by one: torch's batched product of matrix and vector is several times slower.
        x = torch.stack([each - old.mT @ (old @ each) for each, old in zip(x, basis, strict=True)])
        after = x.norm(dim=1)
        if bool((after > 0.7 * before).all()):
            break
        before = after
    return x


def _unit(x: Tensor, scale: Tensor, tiny: float) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, direction and the largest norm so far; what is rounding beside that becomes zero and ends its probe."""
    norm = x.norm(dim=1)
    scale = torch.maximum(scale, norm)
    norm = torch.where(norm > tiny * scale, norm, 0.0)
    return norm, x / torch.where(norm > 0, norm, torch.inf)[:, None], scale


def nodes(krylov: Krylov, steps: int, close: float) -> Nodes:
    """The Ritz values after the first `steps` steps; those nearer than `close` times the largest become one.

    A singular value of many directions is found again once rounding has mixed some more of them in.
    """
    size = min(steps, len(krylov.bidiagonal))
    small = krylov.bidiagonal[:size, :size]
    rest = krylov.rest if size == len(krylov.bidiagonal) else float(krylov.bidiagonal[size - 1, size])
    left, values, right = torch.linalg.svd(small)
    order = torch.argsort(values)
    ritz, weights = values[order].numpy(), (right[:, 0] ** 2)[order].numpy()
    residuals = (rest * left[-1].abs())[order].numpy()
    groups = np.flatnonzero(np.diff(ritz, prepend=-np.inf) > close * ritz[-1])
    return Nodes(
        np.maximum.reduceat(ritz, groups), np.add.reduceat(weights, groups), np.maximum.reduceat(residuals, groups)
    )


def quantile(starts: list[Nodes], share: float) -> float:
    """The s at which the mean distribution of several starts reaches `share`."""
    return _inverse([_distribution(_weighty(each)) for each in starts], share)


def bound(starts: list[Nodes], share: float) -> float:
    """An s at which the mean distribution has reached `share` for certain; infinite where no node bounds it."""
    return _inverse([_least(each) for each in starts], share)


def resolved(starts: list[Nodes], share: float) -> bool:
    """Whether the quantile lies above the first node; below it only zero and a bound are known."""
    first = [0.0 if _alone(each)[0] else float(each.weights[0]) for each in map(_weighty, starts)]
    return share > float(np.mean(first))


def above_null(ritz: Nodes, null: int, inputs: int) -> float:
    """A Ritz value with more weight below it than `null` directions can have, so no less than some other sigma."""
    if null == 0:
        return float(ritz.values[0])
    share = min(1.0, null / inputs)
    below = np.cumsum(ritz.weights) - ritz.weights
    over = np.flatnonzero(below > share + 4 * spread(share, inputs, 1))
    return float(ritz.values[over[0]]) if len(over) else math.inf


def spread(share: float, inputs: int, probes: int) -> float:
    """Standard deviation of the mean of F over independent random starts, at the true `share`."""
    return math.sqrt(2 * share * (1 - share) / ((inputs + 2) * probes))


def _weighty(ritz: Nodes) -> Nodes:
    """Without the values that F does not notice; on its way to converge, one may pass close by a heavy one."""
    keep = ritz.weights > 1e-8
    return Nodes(ritz.values[keep], ritz.weights[keep], ritz.residuals[keep])


def _alone(ritz: Nodes) -> NDArray[np.bool_]:
    """Which Ritz values stand for one singular value, or a narrow cluster: their residual is small beside the gaps."""
    s = ritz.values
    gaps = np.diff(s, prepend=-s[0], append=np.inf)  # J has -s as well as s, so the smallest has a mirror below it
    below = np.where(gaps[:-1] > 0, gaps[:-1], np.inf)
    return ritz.residuals <= 0.1 * np.minimum(below, gaps[1:])


def _distribution(ritz: Nodes) -> tuple[Array, Array]:
    """F as a broken line: a step at a value that stands alone, elsewhere through the middle of its bounds at each node.

    There F is smooth at the scale of the nodes, so that the middle is near it.
    """
    upper = np.cumsum(ritz.weights)
    lower, alone = upper - ritz.weights, _alone(ritz)
    middle = (lower + upper) / 2
    before, after = np.where(alone, lower, middle), np.where(alone, upper, middle)
    return _steps(ritz.values, before, after, last=1.0)


def _least(ritz: Nodes) -> tuple[Array, Array]:
    """What F is at least: the weights before a node, from that node to the next one."""
    lower = np.cumsum(ritz.weights) - ritz.weights
    return _steps(ritz.values, np.concatenate([[0.0], lower[:-1]]), lower, last=float(lower[-1]))


def _steps(values: Array, before: Array, after: Array, last: float) -> tuple[Array, Array]:
    points = np.repeat(values, 2)
    points[::2] *= 1 - 1e-13  # a step is a steep ramp
    heights = np.stack([before, after], 1).reshape(-1)
    return np.concatenate([[0.0], points, [values[-1]]]), np.concatenate([[0.0], heights, [last]])


def _inverse(curves: list[tuple[Array, Array]], share: float) -> float:
    def reached(s: float) -> float:
        return sum(float(np.interp(s, points, heights)) for points, heights in curves) / len(curves)

    low, high = 0.0, max(float(points[-1]) for points, _ in curves)
    if reached(high) < share - 1e-12:
        return math.inf
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < share else (low, middle)
    return high
