"""Hyper-Connections as a block: n streams that are mixed, and one MLP that reads and writes them.

    X  <-  (H (x) I_d) X  +  w (x) MLP(r . X),        X = (x_1, ..., x_n) stacked

H is (n, n); r and w are the n weights of reading and writing. With H doubly stochastic it is the manifold-constrained
form. H invertible needs 2 (n - 1) d spare units at least, whatever the weights: the MLP sees d directions of n d.
"Hyper-Connections" (arXiv 2409.19606), "mHC: Manifold-Constrained Hyper-Connections" (arXiv 2512.24880). Mixing that
depends on the input is no linear map, and nothing is said about it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.errors import BadInput


def hyper_connection(
    up: Tensor,
    down: Tensor,
    mix: Tensor,
    read: Tensor,
    write: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "gelu",
) -> Block:
    """The block of n streams of width d, on inputs (n d,). Its weights are float64, so that products stay exact."""
    n = len(mix)
    if mix.ndim != 2 or mix.shape != (n, n) or read.shape != (n,) or write.shape != (n,):
        raise BadInput(
            f"hyper_connection: mix must be (n, n), read and write (n,), got {tuple(mix.shape)}, {tuple(read.shape)}, "
            f"{tuple(write.shape)}"
        )
    up, down, mix, read, write = (value.detach().double() for value in (up, down, mix, read, write))
    if up.shape[1] != len(down):
        raise BadInput(f"hyper_connection: the MLP must keep its width, got {up.shape[1]} in and {len(down)} out")
    eye = torch.eye(len(down), dtype=torch.float64, device=up.device)
    return Block(
        torch.kron(read[None], up),
        torch.kron(write[:, None], down),
        up_bias=None if up_bias is None else up_bias.detach().double(),
        down_bias=None if down_bias is None else torch.kron(write, down_bias.detach().double()),
        activation=activation,
        skip=torch.kron(mix, eye),
    )
