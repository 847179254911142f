"""The leading eigenvector of a batch of symmetric matrices, by repeated squaring, which is fast on a GPU.

    P <- P P / |P P|_F,    P_0 = B with eigenvalues 1 >= b_1 > b_2 >= ... >= 0

After k squarings the eigenvalues of P are proportional to (b_i / b_1)^(2^k), so P converges to v v^T; a gap of 1e-4
takes 18 products. Each adds a rounding error of about eps while the gap doubles, so the total error is eps / gap, as
for an eigendecomposition. The second eigenvalue follows from the decay of the others: with t_k = sum_{i>1}
(b_i / b_1)^(2^k), computed from trace and norm, b_2 / b_1 = (t_k / t_{k-1})^(1 / 2^(k-1)).
"""

from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 18  # squarings before converged matrices are left out
_MOST = 30
_GONE = 1e-13  # t_k of a converged matrix
_READABLE = 1e-11  # t_k below this is mostly rounding


def leading(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors (batch, n) and b_2 / b_1 (batch,) for (batch, n, n), float64, without negative eigenvalues."""
    ratio = matrices.new_ones(len(matrices))
    before = matrices.new_full((len(matrices),), torch.nan)
    vectors = torch.empty_like(matrices[:, 0])
    rest = torch.arange(len(matrices), device=matrices.device)
    power = matrices / _norm(matrices)
    for count in range(1, _MOST + 1):
        power = torch.bmm(power, power)
        power = power / _norm(power)
        others = _others(power)
        # The last readable ratio is the most accurate.
        readable = (others > _READABLE) & (before < 0.5)
        ratio[rest] = torch.where(readable, (others / before).clamp(max=1) ** (0.5 ** (count - 1)), ratio[rest])
        before = others
        if count < _AT_ONCE:
            continue
        active = others > _GONE
        vectors[rest] = _column(power)
        if count == _MOST or not bool(active.any()):
            break
        rest, power, before = rest[active], power[active], before[active]
    return vectors, ratio


def _norm(matrices: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    return norm.clamp_min(torch.finfo(matrices.dtype).tiny)


def _others(power: Tensor) -> Tensor:
    """t_k of each matrix, from trace^2 = (1 + t)^2 / (1 + s) at norm 1, with the sum of squares s far below t."""
    trace = power.diagonal(dim1=1, dim2=2).sum(1)
    return (trace**2 - 1).clamp_min(0) / 2


def _column(power: Tensor) -> Tensor:
    """v from v v^T: its column with the largest diagonal entry, normalised."""
    index = power.diagonal(dim1=1, dim2=2).argmax(1)
    column = power.gather(2, index[:, None, None].expand(-1, power.shape[1], 1))[:, :, 0]
    return torch.nn.functional.normalize(column, dim=1)
