"""Logistic regression to convergence, on several sets of features at once.

    minimise over W, b:   mean of -log softmax(W z_i + b)[class i]  +  |W|^2 / (2 C n),   z standardised

by L-BFGS (Liu & Nocedal 1989). Features of a block are strongly correlated, so plain L-BFGS takes hundreds of
iterations. Here it starts from an inverse Hessian: with K equally likely classes the Hessian of each would be

    (K - 1) / K^2 * z^T z / n  +  1 / (C n),

whose inverse is computed once. Then about thirty iterations are enough, each a few large products for all sets. The
problem is strictly convex, so the solution does not depend on the solver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

EXACT = 2**36  # up to this many multiplications per pass it is solved in float64
_BYTES = 2**32  # of standardised features at a time, if that is more than one set
_HISTORY = 10
_HALVINGS = 20


class Solution(NamedTuple):
    """W (sets, classes, dim) and b (sets, classes) for standardised features, and their mean and standard deviation."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    std: Tensor


def regression(x: Tensor, labels: Tensor, classes: int, settings: Mapping[str, Any], chunk: int) -> Solution:
    """The regression on each set of a stack (sets, samples, dim), with at most `chunk` logits at a time."""
    count, dim = x.shape[1:]
    dtype = torch.float64 if count * dim * classes <= EXACT else torch.float32
    solved, means, stds = [], [], []
    for part in x.split(max(1, _BYTES // (count * dim * dtype.itemsize))):
        moments = [torch.var_mean(one.double(), 0, correction=0) for one in part]
        variance, mean = (torch.stack(each) for each in zip(*moments, strict=True))
        std = torch.where(variance > 0, variance.sqrt(), 1.0)
        z = (part.to(dtype) - mean[:, None].to(dtype)) / std[:, None].to(dtype)
        solved.append(_solve(z, labels, classes, settings, chunk).double())
        means.append(mean)
        stds.append(std)
    packed = torch.cat(solved)
    return Solution(packed[..., :-1], packed[..., -1], torch.cat(means), torch.cat(stds))


def _solve(z: Tensor, labels: Tensor, classes: int, settings: Mapping[str, Any], chunk: int) -> Tensor:
    """W and b in one tensor (sets, classes, dim + 1), the bias last. Each set is solved independently."""
    sets, count, dim = z.shape
    ridge = 1 / (settings["c"] * count)
    rows = max(1, chunk // (sets * classes))
    parts = [*zip(z.split(rows, 1), labels.split(rows), strict=True)]

    def loss_and_gradient(point: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = point[..., :-1], point[..., -1]
        loss = ridge / 2 * weight.square().sum((1, 2))
        gradient = torch.zeros_like(point)
        for features, wanted in parts:
            logs = torch.baddbmm(bias[:, None], features, weight.mT).log_softmax(2)
            index = wanted.expand(sets, -1)[..., None]
            loss = loss - logs.gather(2, index).sum((1, 2)) / count
            error = logs.exp_().scatter_add_(2, index, logs.new_full(index.shape, -1.0))
            gradient[..., :-1] += error.mT @ features
            gradient[..., -1] += error.sum(1)
        gradient /= count
        gradient[..., :-1] += ridge * weight
        return loss, gradient

    inverse = _inverse_hessian(parts, classes, ridge)
    slack = 10 * torch.finfo(z.dtype).eps  # relative rounding error of the loss
    point = z.new_zeros(sets, classes, dim + 1)
    loss, gradient = loss_and_gradient(point)
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    scale = z.new_ones(sets, 1, 1)
    stuck = torch.zeros(sets, dtype=torch.bool, device=z.device)
    for _ in range(settings["iterations"]):
        active = (gradient.abs().amax((1, 2)) > settings["tolerance"]) & ~stuck
        if not bool(active.any()):
            break
        direction = -_two_loops(gradient, pairs, inverse, scale) * active[:, None, None]
        slope = _dot(direction, gradient)[:, 0, 0]
        length = torch.ones_like(loss)
        for _ in range(_HALVINGS):
            new = point + length[:, None, None] * direction
            new_loss, new_gradient = loss_and_gradient(new)
            accepted = new_loss <= loss + 1e-4 * length * slope + slack * loss.abs()
            if bool(accepted.all()):
                break
            length = torch.where(accepted, length, length / 2)
        stuck |= ~accepted  # any further decrease is below rounding
        each = accepted[:, None, None]
        new, new_gradient = torch.where(each, new, point), torch.where(each, new_gradient, gradient)
        step, change = new - point, new_gradient - gradient
        curvature = _dot(step, change)
        curved = curvature > 0
        scale = torch.where(curved, curvature / _dot(change, change @ inverse), scale)
        pairs = [*pairs, (step, change, torch.where(curved, 1 / curvature, 0.0))][-_HISTORY:]
        point, loss, gradient = new, torch.where(accepted, new_loss, loss), new_gradient
    return point


def _two_loops(gradient: Tensor, pairs: list[tuple[Tensor, Tensor, Tensor]], inverse: Tensor, scale: Tensor) -> Tensor:
    """L-BFGS's two-loop recursion: the estimated inverse Hessian times a gradient."""
    out, factors = gradient, []
    for step, change, weight in reversed(pairs):
        factor = weight * _dot(step, out)
        out = out - factor * change
        factors.append(factor)
    out = scale * (out @ inverse)
    for (step, change, weight), factor in zip(pairs, reversed(factors), strict=True):
        out = out + (factor - weight * _dot(change, out)) * step
    return out


def _inverse_hessian(parts: list[tuple[Tensor, Tensor]], classes: int, ridge: float) -> Tensor:
    """(sets, dim + 1, dim + 1): the inverse Hessian of one class if all are equally likely."""
    first = parts[0][0]
    sets, dim = len(first), first.shape[2]
    count = sum(len(labels) for _, labels in parts)
    moments = first.new_zeros(sets, dim, dim)
    for features, _ in parts:
        moments += features.mT @ features / count
    even = (classes - 1) / classes**2
    hessian = torch.zeros(sets, dim + 1, dim + 1, dtype=torch.float64, device=first.device)
    hessian[:, :-1, :-1] = even * moments.double()
    hessian.diagonal(dim1=1, dim2=2)[:, :-1].add_(ridge + 1e-9)
    hessian[:, -1, -1] = max(even, 1e-9)  # standardised features have mean 0, so there are no cross terms with the bias
    # Not torch.linalg.inv, which fails in batches on some CPUs with several threads from n = 193 on.
    inverse: Tensor = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return inverse.to(first.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((1, 2), keepdim=True)
