"""The leading eigenvector of a batch of symmetric matrices, for a device that would rather multiply than wait.

    P <- P P / |P P|_F,    P_0 = B with eigenvalues 1 >= b_1 > b_2 >= ... >= 0

After k squarings the eigenvalues of P are as (b_i / b_1)^(2^k): P tends to v v^T, and a gap of 1e-4 takes eighteen
products. Rounding adds about eps at each, to a matrix whose gap has doubled since the last: eps / gap in all, no more
than one eigendecomposition does. The second eigenvalue comes for nothing, from how fast the others vanish: with
t_k = sum_{i>1} (b_i / b_1)^(2^k), read off trace and norm, b_2 / b_1 = (t_k / t_{k-1})^(1 / 2^(k-1)).
"""

from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 18  # squarings before those that have come to their end are left out
_MOST = 30
_GONE = 1e-13  # of the other eigenvalues, summed: nothing of them is left
_READ = 1e-11  # and the least that can still be read off


def leading(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Of (batch, n, n), float64, no eigenvalue below zero: unit vectors (batch, n), and b_2 / b_1 (batch,)."""
    ratio = matrices.new_ones(len(matrices))
    before = matrices.new_full((len(matrices),), torch.nan)
    vectors = torch.empty_like(matrices[:, 0])
    rest = torch.arange(len(matrices), device=matrices.device)
    power = matrices / _norm(matrices)
    for count in range(1, _MOST + 1):
        power = torch.bmm(power, power)
        power = power / _norm(power)
        others = _others(power)
        # The last time that all is readable counts; earlier ones are less sharp.
        readable = (others > _READ) & (before < 0.5)
        ratio[rest] = torch.where(readable, (others / before).clamp(max=1) ** (0.5 ** (count - 1)), ratio[rest])
        before = others
        if count < _AT_ONCE:
            continue
        going = others > _GONE
        vectors[rest] = _column(power)
        if count == _MOST or not bool(going.any()):
            break
        rest, power, before = rest[going], power[going], before[going]
    return vectors, ratio


def _norm(matrices: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    return norm.clamp_min(torch.finfo(matrices.dtype).tiny)


def _others(power: Tensor) -> Tensor:
    """t of each, from (1 + t)^2 / (1 + s) with s the sum of squares, which is far below t; the norm is one."""
    trace = power.diagonal(dim1=1, dim2=2).sum(1)
    return (trace**2 - 1).clamp_min(0) / 2


def _column(power: Tensor) -> Tensor:
    """The direction of v v^T: its column with the largest entry on the diagonal."""
    place = power.diagonal(dim1=1, dim2=2).argmax(1)
    column = power.gather(2, place[:, None, None].expand(-1, power.shape[1], 1))[:, :, 0]
    return torch.nn.functional.normalize(column, dim=1)
