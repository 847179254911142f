"""Input reconstruction: how well layer l still predicts the input (its "echo"), and its spatial frequencies.

    cosine      mean over tokens of <x_0, x_l> / (|x_0| |x_l|)
    ridge R^2   1 - |x_0 - A x_l - b|^2 / |x_0 - mean|^2 on held-out samples, A and b fitted by ridge regression
    high share  sum of |DFT|^2 above a radius / sum of |DFT|^2 without the mean, of patch tokens on their grid

A shortcut with alpha = 1 carries the input to every depth. "Residual Connections Harm Generative Representation
Learning", arXiv 2404.10947, argues that this brings shallow detail and high frequencies into deep layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip._checks import finite, kind_of
from unskip.errors import BadInput
from unskip.measures._input import centred, floats, same_rows

GRID = tuple(10.0**power for power in range(-10, 3))  # candidate ridges, relative to the largest squared sigma


def cosine(x0: Tensor, xl: Tensor) -> float:
    """The mean over tokens of the cosine between x0 and xl, both (..., dim); nan if any token is zero."""
    a, b = floats("cosine", "x0", x0, "(..., dim)", 1), floats("cosine", "xl", xl, "(..., dim)", 1)
    if a.shape != b.shape:
        raise BadInput(f"cosine: both must have the same shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    return float(((a / a.norm(dim=-1, keepdim=True)) * (b / b.norm(dim=-1, keepdim=True))).sum(-1).mean())


def feature_norm(x: Tensor) -> float:
    """The mean over tokens of |x|, x (..., dim)."""
    return float(floats("feature_norm", "x", x, "(..., dim)", 1).norm(dim=-1).mean())


def ridge_r2(x: Tensor, y: Tensor, *, groups: Tensor | None = None, generator: torch.Generator | None = None) -> float:
    """R^2 of y (samples, dim) predicted from x (samples, other dim) by ridge regression, on a held-out quarter.

    `groups` (samples,) are group numbers, such as the image of each token. Whole groups are held out; otherwise tokens
    would be predicted from their neighbours. The ridge is chosen from a grid on a quarter of the training groups, and
    the regression then fitted on all of them. R^2 sums over samples and dims, relative to the held-out mean: negative
    if worse than that mean, nan if the held-out y does not vary.
    """
    wide_x = floats("ridge_r2", "x", x, "(samples, dim)", 2, 2)
    wide_y = floats("ridge_r2", "y", y, "(samples, dim)", 2, 2)
    same_rows("ridge_r2", wide_x, wide_y)
    ids = _groups(groups, len(x))
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    test = held_out(ids, generator).to(x.device)
    if not bool(centred(wide_y[test], y.dtype).any()):
        return math.nan
    train_x, train_y = wide_x[~test], wide_y[~test]
    inner = held_out(ids[~test.cpu()], generator).to(x.device)
    scores = ridge_scores(train_x[~inner], train_y[~inner], train_x[inner], train_y[inner], GRID)
    best = GRID[max(range(len(GRID)), key=lambda index: -math.inf if math.isnan(scores[index]) else scores[index])]
    return ridge_scores(train_x, train_y, wide_x[test], wide_y[test], (best,))[0]


def high_frequency_share(tokens: Tensor, grid: tuple[int, int], cutoff: float = 0.5) -> float:
    """The fraction of the spatial energy of patch tokens (batch, rows * cols, dim) above a frequency.

    The energy is that of the 2-D DFT of each channel on the grid, without the zero frequency (the mean over patches),
    summed over batch and channels. The radius of a frequency is sqrt(a^2 + b^2), with a and b in units of Nyquist (one
    period in two patches): 1 along an axis, sqrt(2) in the corner. Radii above `cutoff` count as high. The DFT is
    periodic, so a gradient across the image adds some high energy at its border. nan if all patches are equal.
    """
    wide = floats("high_frequency_share", "tokens", tokens, "(batch, rows * cols, dim) without prefix tokens", 3, 3)
    rows, columns = grid
    if rows < 1 or columns < 1 or rows * columns != wide.shape[1]:
        raise BadInput(
            f"high_frequency_share: {wide.shape[1]} tokens do not fill a grid of {rows} x {columns}; remove prefix "
            "tokens such as cls, and pass the grid as (rows, cols)"
        )
    patches = centred(wide.transpose(0, 1).flatten(1), tokens.dtype).unflatten(0, (rows, columns))
    energy = torch.fft.fft2(patches, dim=(0, 1)).abs().square().sum(-1)  # (rows, cols)
    energy[0, 0] = 0  # the mean, up to rounding
    # Float32 would put some frequencies at the cutoff above it.
    down, across = (2 * torch.fft.fftfreq(size, dtype=torch.float64) for size in grid)
    radius = torch.hypot(down[:, None], across[None]).to(energy.device)
    total = float(energy.sum())
    return float(energy[radius > cutoff].sum()) / total if total > 0 else math.nan


def _groups(groups: Tensor | None, count: int) -> Tensor:
    if groups is None:
        return torch.arange(count)
    if not isinstance(groups, Tensor) or groups.shape != (count,):
        raise BadInput(
            f"ridge_r2: groups must be a tensor with one number for each of {count} samples, got {kind_of(groups)}"
        )
    ids: Tensor = torch.unique(groups.cpu(), return_inverse=True)[1]
    return ids


def held_out(ids: Tensor, generator: torch.Generator) -> Tensor:
    """A mask of the samples in a random quarter of the groups, with at least one group in and one out."""
    unique = torch.unique(ids)
    if len(unique) < 2:
        raise BadInput("ridge_r2: too few groups to hold one out; measure more samples")
    count = min(len(unique) - 1, max(1, round(len(unique) / 4)))
    order = torch.randperm(len(unique), generator=generator, device=generator.device).cpu()
    return torch.isin(ids, unique[order[:count]])


def ridge_scores(x: Tensor, y: Tensor, new_x: Tensor, new_y: Tensor, ridges: tuple[float, ...]) -> list[float]:
    """R^2 on the new samples for each ridge; ridges are relative to the largest squared singular value of x."""
    mean_x, mean_y = x.mean(0), y.mean(0)
    u, s, vh = torch.linalg.svd(x - mean_x, full_matrices=False)
    keep = s > max(x.shape) * torch.finfo(torch.float64).eps * s[0]
    u, s, vh = u[:, keep], s[keep], vh[keep]
    uy, xv = u.mT @ (y - mean_y), (new_x - mean_x) @ vh.mT
    total = float((new_y - new_y.mean(0)).square().sum())
    scores = []
    for ridge in ridges:
        penalty = ridge * float(s[0]) ** 2 if len(s) else ridge
        predicted = mean_y + xv @ ((s / (s**2 + penalty))[:, None] * uy)
        finite("ridge_r2", "the prediction", predicted)
        error = float((new_y - predicted).square().sum())
        scores.append(1 - error / total if total > 0 else math.nan)
    return scores
