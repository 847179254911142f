"""Golub-Kahan bidiagonalisation of a matrix given by its products, and the distribution of its singular values.

From a unit vector v_1, k steps give orthonormal V, U and an upper bidiagonal B with J V = U B. The singular values s_j
of B are Ritz values of J, with errors of at most r_j = |J^T u_j - s_j v_j|, and w_j = (first entry of B's right
singular vector)^2 are their weights: the Gauss quadrature of the spectral measure of v_1,

    F(s) = sum over singular values sigma_i <= s of <v_1, right vector i>^2.

For a random v_1 the mean of F is the distribution of J's singular values over the n directions of the input, and F(s)
follows Beta(q n / 2, (1 - q) n / 2) exactly, with q the true fraction, so its spread need not be estimated. Working
with J instead of J^T J keeps small values accurate: their error is eps sigma_max instead of sqrt(eps) sigma_max.

Golub & Kahan 1965; Golub & Welsch 1969; Ubaru, Chen & Saad 2017, "Fast estimation of tr(f(A)) via stochastic Lanczos
quadrature". By the bounds of Chebyshev, Markov and Stieltjes, F at a node is between the sums of the weights before and
up to the node.
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
    """The result of k steps from one start vector."""

    bidiagonal: Tensor  # (k, k), float64 on the CPU
    rest: float  # norm of the next, unnormalised vector; 0 if the space is invariant
    right: Tensor  # V (k, inputs)
    left: Tensor  # U (k, outputs)


@dataclass(frozen=True)
class Nodes:
    """Ritz values of one start vector, in ascending order, with their weights and residuals."""

    values: Array
    weights: Array
    residuals: Array


def bidiagonalise(
    times: Product, transposed: Product, starts: Tensor, outputs: int, steps: int, tiny: float
) -> list[Krylov]:
    """One Krylov for each row of starts (probes, inputs), with full orthogonalisation; stores both bases.

    A probe ends when its next vector is shorter than `tiny` times the longest so far: then the space is invariant.
    """
    probes, inputs = starts.shape
    size = {"dtype": torch.float64, "device": starts.device}
    right, left = torch.zeros(probes, steps, inputs, **size), torch.zeros(probes, steps, outputs, **size)  # type: ignore[call-overload]
    alphas, betas = torch.zeros(probes, steps, **size), torch.zeros(probes, steps, **size)  # type: ignore[call-overload]
    v, scale = starts / starts.norm(dim=1, keepdim=True), torch.zeros(probes, **size)  # type: ignore[call-overload]
    ends, u = [steps] * probes, v
    for step in range(steps):
        right[:, step] = v
        # In exact arithmetic the last vector would be enough; the whole basis is subtracted because of rounding.
        following = times(v) if step == 0 else times(v) - betas[:, step - 1, None] * u
        alphas[:, step], u, scale = _unit(_orthogonal(following, left[:, :step]), scale, tiny)
        left[:, step] = u
        following = transposed(u) - alphas[:, step, None] * v
        betas[:, step], v, scale = _unit(_orthogonal(following, right[:, : step + 1]), scale, tiny)
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
    """x (probes, size) orthogonal to the basis (probes, vectors, size)."""
    before = x.norm(dim=1)
    for _ in range(2):  # twice is enough, and once if the norm changes little
        # One by one, because torch's batched matrix-vector product is several times slower.
        x = torch.stack([each - old.mT @ (old @ each) for each, old in zip(x, basis, strict=True)])
        after = x.norm(dim=1)
        if bool((after > 0.7 * before).all()):
            break
        before = after
    return x


def _unit(x: Tensor, scale: Tensor, tiny: float) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, direction and the largest norm so far; a norm below `tiny` times the largest becomes 0."""
    norm = x.norm(dim=1)
    scale = torch.maximum(scale, norm)
    norm = torch.where(norm > tiny * scale, norm, 0.0)
    return norm, x / torch.where(norm > 0, norm, torch.inf)[:, None], scale


def nodes(krylov: Krylov, steps: int, close: float) -> Nodes:
    """The Ritz values after the first `steps` steps; those closer than `close` times the largest are merged.

    Rounding can make a multiple singular value appear several times.
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
    return _inverse([_distribution(_significant(each)) for each in starts], share)


def bound(starts: list[Nodes], share: float) -> float:
    """An upper bound of the quantile; infinite if no node bounds it."""
    return _inverse([_lower_bound(each) for each in starts], share)


def resolved(starts: list[Nodes], share: float) -> bool:
    """Whether the quantile is above the first node; below it only a bound is known."""
    first = [0.0 if _isolated(each)[0] else float(each.weights[0]) for each in map(_significant, starts)]
    return share > float(np.mean(first))


def above_null(ritz: Nodes, null: int, inputs: int) -> float:
    """An upper bound of the smallest sigma outside of `null` directions.

    This is the first Ritz value with more weight below it than the null directions can have.
    """
    if null == 0:
        return float(ritz.values[0])
    share = min(1.0, null / inputs)
    below = np.cumsum(ritz.weights) - ritz.weights
    over = np.flatnonzero(below > share + 4 * spread(share, inputs, 1))
    return float(ritz.values[over[0]]) if len(over) else math.inf


def spread(share: float, inputs: int, probes: int) -> float:
    """Standard deviation of the mean of F over independent random starts, at the true fraction `share`."""
    return math.sqrt(2 * share * (1 - share) / ((inputs + 2) * probes))


def _significant(ritz: Nodes) -> Nodes:
    """Without values of negligible weight, which may be close to a heavy one before they converge."""
    keep = ritz.weights > 1e-8
    return Nodes(ritz.values[keep], ritz.weights[keep], ritz.residuals[keep])


def _isolated(ritz: Nodes) -> NDArray[np.bool_]:
    """Which Ritz values are one singular value or a narrow cluster: their residual is small compared to the gaps."""
    s = ritz.values
    gaps = np.diff(s, prepend=-s[0], append=np.inf)  # the spectrum is symmetric, so below s[0] comes -s[0]
    below = np.where(gaps[:-1] > 0, gaps[:-1], np.inf)
    return ritz.residuals <= 0.1 * np.minimum(below, gaps[1:])


def _distribution(ritz: Nodes) -> tuple[Array, Array]:
    """F as a piecewise linear curve: a step at isolated values, else through the middle of its bounds at each node.

    Away from isolated values F is smooth at the scale of the nodes, so the middle is close to it.
    """
    upper = np.cumsum(ritz.weights)
    lower, isolated = upper - ritz.weights, _isolated(ritz)
    middle = (lower + upper) / 2
    before, after = np.where(isolated, lower, middle), np.where(isolated, upper, middle)
    return _steps(ritz.values, before, after, last=1.0)


def _lower_bound(ritz: Nodes) -> tuple[Array, Array]:
    """A lower bound of F: the weights before a node, from that node to the next one."""
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
