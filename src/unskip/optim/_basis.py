"""The basis of SOAP: eigenvectors of the gradient statistics, updated by one power iteration at a time.

The first basis is an eigendecomposition. A refresh takes one step of orthogonal iteration on the statistics L,

    Q  <-  QR(L Q),    the columns of Q sorted first by their Rayleigh quotients q_i' L q_i

A basis is stored transposed, a vector in each row, and statistics of equal size are batched: (rows, n, n).

QR takes most of the time on a GPU, because Householder reflections process a matrix column by column. Here it is
Gram-Schmidt over panels of vectors, with a Cholesky factorisation of each panel's Gram matrix: batched matrix products
in float64. One pass in float64 is enough: Gram-Schmidt loses orthogonality with the condition of L Q, at worst about
1e6 for float32 data, and Cholesky with its square.

The sign of a column of Q does not matter: Adam's denominator squares it, and the first moment is rotated with the
basis. L may be singular, for example for a tall gradient. Then L Q has columns of rounding errors only, which Cholesky
cannot factor. So the iteration runs on L + shift * I, which has the same eigenvectors and keeps those columns. Where
float64 is slow, and on the CPU, QR is torch.linalg.qr, without a shift.

SOAP: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (arXiv 2409.11321). Cholesky QR: Yamamoto et
al., "Roundoff error analysis of the CholeskyQR2 algorithm" (2015).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unskip.optim._kernels import inner, pick
from unskip.optim._precision import exact_product

PANEL = 256  # vectors per panel: more cost more for Cholesky, but need fewer sequential steps
SHIFT = 4  # roundings of L: a lower shift loses orthogonality, a higher one small eigenvalues
DIRECT = 64  # triangles up to this size are inverted directly
MAX_DEFECT = 1e-3  # a less orthogonal new basis is rejected, see `_defect`
FAST_FLOAT64 = {(8, 0), (9, 0), (10, 0)}  # compute capabilities with float64 products as fast as float32


class Refreshed(NamedTuple):
    basis: Tensor  # (rows, n, n), a vector in each row
    order: Tensor  # (rows, n): the index of the old vector behind each new one
    held: Tensor  # (rows,) bool: the old basis was kept, because the new one was not orthogonal


def eigenbasis(statistics: Tensor) -> Tensor:
    """All eigenvectors, a vector in each row, the largest eigenvalue first.

    If the solver fails, or returns vectors that are not orthogonal, which CUDA's may (PyTorch issue 192483), the basis
    is the identity, and refreshes rotate it towards the eigenvectors.
    """
    # Eigenvectors do not depend on the scale, and squared gradients may be too small for the solver.
    vectors = _eigenvectors(statistics * _scale(statistics)[:, None, None])
    basis = vectors.flip(-1).mT.contiguous()
    eye = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
    return torch.where((_defect(basis) < MAX_DEFECT)[:, None, None], basis, eye)


def _eigenvectors(statistics: Tensor) -> Tensor:
    """Eigenvectors in columns, the smallest eigenvalue first; NaN where the solver fails.

    In float32 it may not converge for a low rank, such as the gradient of an embedding with unused tokens.
    """
    try:
        vectors: Tensor = torch.linalg.eigh(statistics)[1]
        return vectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        if len(statistics) > 1:
            return torch.cat([_eigenvectors(each) for each in statistics.split(1)])
        if statistics.dtype == torch.float64:
            return torch.full_like(statistics, torch.nan)
        return _eigenvectors(statistics.double()).to(statistics.dtype)


def refresh(statistics: Tensor, basis: Tensor) -> Refreshed:
    """One sorted step of orthogonal iteration, without a host synchronisation. On a GPU the basis may be float16."""
    moved = exact_product(basis, statistics, _scale(statistics))  # L is symmetric: the rows of Q' L
    quotients, squares = inner(basis, moved)  # (rows, n)
    size = squares.sum(-1).sqrt()  # the Frobenius norm of L, an upper bound of its largest eigenvalue
    order = quotients.argsort(dim=-1, descending=True, stable=True)
    if _fast_float64(basis.device):
        shift = torch.where(size > 0, SHIFT * torch.finfo(moved.dtype).eps * size, 1.0)
        new = orthonormal_rows_(pick(moved, basis, shift, order)).to(moved.dtype)
    else:
        nonzero = torch.where(size[:, None, None] > 0, moved, basis.to(moved.dtype))
        new = torch.linalg.qr(nonzero.take_along_dim(order[:, :, None], -2).mT).Q.mT.contiguous()
    held = ~(_defect(new) < MAX_DEFECT)  # also for a NaN
    unchanged = torch.arange(order.shape[-1], device=order.device)
    return Refreshed(torch.where(held[:, None, None], basis, new), torch.where(held[:, None], unchanged, order), held)


def orthonormal_rows_(rows: Tensor, panel: int = PANEL) -> Tensor:
    """Gram-Schmidt over the rows of (batch, n, n), panel by panel, in place: the Q of QR up to signs."""
    for start in range(0, rows.shape[-2], panel):
        block, done = rows[:, start : start + panel], rows[:, :start]
        if start:
            block.baddbmm_(torch.bmm(block, done.mT), done, alpha=-1)
        _orthonormal_panel_(block)
    return rows


def _fast_float64(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in FAST_FLOAT64


def _orthonormal_panel_(block: Tensor) -> None:
    """Makes rows (batch, panel, n) orthonormal; the first k rows keep their span for every k."""
    gram = torch.bmm(block, block.mT)
    # Normalised rows, and a diagonal term: rounding may make the Gram matrix of nearly dependent rows indefinite.
    lengths = gram.diagonal(dim1=-2, dim2=-1).clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()
    gram.mul_(lengths[:, :, None] * lengths[:, None, :])
    gram.diagonal(dim1=-2, dim2=-1).add_(4 * torch.finfo(gram.dtype).eps)
    factor = torch.linalg.cholesky_ex(gram, check_errors=False).L
    rows = torch.bmm(inverse_lower(factor).mul_(lengths[:, None, :]), block)
    # One correction of the orthogonality of ill-conditioned rows: V <- V + (I - V V') V / 2.
    torch.baddbmm(rows, torch.bmm(rows, rows.mT), rows, beta=1.5, alpha=-0.5, out=block)


def inverse_lower(factor: Tensor) -> Tensor:
    """The inverse of lower triangular matrices (batch, n, n), by halves: [[A, 0], [B, C]] -> [[a, 0], [-c B a, c]]."""
    size = factor.shape[-1]
    if size <= DIRECT or size % 2:
        eye = torch.eye(size, dtype=factor.dtype, device=factor.device).expand_as(factor)
        inverse: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False)
        return inverse
    half = size // 2
    corners = torch.stack([factor[:, :half, :half], factor[:, half:, half:]], 1)  # (batch, 2, half, half)
    a, c = inverse_lower(corners.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
    result = torch.zeros_like(factor)
    result[:, :half, :half] = a
    result[:, half:, half:] = c
    result[:, half:, :half] = torch.bmm(c, torch.bmm(factor[:, half:, :half], a)).neg_()
    return result


def _defect(basis: Tensor) -> Tensor:
    """Distance of Q Q' from the identity, estimated with four fixed sign vectors: (rows,)."""
    size = basis.shape[-1]
    index = torch.arange(size, device=basis.device)
    # Quasi-random signs: the fractional parts of multiples of the golden ratio.
    turns = torch.outer(torch.arange(1, 5, device=basis.device), index) * 0.6180339887498949
    probe = torch.where(turns.frac() < 0.5, 1.0, -1.0).to(basis.dtype).mT.expand(len(basis), -1, -1)  # (rows, n, 4)
    with_vectors = torch.bmm(basis, torch.bmm(basis.mT, probe))
    lengths: Tensor = (with_vectors - probe).norm(dim=-2).amax(-1)
    return lengths / math.sqrt(size)


def _scale(statistics: Tensor) -> Tensor:
    """(rows,) power of two that scales the largest entry, which is on the diagonal, to at most 1."""
    largest = statistics.diagonal(dim1=-2, dim2=-1).amax(-1)
    return torch.where(largest > 0, torch.exp2(-largest.log2().ceil().clamp_min(-99)), 1.0)
