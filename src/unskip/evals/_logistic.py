"""Logistic regression to convergence, of several sets of features at once.

    minimise over W, b:   mean of -log softmax(W z_i + b)[class i]  +  |W|^2 / (2 C n),   z standardised

by L-BFGS (Liu & Nocedal 1989). Features of a block are strongly correlated, and plain L-BFGS takes hundreds of passes
over them. It starts from an inverse Hessian here: were all classes equally likely, the Hessian of every class would be

    (K - 1) / K^2 * z^T z / n  +  1 / (C n),

whose inverse is computed once. Some thirty passes are left, and each is a few large products for all sets. The problem
is strictly convex, so the way to its solution does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

EXACT = 2**36  # up to so many products a pass it is solved in float64
_HELD = 2**32  # bytes of standardised features held at a time, where that is more than one set
_HISTORY = 10
_HALVINGS = 20


class Solution(NamedTuple):
    """W (sets, classes, dim) and b (sets, classes) of standardised features, and their mean and standard deviation."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    std: Tensor


def regression(x: Tensor, labels: Tensor, classes: int, settings: Mapping[str, Any], chunk: int) -> Solution:
    """The regression of each set of a stack (sets, samples, dim); `chunk` logits are held at a time."""
    count, dim = x.shape[1:]
    kind = torch.float64 if count * dim * classes <= EXACT else torch.float32
    together = max(1, _HELD // (count * dim * (8 if kind == torch.float64 else 4)))
    solved, means, stds = [], [], []
    for part in x.split(together):
        moments = [torch.var_mean(one.double(), 0, correction=0) for one in part]
        spread, mean = (torch.stack(each) for each in zip(*moments, strict=True))
        std = torch.where(spread > 0, spread.sqrt(), 1.0)
        z = (part.to(kind) - mean[:, None].to(kind)) / std[:, None].to(kind)
        solved.append(_solve(z, labels, classes, settings, chunk).double())
        means.append(mean)
        stds.append(std)
    packed = torch.cat(solved)
    return Solution(packed[..., :-1], packed[..., -1], torch.cat(means), torch.cat(stds))


def _solve(z: Tensor, labels: Tensor, classes: int, settings: Mapping[str, Any], chunk: int) -> Tensor:
    """(sets, classes, dim + 1), the bias last. Sets do not influence each other: what is done, is done to each."""
    sets, count, dim = z.shape
    ridge = 1 / (settings["c"] * count)
    rows = max(1, chunk // (sets * classes))
    parts = [*zip(z.split(rows, 1), labels.split(rows), strict=True)]

    def look(at: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of every set, and its gradient."""
        weight, bias = at[..., :-1], at[..., -1]
        loss = ridge / 2 * weight.square().sum((1, 2))
        slope = torch.zeros_like(at)
        for features, wanted in parts:
            logs = torch.baddbmm(bias[:, None], features, weight.mT).log_softmax(2)
            own = wanted.expand(sets, -1)[..., None]
            loss = loss - logs.gather(2, own).sum((1, 2)) / count
            error = logs.exp_().scatter_add_(2, own, logs.new_full(own.shape, -1.0))
            slope[..., :-1] += error.mT @ features
            slope[..., -1] += error.sum(1)
        slope /= count
        slope[..., :-1] += ridge * weight
        return loss, slope

    inverse = _inverse(parts, classes, ridge)
    slack = 10 * torch.finfo(z.dtype).eps  # of the loss: what rounding alone may add
    at = z.new_zeros(sets, classes, dim + 1)
    loss, slope = look(at)
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    scale = z.new_ones(sets, 1, 1)
    stuck = torch.zeros(sets, dtype=torch.bool, device=z.device)
    for _ in range(settings["iterations"]):
        going = (slope.abs().amax((1, 2)) > settings["tolerance"]) & ~stuck
        if not bool(going.any()):
            break
        way = -_directed(slope, pairs, inverse, scale) * going[:, None, None]
        fall = _dot(way, slope)[:, 0, 0]
        length = torch.ones_like(loss)
        for _ in range(_HALVINGS):
            new = at + length[:, None, None] * way
            new_loss, new_slope = look(new)
            enough = new_loss <= loss + 1e-4 * length * fall + slack * loss.abs()
            if bool(enough.all()):
                break
            length = torch.where(enough, length, length / 2)
        stuck |= ~enough  # rounding hides what is left to gain
        new, new_loss, new_slope = (_chosen(enough, a, b) for a, b in ((new, at), (new_loss, loss), (new_slope, slope)))
        step, change = new - at, new_slope - slope
        curvature = _dot(step, change)
        curved = curvature > 0
        scale = torch.where(curved, curvature / _dot(change, change @ inverse), scale)
        pairs = [*pairs, (step, change, torch.where(curved, 1 / curvature, 0.0))][-_HISTORY:]
        at, loss, slope = new, new_loss, new_slope
    return at


def _directed(slope: Tensor, pairs: list[tuple[Tensor, Tensor, Tensor]], inverse: Tensor, scale: Tensor) -> Tensor:
    """The product of the inverse Hessian, estimated from the last steps, and a gradient: L-BFGS's two loops."""
    shares = []
    for step, change, weight in reversed(pairs):
        share = weight * _dot(step, slope)
        slope = slope - share * change
        shares.append(share)
    slope = scale * (slope @ inverse)
    for (step, change, weight), share in zip(pairs, reversed(shares), strict=True):
        slope = slope + (share - weight * _dot(change, slope)) * step
    return slope


def _inverse(parts: list[tuple[Tensor, Tensor]], classes: int, ridge: float) -> Tensor:
    """(sets, dim + 1, dim + 1): the inverse Hessian of one class against equally likely others."""
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
    hessian[:, -1, -1] = max(even, 1e-9)  # standardised features have mean 0: the bias stands apart
    # By Cholesky's factor: a batched `torch.linalg.inv` fails on some CPUs with several threads from n = 193 on.
    inverse: Tensor = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return inverse.to(first.dtype)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((1, 2), keepdim=True)


def _chosen(where: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(where.view(-1, *[1] * (a.ndim - 1)), a, b)
