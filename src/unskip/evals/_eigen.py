"""The second eigenvector of a normalised cut, for a batch of graphs at once.

    (D - A) y = mu D y,    A_ij = 1 for an edge and `floor` elsewhere,   D its degrees

With M = D^-1/2 A D^-1/2 and y = D^-1/2 x this is M x = (1 - mu) x. The first eigenvector is known: u = D^1/2 1,
normalised, with eigenvalue 1. M - 2 u u^T moves its eigenvalue to -1, so the second becomes the leading one. Each
iteration is one product with A for all graphs:

    1. Lanczos' method in float32, where the zeros and ones of A are still exact, for the first digits
    2. Newton's correction for the rest: the residual in float64, the equation (M - theta) d = -r in float32
    3. for graphs that have not converged, Lanczos' method in float64, restarted with its best vectors (Wu & Simon 2000)
    4. for graphs that still have not converged, and for small ones, `torch.linalg.eigh`

A GPU multiplies whole matrices in the time of a few vectors, so it squares the matrix instead (see _squaring). The
result has a residual below 1e-10 in float64, or comes from step 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.evals._squaring import leading

_SMALL = 32  # graphs of up to 32 nodes are solved by eigh
_WIDTH = 2  # two start vectors find a double eigenvalue; one would take it for a single one
_FIRST, _MORE = 20, 10  # sizes of the first basis and of a correction's
_CORRECTIONS = 3
_BASIS, _KEPT, _STEPS = 24, 4, 400  # float64 Lanczos: basis size, vectors kept at a restart, most steps
_TOLERANCE = 1e-10  # on the residual of the wanted eigenpair
_NEXT = 0.1  # on the residual of the next pair, as a fraction of the gap: only its eigenvalue matters
_LEAST = 1e-8  # smallest tolerance for the next pair: no caller needs smaller gaps
_ENTRIES = 2**28  # matrix entries to square at a time


def second_eigenvectors(edges: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """For symmetric bool `edges` (graphs, nodes, nodes): float64 y (graphs, nodes), gaps (graphs,), and D^1/2.

    The gap is mu_3 - mu_2, to within a tenth of it or 1e-8. Vectors have y^T D y = 1; their sign is arbitrary.
    """
    nodes = edges.shape[1]
    count = edges.view(torch.uint8).to(torch.float32).sum(2).double()  # exact
    root = ((1 - floor) * count + floor * nodes).sqrt()  # D^1/2
    if nodes <= _SMALL:
        values, vectors = _dense(edges, floor, root)
        gaps = values[:, 0] - values[:, 1]
    elif edges.is_cuda:
        chunk = max(1, _ENTRIES // nodes**2)
        parts = [_squared(*each, floor) for each in zip(edges.split(chunk), root.split(chunk), strict=True)]
        vectors, gaps = (torch.cat(each) for each in zip(*parts, strict=True))
    else:
        vectors, gaps = _iterated(edges, floor, root)
    return vectors / root, gaps, root


def _iterated(edges: Tensor, floor: float, root: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors and gaps by steps 1 to 4 above, each for the graphs that have not converged before it."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(1, _WIDTH, edges.shape[1], generator=draw, dtype=torch.float64).to(edges.device)
    coarse, fine = (_Operator.of(edges, floor, root, dtype) for dtype in (torch.float32, torch.float64))
    values, ritz, _ = _lanczos(coarse, start.expand(len(edges), -1, -1), _FIRST, _FIRST, 0.0)
    vectors = ritz[:, 0].clone()
    left = every = torch.arange(len(edges), device=edges.device)
    for _ in range(_CORRECTIONS):
        left = every if 2 * len(left) > len(every) else left  # selecting most of them costs more than it saves
        values[left, 0], vectors[left], residual = _corrected(coarse.select(left), fine.select(left), vectors[left])
        left = left[~(residual < _TOLERANCE)]
        if not len(left):
            break
    second = ritz[:, 1:2].float()
    done = _gap_is_known(values, ritz, (coarse(second) - values[:, 1, None, None] * second).norm(dim=2)[:, 0])
    done[left] = False
    left = (~done).nonzero()[:, 0]
    if len(left):
        ritz[:, 0] = vectors
        values[left], ritz, done = _lanczos(fine.select(left), ritz[left], _BASIS, _STEPS, _TOLERANCE)
        vectors[left] = ritz[:, 0]
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
        # Bytes are converted faster than bools.
        return _Operator(edges.view(torch.uint8).to(dtype), floor, (1 / root).to(dtype), first.to(dtype))

    def select(self, graphs: Tensor) -> _Operator:
        """The operator of the graphs with these indices."""
        if len(graphs) == len(self.ones):
            return self
        return _Operator(self.ones[graphs], self.floor, self.scale[graphs], self.first[graphs])

    def __call__(self, rows: Tensor) -> Tensor:
        """Applied to vectors (graphs, k, nodes), stored as rows because that product is fastest."""
        scaled = rows * self.scale[:, None]
        out = torch.bmm(scaled, self.ones).mul_(1 - self.floor).add_(scaled.sum(2, keepdim=True), alpha=self.floor)
        out.mul_(self.scale[:, None])
        return out.sub_((rows * self.first[:, None]).sum(2, keepdim=True).mul(2) * self.first[:, None])


def _dense(edges: Tensor, floor: float, root: Tensor) -> tuple[Tensor, Tensor]:
    """The two leading eigenvalues and the leading eigenvector, by `torch.linalg.eigh`."""
    first = root / root.norm(dim=1, keepdim=True)
    affinity = edges.double() * (1 - floor) + floor
    matrix = affinity / (root[:, :, None] * root[:, None, :]) - 2 * first[:, :, None] * first[:, None, :]
    values, vectors = torch.linalg.eigh(matrix)
    return values[:, [-1, max(-2, -values.shape[1])]], vectors[:, :, -1]


def _squared(edges: Tensor, root: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Vectors and gaps by squaring (1 + M) / 2 - u u^T, which has no negative eigenvalue."""
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
    """One Newton step from x (graphs, nodes): the new eigenvalue, vector, and residual norm."""
    x = _unit(x)  # it was normalised only in float32
    image = fine(x[:, None])[:, 0]
    value = (x * image).sum(1)
    residual = image - value[:, None] * x
    size = residual.norm(dim=1, keepdim=True)
    # A basis that starts with the residual, orthogonal to x. In it the equation is (theta - T) c = |r| e_1.
    basis, image_of_basis = _krylov(coarse, _unit(residual.float())[:, None], x.float()[:, None], _MORE)
    inner = torch.bmm(basis, image_of_basis.mT)
    inner = torch.diag_embed(value.float()[:, None].expand(-1, _MORE)) - (inner + inner.mT) / 2
    right = torch.zeros_like(basis[:, :, :1])
    right[:, 0] = 1
    weights, _ = torch.linalg.solve_ex(inner, right)
    x = _unit(x + size * torch.bmm(weights.mT, basis)[:, 0].double())
    image = fine(x[:, None])[:, 0]
    value = (x * image).sum(1)
    return value, x, (image - value[:, None] * x).norm(dim=1)


