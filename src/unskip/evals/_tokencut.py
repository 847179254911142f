"""TokenCut: the object of an image as one side of a normalised cut through the graph of its patches.

    A_ij = 1 if cos(x_i, x_j) > tau, else 1e-5;     (D - A) y = mu D y,  y of the second smallest mu
    seed = argmax |y|;    foreground = the part of the seed's side of mean(y) that is connected to the seed

Wang et al. 2022, "Self-Supervised Transformers for Unsupervised Object Discovery using Normalized Cut" (arXiv
2202.11539), as in its released code: edges are binary, the comparison is strict, and a patch has four neighbours. The
eigenvectors of a batch are computed together; see `_eigen`.

A mask depends on signs and a maximum, so rounding can change it. Then `sure` is False: the gap to the third eigenvalue
is below 1e-6, a patch is at the mean to within the error of y, or patches of different components share the maximum.
Non-finite features, and graphs with all edges or none, have no cut: their mask and box are empty and their seed is -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unskip._checks import kind_of
from unskip.errors import BadInput
from unskip.evals._eigen import second_eigenvectors

GAP = 1e-6  # results with a smaller gap between the second and third eigenvalue are not sure
_FLOOR = 1e-5  # the weight of patches without an edge
_ERROR = 1e-9  # an eigenvector's error is at most this over the gap: ten times the residual of `_eigen`
_TIE = 1e-9  # relative tolerance of the maximum |y|; of tied patches the first is the seed
_BYTES = {"cpu": 2**28, "cuda": 2**33}  # of graphs at a time


@dataclass(frozen=True)
class Discovery:
    """The object of each image. Boxes are x0, y0, x1, y1 in patches, end exclusive."""

    masks: Tensor  # (batch, rows, columns) bool
    boxes: Tensor  # (batch, 4) int64
    seeds: Tensor  # (batch,) int64, the index of a patch, or -1
    eigenvectors: Tensor  # (batch, rows, columns) float64, positive at the seed; nan without a cut
    gaps: Tensor  # (batch,) float64, mu_3 - mu_2
    sure: Tensor  # (batch,) bool, whether exact arithmetic would give the same result

    def __len__(self) -> int:
        return len(self.masks)


@torch.no_grad()
def tokencut(features: Tensor, grid: tuple[int, int], tau: float = 0.2) -> Discovery:
    """Finds the object of each image from its patch features (batch, tokens, dim); `grid` is (rows, columns).

    Tokens are the patches, row by row, without class or register tokens.
    """
    rows, columns = _checked(features, grid, tau)
    nodes = rows * columns
    chunk = max(1, _BYTES.get(features.device.type, 2**28) // (24 * nodes**2))
    parts = [_cut(part, rows, columns, tau) for part in features.split(chunk)]
    return Discovery(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _checked(features: Tensor, grid: tuple[int, int], tau: float) -> tuple[int, int]:
    if not isinstance(features, Tensor) or not features.is_floating_point() or features.ndim != 3:
        raise BadInput(f"tokencut: features must be floating (batch, tokens, dim), got {kind_of(features)}")
    rows, columns = (int(side) for side in grid)
    tokens = features.shape[1]
    if rows < 1 or columns < 1 or rows * columns != tokens:
        extra = tokens - rows * columns
        hint = f"; leave out the {extra} tokens before the patches" if 0 < extra <= 16 else ""
        raise BadInput(f"tokencut: {tokens} tokens do not fill a grid of {rows} x {columns} patches{hint}")
    if tokens < 2 or features.shape[2] < 1 or len(features) < 1:
        raise BadInput(f"tokencut: features are {tuple(features.shape)}; a cut needs an image of two patches or more")
    if not -1 <= tau < 1:
        raise BadInput(f"tokencut: tau is {tau}; it is a cosine and must be at least -1 and below 1")
    return rows, columns


def _cut(features: Tensor, rows: int, columns: int, tau: float) -> tuple[Tensor, ...]:
    finite = features.isfinite().all(2).all(1)
    edges = _edges(torch.where(finite[:, None, None], features, 0.0), tau)
    count = edges.sum((1, 2)) - edges.diagonal(dim1=1, dim2=2).sum(1)  # without self-loops
    images, nodes = len(edges), rows * columns
    # Graphs without a cut are left out: every solver would fail on them, down to the slowest.
    solvable = (finite & (count != 0) & (count != nodes * (nodes - 1))).nonzero()[:, 0]
    masks = edges.new_zeros(images, rows, columns)
    seeds = solvable.new_full((images,), -1)
    vectors = features.new_full((images, nodes), torch.nan, dtype=torch.float64)
    gaps = vectors.new_zeros(images)
    sure = edges.new_zeros(images)
    if len(solvable):
        results = _solve(edges[solvable], rows, columns)
        for out, values in zip((masks, seeds, vectors, gaps, sure), results, strict=True):
            out[solvable] = values
    return masks, boxes_of(masks), seeds, vectors.view(-1, rows, columns), gaps, sure


def _solve(edges: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
    """Masks, seeds, vectors, gaps and whether they are sure, for graphs that have a cut."""
    y, gaps, root = second_eigenvectors(edges, _FLOOR)
    seed, y, side = _sides(y)
    masks = connected(side.view(-1, rows, columns), seed)
    # An error of y could move a patch across the mean, or the maximum outside the mask.
    error = (_ERROR / gaps.clamp_min(GAP))[:, None] / root
    margin = (y - y.mean(1, keepdim=True)).abs() - error - error.mean(1, keepdim=True)
    size = y.abs()
    rivals = size + 2 * error >= size.amax(1, keepdim=True)
    sure = (gaps >= GAP) & (margin > 0).all(1) & (~rivals | masks.flatten(1)).all(1)
    return masks, seed, y, gaps, sure


def _edges(features: Tensor, tau: float) -> Tensor:
    """(batch, tokens, tokens) bool, symmetric."""
    dtype = torch.promote_types(features.dtype, torch.float32)
    if features.is_cuda and torch.get_float32_matmul_precision() != "highest":
        dtype = torch.float64  # TF32 would change edges
    with torch.autocast(features.device.type, enabled=False):
        unit = F.normalize(features.to(dtype), dim=2)
        cosines = torch.bmm(unit, unit.mT)
    edges = cosines > tau
    return edges & edges.mT  # rounding need not be symmetric


def _sides(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The seed of each image, y with the sign that puts the seed above the mean, and the side of the seed."""
    size = y.abs()
    best = size.amax(1, keepdim=True)
    indices = torch.arange(y.shape[1], device=y.device)
    seed = torch.where(size >= best * (1 - _TIE), indices, y.shape[1]).amin(1)
    side = y > y.mean(1, keepdim=True)
    flipped = ~side.gather(1, seed[:, None])
    return seed, torch.where(flipped, -y, y), side ^ flipped


def connected(side: Tensor, seed: Tensor) -> Tensor:
    """The 4-connected component of the seed in a mask (batch, rows, columns)."""
    component = F.one_hot(seed, side.shape[1] * side.shape[2]).bool().view_as(side) & side
    while True:
        before = component
        for _ in range(4):  # the comparison below waits for the GPU, so do it less often
            padded = F.pad(component, (1, 1, 1, 1))
            near = padded[:, :-2, 1:-1] | padded[:, 2:, 1:-1] | padded[:, 1:-1, :-2] | padded[:, 1:-1, 2:]
            component = (component | near) & side
        if torch.equal(before, component):
            return component


def boxes_of(masks: Tensor) -> Tensor:
    """The smallest boxes (batch, 4) around masks; zeros for an empty mask."""
    edges = []
    for inside in (masks.any(1), masks.any(2)):  # columns, rows
        length = inside.shape[1]
        indices = torch.arange(length, device=masks.device)
        low = torch.where(inside, indices, length).amin(1)
        high = torch.where(inside, indices + 1, 0).amax(1)
        edges.append((torch.where(inside.any(1), low, 0), high))
    (left, right), (top, bottom) = edges
    return torch.stack([left, top, right, bottom], 1)
