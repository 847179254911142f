"""Input reconstruction: how much of the input is still in layer l (its "echo"), and at which spatial frequencies.

    cosine      mean over tokens of <x_0, x_l> / (|x_0| |x_l|)
    ridge R^2   1 - |x_0 - A x_l - b|^2 / |x_0 - mean|^2 on held-out samples, A and b fitted by ridge regression
    high share  sum of |DFT|^2 above a radius / sum of |DFT|^2 without the mean, of patch tokens on their grid

A full-strength shortcut carries the input to every depth: "Residual Connections Harm Generative Representation
Learning", arXiv 2404.10947, holds that this brings shallow detail and high frequencies into deep layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip._checks import finite, kind_of
from unskip.errors import BadInput
from unskip.measures._input import centred, floats, same_rows

GRID = tuple(10.0**power for power in range(-10, 3))  # ridges tried, relative to the largest squared singular value


def cosine(x0: Tensor, xl: Tensor) -> float:
    """The mean over tokens of the cosine between x0 and xl, both (..., dim); nan if any token is zero."""
    a, b = floats("cosine", "x0", x0, "(..., dim)", 1), floats("cosine", "xl", xl, "(..., dim)", 1)
    if a.shape != b.shape:
        raise BadInput(f"cosine: both must have one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    return float(((a / a.norm(dim=-1, keepdim=True)) * (b / b.norm(dim=-1, keepdim=True))).sum(-1).mean())


def feature_norm(x: Tensor) -> float:
    """The mean over tokens of |x|, x (..., dim)."""
    return float(floats("feature_norm", "x", x, "(..., dim)", 1).norm(dim=-1).mean())


def ridge_r2(x: Tensor, y: Tensor, *, groups: Tensor | None = None, generator: torch.Generator | None = None) -> float:
    """R^2 of y (samples, dim) predicted from x (samples, other dim) by ridge regression, on a held-out quarter.

    `groups` (samples,) numbers what belongs together, such as the tokens of an image: a group is held out whole, or
    tokens would be predicted from their neighbours. The ridge is the best of a grid on a quarter of the training
    groups; then it is fitted again on all. The sums run over samples and dims, around the held-out mean. Less than 0 is
    worse than that mean; nan where the held-out y does not vary.
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
    factor = GRID[max(range(len(GRID)), key=lambda at: -math.inf if math.isnan(scores[at]) else scores[at])]
    return ridge_scores(train_x, train_y, wide_x[test], wide_y[test], (factor,))[0]


def high_frequency_share(tokens: Tensor, grid: tuple[int, int], cutoff: float = 0.5) -> float:
    """The share of the spatial energy of patch tokens (batch, rows * cols, dim) that lies above a frequency.

    A 2-D DFT of each channel on the grid, its zero frequency (the mean over patches) left out; energies are summed over
    batch and channels. The radius of a frequency is sqrt(a^2 + b^2), a and b in units of Nyquist, one period in two
    patches: 1 along an axis, sqrt(2) in the corner. Energy at radii above `cutoff` counts as high. The DFT is periodic:
    a slope over the image has some high energy at its border. nan where tokens do not vary over patches.
    """
    wide = floats("high_frequency_share", "tokens", tokens, "(batch, rows * cols, dim) without prefix tokens", 3, 3)
    rows, columns = grid
    if rows < 1 or columns < 1 or rows * columns != wide.shape[1]:
        raise BadInput(
            f"high_frequency_share: {wide.shape[1]} tokens do not fill a grid of {rows} x {columns}; cut off prefix "
            "tokens such as cls, and give the grid as (rows, cols)"
        )
    patches = centred(wide.transpose(0, 1).flatten(1), tokens.dtype).unflatten(0, (rows, columns))
    energy = torch.fft.fft2(patches, dim=(0, 1)).abs().square().sum(-1)  # (rows, cols)
    energy[0, 0] = 0  # what rounding left of the mean
    # In float64: in float32 some frequencies on the cutoff come out above it.
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
    numbers: Tensor = torch.unique(groups.cpu(), return_inverse=True)[1]
    return numbers


def held_out(ids: Tensor, generator: torch.Generator) -> Tensor:
    """A mask of the samples whose group falls into a random quarter of the groups, at least one on each side."""
    names = torch.unique(ids)
    if len(names) < 2:
        raise BadInput("ridge_r2: one group on a side, and it takes two to hold one out; measure more samples")
    take = min(len(names) - 1, max(1, round(len(names) / 4)))
    order = torch.randperm(len(names), generator=generator, device=generator.device).cpu()
    return torch.isin(ids, names[order[:take]])


def ridge_scores(x: Tensor, y: Tensor, new_x: Tensor, new_y: Tensor, ridges: tuple[float, ...]) -> list[float]:
    """R^2 on the new samples for each ridge, relative to the largest squared singular value of the training x."""
    mean_x, mean_y = x.mean(0), y.mean(0)
    u, s, vh = torch.linalg.svd(x - mean_x, full_matrices=False)
    keep = s > max(x.shape) * torch.finfo(torch.float64).eps * s[0]
    u, s, vh = u[:, keep], s[keep], vh[keep]
    onto, from_new = u.mT @ (y - mean_y), (new_x - mean_x) @ vh.mT
    around = new_y - new_y.mean(0)
    total = float(around.square().sum())
    out = []
    for ridge in ridges:
        added = ridge * float(s[0]) ** 2 if len(s) else ridge
        predicted = mean_y + from_new @ ((s / (s**2 + added))[:, None] * onto)
        finite("ridge_r2", "the prediction", predicted)
        error = float((new_y - predicted).square().sum())
        out.append(1 - error / total if total > 0 else math.nan)
    return out
