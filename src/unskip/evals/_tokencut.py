"""TokenCut: the object of an image as one side of a cut through the graph of its patches.

    A_ij = 1 where cos(x_i, x_j) > tau, 1e-5 elsewhere;     (D - A) y = mu D y,  y of the second smallest mu
    seed = argmax |y|;    foreground = the side of mean(y) the seed is on, and of it the part connected to the seed

Wang et al. 2022, "Self-Supervised Transformers for Unsupervised Object Discovery using Normalized Cut" (arXiv
2202.11539), as its released code does it: edges are binary, the comparison is strict, neighbours are the four that
share a side. Whole batches are cut at once; see `_eigen` for how.

A mask follows from signs and from a maximum, so rounding can decide it. Where it could, `sure` is False: where the gap
to the third eigenvalue is below 1e-6, where a patch lies on the mean to within the error of y, or where patches of
different parts share the maximum. Two graphs have no answer: that of features which are not finite, and one without a
difference between its patches (all edges, or none). Their mask and box are empty and their seed is -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unskip._checks import kind_of
from unskip.errors import BadInput
from unskip.evals._eigen import second_eigenvectors

GAP = 1e-6  # between the second and the third eigenvalue, below which an answer is not sure
_FLOOR = 1e-5  # the weight of what is no edge
_ERROR = 1e-9  # of an eigenvector is at most this over the gap: ten times the residual of `_eigen`
_TIE = 1e-9  # of the largest |y|: patches so near to it share it, and the first of them is the seed
_BYTES = {"cpu": 2**28, "cuda": 2**33}  # of graphs held at a time


@dataclass(frozen=True)
class Discovery:
    """What was found in each image. Boxes are x0, y0, x1, y1 in patches, end exclusive."""

    masks: Tensor  # (batch, rows, columns) bool
    boxes: Tensor  # (batch, 4) int64
    seeds: Tensor  # (batch,) int64, the patch by its number, or -1
    eigenvectors: Tensor  # (batch, rows, columns) float64, positive at the seed; nan where there is no graph
    gaps: Tensor  # (batch,) float64, mu_3 - mu_2
    sure: Tensor  # (batch,) bool, whether any exact arithmetic would find the same

    def __len__(self) -> int:
        return len(self.masks)


@torch.no_grad()
def tokencut(features: Tensor, grid: tuple[int, int], tau: float = 0.2) -> Discovery:
    """Finds the object of each image from its patch features (batch, tokens, dim); `grid` is (rows, columns).

    The tokens are the patches, row by row, without class or register tokens.
    """
    rows, columns = _checked(features, grid, tau)
    nodes = rows * columns
    chunk = max(1, _BYTES.get(features.device.type, 2**28) // (24 * nodes**2))
    parts = [_cut(part, rows, columns, tau) for part in features.split(chunk)]
    return Discovery(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _checked(features: Tensor, grid: tuple[int, int], tau: float) -> tuple[int, int]:
    if not isinstance(features, Tensor) or not features.is_floating_point() or features.ndim != 3:
        raise BadInput(f"tokencut: features are floating (batch, tokens, dim), got {kind_of(features)}")
    rows, columns = (int(side) for side in grid)
    tokens = features.shape[1]
    if rows < 1 or columns < 1 or rows * columns != tokens:
        more = tokens - rows * columns
        hint = f"; leave out the {more} tokens before the patches" if 0 < more <= 16 else ""
        raise BadInput(f"tokencut: {tokens} tokens do not fill a grid of {rows} x {columns} patches{hint}")
    if tokens < 2 or features.shape[2] < 1 or len(features) < 1:
        raise BadInput(f"tokencut: features are {tuple(features.shape)}; a cut needs an image of two patches or more")
    if not -1 <= tau < 1:
        raise BadInput(f"tokencut: tau is {tau}; it is a cosine, -1 or more and below 1")
    return rows, columns


def _cut(features: Tensor, rows: int, columns: int, tau: float) -> tuple[Tensor, ...]:
    whole = features.isfinite().all(2).all(1)
    edges = _edges(torch.where(whole[:, None, None], features, 0.0), tau)
    count = edges.sum((1, 2)) - edges.diagonal(dim1=1, dim2=2).sum(1)  # without those from a patch to itself
    images, nodes = len(edges), rows * columns
    known = whole & (count != 0) & (count != nodes * (nodes - 1))
    # Graphs without an answer are not solved: the slowest solver of all would be the one to give up on them.
    some = known.nonzero()[:, 0]
    masks = edges.new_zeros(images, rows, columns)
    seeds = some.new_full((images,), -1)
    vectors = features.new_full((images, nodes), torch.nan, dtype=torch.float64)
    gaps = vectors.new_zeros(images)
    sure = edges.new_zeros(images)
    if len(some):
        masks[some], seeds[some], vectors[some], gaps[some], sure[some] = _solved(edges[some], rows, columns)
    return masks, boxes_of(masks), seeds, vectors.view(-1, rows, columns), gaps, sure


def _solved(edges: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
    """Masks, seeds, vectors, gaps and whether they are sure, of graphs that have an answer."""
    y, gaps, root = second_eigenvectors(edges, _FLOOR)
    seed, y, side = _sides(y)
    masks = connected(side.view(-1, rows, columns), seed)
    # Where could a smaller error have led elsewhere?
    allowed = (_ERROR / gaps.clamp_min(GAP))[:, None] / root
    off = (y - y.mean(1, keepdim=True)).abs() - allowed - allowed.mean(1, keepdim=True)
    size = y.abs()
    rivals = size + 2 * allowed >= size.amax(1, keepdim=True)
    sure = (gaps >= GAP) & (off > 0).all(1) & (~rivals | masks.flatten(1)).all(1)
    return masks, seed, y, gaps, sure


def _edges(features: Tensor, tau: float) -> Tensor:
    """(batch, tokens, tokens) bool, symmetric."""
    kind = torch.promote_types(features.dtype, torch.float32)
    if features.is_cuda and torch.get_float32_matmul_precision() != "highest":
        kind = torch.float64  # TF32 would move edges
    with torch.autocast(features.device.type, enabled=False):
        unit = F.normalize(features.to(kind), dim=2)
        cosines = torch.bmm(unit, unit.mT)
    edges = cosines > tau
    return edges & edges.mT  # a product need not round the same way on both sides of the diagonal


def _sides(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The seed of each image, y with the sign that makes it positive there, and the side the seed is on."""
    size = y.abs()
    best = size.amax(1, keepdim=True)
    places = torch.arange(y.shape[1], device=y.device)
    seed = torch.where(size >= best * (1 - _TIE), places, y.shape[1]).amin(1)
    side = y > y.mean(1, keepdim=True)
    turned = ~side.gather(1, seed[:, None])
    return seed, torch.where(turned, -y, y), side ^ turned


def connected(side: Tensor, seed: Tensor) -> Tensor:
    """The part of a mask (batch, rows, columns) that is connected to its seed by patches that share a side."""
    reach = F.one_hot(seed, side.shape[1] * side.shape[2]).bool().view_as(side) & side
    while True:
        before = reach
        for _ in range(4):  # a look at the result waits for the device
            wide = F.pad(reach, (1, 1, 1, 1))
            near = wide[:, :-2, 1:-1] | wide[:, 2:, 1:-1] | wide[:, 1:-1, :-2] | wide[:, 1:-1, 2:]
            reach = (reach | near) & side
        if torch.equal(before, reach):
            return reach


def boxes_of(masks: Tensor) -> Tensor:
    """The smallest boxes (batch, 4) around masks; zeros around an empty one."""
    edges = []
    for there in (masks.any(1), masks.any(2)):  # columns, rows
        length = there.shape[1]
        places = torch.arange(length, device=masks.device)
        low = torch.where(there, places, length).amin(1)
        high = torch.where(there, places + 1, 0).amax(1)
        edges.append((torch.where(there.any(1), low, 0), high))
    (left, right), (top, bottom) = edges
    return torch.stack([left, top, right, bottom], 1)