def _krylov(operator: _Operator, start: Tensor, outside: Tensor, count: int, width: int = 1) -> tuple[Tensor, Tensor]:
    """An orthonormal basis (graphs, count, nodes) orthogonal to the rows `outside`, and the operator's image of it.

    The basis starts with the rows of `start`, followed by the images of the last `width` vectors, and so on.
    """
    graphs, first, nodes = start.shape
    skip = outside.shape[1]
    basis, image = (start.new_empty(graphs, skip + count, nodes) for _ in range(2))
    basis[:, :skip] = outside
    begin, end = skip, skip + first
    while begin < skip + count:
        for index in range(begin, end):
            vector = start[:, index - skip] if begin == skip else image[:, index - width]
            basis[:, index] = _orthogonalised(vector, basis[:, :index])
        image[:, begin:end] = operator(basis[:, begin:end])
        begin, end = end, min(end + width, skip + count)
    return basis[:, skip:], image[:, skip:]


def _lanczos(
    operator: _Operator, start: Tensor, size: int, steps: int, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The two leading eigenvalues (graphs, 2), Ritz vectors (graphs, kept, nodes), float64, and which converged."""
    rows = start.to(operator.scale.dtype)
    empty = rows[:, :0]
    step = 0
    while True:
        basis, image = _krylov(operator, rows, empty, size, _WIDTH)
        step += size
        values, rotation = torch.linalg.eigh(torch.bmm(basis, image.mT))
        values = values.flip(1)[:, :_KEPT]
        rotation = rotation.flip(2).mT[:, :_KEPT]  # (graphs, kept, size)
        ritz = torch.bmm(rotation, basis)
        residual = torch.bmm(rotation, image)[:, :2] - ritz[:, :2] * values[:, :2, None]
        norms = residual.norm(dim=2)
        done = (norms[:, 0] < tolerance) & _gap_is_known(values, ritz, norms[:, 1])
        if step >= steps or bool(done.all()):
            return values[:, :2].double(), ritz.double(), done
        rows = torch.cat([ritz, residual], 1)


def _gap_is_known(values: Tensor, ritz: Tensor, residual: Tensor) -> Tensor:
    """Whether the second pair, with this residual, is accurate enough for the gap between both eigenvalues."""
    nonzero = ritz[:, :2].norm(dim=2).amin(1) > 0.5  # an exhausted basis is filled with zeros
    known: Tensor = nonzero & (residual < (_NEXT * (values[:, 0] - values[:, 1])).clamp_min(_LEAST))
    return known


def _orthogonalised(vector: Tensor, rows: Tensor) -> Tensor:
    """Vectors (graphs, nodes) orthogonal to orthonormal rows (graphs, k, nodes), at unit length; 0 within their span.

    The projection is subtracted twice, because of rounding.
    """
    vector = _unit(vector)
    for _ in range(2):
        vector = torch.baddbmm(vector[:, None], torch.bmm(vector[:, None], rows.mT), rows, alpha=-1)[:, 0]
    nonzero = vector.norm(dim=1, keepdim=True) > 10 * torch.finfo(vector.dtype).eps
    return torch.where(nonzero, _unit(vector), 0.0)


def _unit(vector: Tensor) -> Tensor:
    unit: Tensor = vector / vector.norm(dim=1, keepdim=True).clamp_min(torch.finfo(vector.dtype).tiny)
    return unit
