"""Matrices with known singular values, and functions with these Jacobians."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from unskip.measures.spectrum import Spectrum, jacobian_spectrum

DOUBLE = torch.float64
SHARES = (0.1, 0.5, 0.9)


def gauss(rows: int, columns: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=g, dtype=DOUBLE) / math.sqrt(rows)


def with_values(sigma: Tensor, seed: int = 0) -> Tensor:
    n = len(sigma)
    return torch.linalg.qr(gauss(n, n, seed)).Q @ torch.diag(sigma) @ torch.linalg.qr(gauss(n, n, seed + 1)).Q


def linear(a: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    return (lambda x: nn.functional.linear(x, a)), torch.zeros(1, a.shape[1], dtype=a.dtype)


def free(a: Tensor, **kwargs: object) -> Spectrum:
    return jacobian_spectrum(*linear(a), exact=False, **kwargs)  # type: ignore[arg-type]


def block(dim: int = 12, heads: int = 3) -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            return x + self.mlp(x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    return Block().double()
