"""The second eigenvector of a normalised cut, for a batch of graphs at once.

    (D - A) y = mu D y,    A_ij = 1 for an edge and `floor` elsewhere,   D its degrees

With M = D^-1/2 A D^-1/2 and y = D^-1/2 x this is M x = (1 - mu) x. The first eigenvector is known, u = D^1/2 1 at 1,
and M - 2 u u^T has it at -1, out of the way; the second is now the leading one. A step is one product with A for all
graphs:

    1. Lanczos' method in float32, in which zeros and ones are as exact as elsewhere, for the first digits
    2. Newton's correction for the rest: the residual in float64, the equation (M - theta) d = -r in float32
    3. where that is not enough, Lanczos' method in float64, restarted with its best vectors (Wu & Simon 2000)
    4. where that is not enough either, and for small graphs, `torch.linalg.eigh`

A GPU, which multiplies whole matrices in the time of a few vectors, squares instead (see _squaring). What is handed
out has a residual below 1e-10 in float64, or comes from 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.evals._squaring import leading

_SMALL = 32  # a graph of so many nodes is solved whole
_WIDTH = 2  # two vectors to start from see an eigenvalue that is double; one would take it for a single
_FIRST, _MORE = 20, 10  # vectors of the first basis, and of one that corrects
_CORRECTIONS = 3
_BASIS, _KEPT, _STEPS = 24, 4, 400  # vectors of the last basis at most, after a restart, and steps in all
_TOLERANCE = 1e-10  # of the residual of the wanted pair
_NEXT = 0.1  # of the residual of the pair after it, as a share of the gap: only its eigenvalue matters
_LEAST = 1e-8  # and no less than this, where gaps are smaller than anybody asks
_HELD = 2**28  # entries of the matrices that are squared at a time


def second_eigenvectors(edges: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of (graphs, nodes, nodes), bool, symmetric: vectors y (graphs, nodes), float64, gaps (graphs,), degrees' roots.

    The gap is mu_3 - mu_2, right to a tenth of it or to 1e-8. Vectors have y^T D y = 1; their sign is not fixed.
    """
    nodes = edges.shape[1]
    count = edges.view(torch.uint8).to(torch.float32).sum(2).double()  # exact
    root = ((1 - floor) * count + floor * nodes).sqrt()  # of the degrees
    if nodes <= _SMALL:
        values, vectors = _dense(edges, floor, root)
        gaps = values[:, 0] - values[:, 1]
    elif edges.is_cuda:
        some = max(1, _HELD // nodes**2)
        parts = [_squared(*each, floor) for each in zip(edges.split(some), root.split(some), strict=True)]
        vectors, gaps = (torch.cat(each) for each in zip(*parts, strict=True))
    else:
        vectors, gaps = _iterated(edges, floor, root)
    return vectors / root, gaps, root


def _iterated(edges: Tensor, floor: float, root: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors and gaps by steps 1 to 4 above, each for the graphs that the one before it has left."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(1, _WIDTH, edges.shape[1], generator=draw, dtype=torch.float64).to(edges.device)
    coarse, fine = (_Operator.of(edges, floor, root, dtype) for dtype in (torch.float32, torch.float64))
    values, ritz, _ = _lanczos(coarse, start.expand(len(edges), -1, -1), _FIRST, _FIRST, 0.0)
    vectors = ritz[:, 0].clone()
    left = every = torch.arange(len(edges), device=edges.device)
    for _ in range(_CORRECTIONS):
        left = every if 2 * len(left) > len(every) else left  # to pick most of them out would cost more than it saves
        values[left, 0], vectors[left], residual = _corrected(coarse.some(left), fine.some(left), vectors[left])
        left = left[~(residual < _TOLERANCE)]
        if not len(left):
            break
    second = ritz[:, 1:2].float()
    done = _gap_is_known(values, ritz, (coarse(second) - values[:, 1, None, None] * second).norm(dim=2)[:, 0])
    done[left] = False
    left = (~done).nonzero()[:, 0]
    if len(left):
        ritz[:, 0] = vectors
        values[left], again, done = _lanczos(fine.some(left), ritz[left], _BASIS, _STEPS, _TOLERANCE)
        vectors[left] = again[:, 0]
        left = left[~done]
    if len(left):
        values[left], vectors[left] = _dense(edges[left], floor, root[left])
    return vectors, values[:, 0] - values[:, 1]


@dataclass(frozen=True)
class _Operator:
    """M - 2 u u^T of every graph, in one precision."""

    ones: Tensor  # (graphs, nodes, nodes)
    floor: float
    scale: Tensor  # (graphs, nodes), D^-1/2
    first: Tensor  # u

    @staticmethod
    def of(edges: Tensor, floor: float, root: Tensor, dtype: torch.dtype) -> _Operator:
        first = root / root.norm(dim=1, keepdim=True)
        # Bytes are converted faster than truth values.
        return _Operator(edges.view(torch.uint8).to(dtype), floor, (1 / root).to(dtype), first.to(dtype))

    def some(self, graphs: Tensor) -> _Operator:
        """Those of some graphs, by their numbers."""
        if len(graphs) == len(self.ones):
            return self
        return _Operator(self.ones[graphs], self.floor, self.scale[graphs], self.first[graphs])

    def __call__(self, rows: Tensor) -> Tensor:
        """Of vectors (graphs, k, nodes); they are rows, for which the product is fastest."""
        scaled = rows * self.scale[:, None]
        out = torch.bmm(scaled, self.ones).mul_(1 - self.floor).add_(scaled.sum(2, keepdim=True), alpha=self.floor)
        out.mul_(self.scale[:, None])
        return out.sub_((rows * self.first[:, None]).sum(2, keepdim=True).mul(2) * self.first[:, None])


def _dense(edges: Tensor, floor: float, root: Tensor) -> tuple[Tensor, Tensor]:
    """Two leading eigenvalues and the first vector, by `torch.linalg.eigh`."""
    first = root / root.norm(dim=1, keepdim=True)
    affinity = edges.double() * (1 - floor) + floor
    matrix = affinity / (root[:, :, None] * root[:, None, :]) - 2 * first[:, :, None] * first[:, None, :]
    values, vectors = torch.linalg.eigh(matrix)
    return values[:, [-1, max(-2, -values.shape[1])]], vectors[:, :, -1]


def _squared(edges: Tensor, root: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Vectors and gaps, from (1 + M) / 2 - u u^T, which has no eigenvalue below zero."""
    operator = _Operator.of(edges, floor, root, torch.float64)
    matrix = operator.ones.mul_((1 - floor) / 2).add_(floor / 2)
    matrix = matrix.mul_(operator.scale[:, :, None]).mul_(operator.scale[:, None, :])
    matrix.diagonal(dim1=1, dim2=2).add_(0.5)
    matrix.baddbmm_(operator.first[:, :, None], operator.first[:, None, :], alpha=-1)
    vectors, ratio = leading(matrix)
    image = torch.bmm(matrix, vectors[:, :, None])[:, :, 0]
    value = (vectors * image).sum(1)
    gaps = 2 * value * (1 - ratio)
    rest = (~(2 * (image - value[:, None] * vectors).norm(dim=1) < _TOLERANCE)).nonzero()[:, 0]
    if len(rest):
        values, vectors[rest] = _dense(edges[rest], floor, root[rest])
        gaps[rest] = values[:, 0] - values[:, 1]
    return vectors, gaps


def _corrected(coarse: _Operator, fine: _Operator, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Newton's from x (graphs, nodes): its eigenvalue, the new x, and the new residual."""
    x = _unit(x)  # which it was in float32
    image = fine(x[:, None])[:, 0]
    value = (x * image).sum(1)
    wrong = image - value[:, None] * x
    size = wrong.norm(dim=1, keepdim=True)
    # A basis from the residual on, orthogonal to x. In it the equation is (theta - T) c = |r| e_1.
    basis, moved = _krylov(coarse, _unit(wrong.float())[:, None], x.float()[:, None], _MORE)
    inner = torch.bmm(basis, moved.mT)
    inner = torch.diag_embed(value.float()[:, None].expand(-1, _MORE)) - (inner + inner.mT) / 2
    right = torch.zeros_like(basis[:, :, :1])
    right[:, 0] = 1
    weights, _ = torch.linalg.solve_ex(inner, right)
    x = _unit(x + size * torch.bmm(weights.mT, basis)[:, 0].double())
    image = fine(x[:, None])[:, 0]
    value = (x * image).sum(1)
    return value, x, (image - value[:, None] * x).norm(dim=1)


def _krylov(operator: _Operator, start: Tensor, outside: Tensor, count: int, width: int = 1) -> tuple[Tensor, Tensor]:
    """An orthonormal basis (graphs, count, nodes) from `start` on, orthogonal to the rows `outside`, and M of it.

    After the rows of `start` come M of the last `width` vectors, and so on.
    """
    graphs, first, nodes = start.shape
    away = outside.shape[1]
    basis, image = (start.new_empty(graphs, away + count, nodes) for _ in range(2))
    basis[:, :away] = outside
    begin, end = away, away + first
    while begin < away + count:
        for index in range(begin, end):
            vector = start[:, index - away] if begin == away else image[:, index - width]
            basis[:, index] = _new(vector, basis[:, :index])
        image[:, begin:end] = operator(basis[:, begin:end])
        begin, end = end, min(end + width, away + count)
    return basis[:, away:], image[:, away:]


def _lanczos(
    operator: _Operator, start: Tensor, size: int, steps: int, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Two leading eigenvalues (graphs, 2), Ritz vectors (graphs, kept, nodes), float64, and which have converged."""
    rows = start.to(operator.scale.dtype)
    nothing = rows[:, :0]
    taken = 0
    while True:
        basis, image = _krylov(operator, rows, nothing, size, _WIDTH)
        taken += size
        values, turn = torch.linalg.eigh(torch.bmm(basis, image.mT))
        values, turn = values.flip(1)[:, :_KEPT], turn.flip(2).mT[:, :_KEPT]  # (graphs, kept), (graphs, kept, size)
        ritz, moved = torch.bmm(turn, basis), torch.bmm(turn, image)
        wrong = moved[:, :2] - ritz[:, :2] * values[:, :2, None]
        residual = wrong.norm(dim=2)
        done = (residual[:, 0] < tolerance) & _gap_is_known(values, ritz, residual[:, 1])
        if taken >= steps or bool(done.all()):
            return values[:, :2].double(), ritz.double(), done
        rows = torch.cat([ritz, wrong], 1)  # the best vectors, and on from the residuals of the first two


def _gap_is_known(values: Tensor, ritz: Tensor, residual: Tensor) -> Tensor:
    """Whether the second pair, with this residual, is near enough for the gap between both eigenvalues."""
    real = ritz[:, :2].norm(dim=2).amin(1) > 0.5  # not made of the zeros of a basis that came to its end
    known: Tensor = real & (residual < (_NEXT * (values[:, 0] - values[:, 1])).clamp_min(_LEAST))
    return known


def _new(vector: Tensor, rows: Tensor) -> Tensor:
    """The direction of vectors (graphs, nodes) beyond the span of orthonormal rows (graphs, k, nodes); zero where none.

    The part within the span is taken out twice: once leaves what rounding makes of it.
    """
    vector = _unit(vector)
    for _ in range(2):
        vector = torch.baddbmm(vector[:, None], torch.bmm(vector[:, None], rows.mT), rows, alpha=-1)[:, 0]
    left = vector.norm(dim=1, keepdim=True) > 10 * torch.finfo(vector.dtype).eps
    return torch.where(left, _unit(vector), 0.0)


def _unit(vector: Tensor) -> Tensor:
    unit: Tensor = vector / vector.norm(dim=1, keepdim=True).clamp_min(torch.finfo(vector.dtype).tiny)
    return unit
