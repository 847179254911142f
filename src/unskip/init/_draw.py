"""Random matrices in float64 on the CPU, whatever the model's device and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from unskip.errors import BadInput


class Draw:
    """Draws from a generator, or from torch's default one."""

    def __init__(self, generator: torch.Generator | None) -> None:
        if not isinstance(generator, torch.Generator | None):
            raise BadInput(f"generator is {generator!r}; write torch.Generator().manual_seed({generator!r})")
        self.generator = generator

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        device = "cpu" if self.generator is None else self.generator.device
        return torch.randn(shape, generator=self.generator, device=device, dtype=dtype).cpu()

    def orthonormal(self, rows: int, columns: int) -> Tensor:
        """Orthonormal rows or columns, whichever are fewer, with the signs that QR returns."""
        q = self._qr(rows, columns)[0]
        return q.T if rows < columns else q

    def orthogonal(self, rows: int, columns: int) -> Tensor:
        """Uniform among the matrices with orthonormal rows or columns, whichever are fewer."""
        q, r = self._qr(rows, columns)
        q = q * r.diagonal().sign()  # else the distribution would not be uniform
        return q.T if rows < columns else q

    def _qr(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        q, r = torch.linalg.qr(self.normal(max(rows, columns), min(rows, columns)))
        return q, r
