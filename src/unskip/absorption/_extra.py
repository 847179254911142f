"""How many more units are enough for an exact replacement."""

from __future__ import annotations

import torch
from torch import Tensor

from unskip.absorption._block import Block
from unskip.absorption._problem import Biases, Problem

SMALL = 200_000  # weights whose rank is computed


def gate_bias(block: Block, biases: Biases) -> bool:
    """Whether the replacement may have a bias in its gate."""
    return biases == "allowed" or (biases == "as-is" and block.gate_bias is not None)


def extra_width(problem: Problem, biases: Biases) -> int | None:
    """Units more that are enough; None where none is known or none ever are.

    For large blocks the rows are taken to be in general position: their rank would cost more than the verdict.
    """
    block, phi = problem.block, problem.block.phi
    if {"pre", "out"} & block.norms.keys() or not phi.trusted:
        return None
    short = max(block.width - problem.width, 0)
    rank, n = skip_rank(block.matrix), problem.up.shape[1]
    if block.gated:  # a zero row of the gate that is open
        return rank + short if phi.at_zero or gate_bias(block, biases) else None
    if phi.family == "linear":
        whole = min(block.inputs, block.outputs, rank + block.width)
        return max(0, whole - problem.width)
    bent = block.up_bias is not None and bool(block.up_bias.any())
    if phi.family != "odd-linear" or (not problem.hidden_bias and (bent or not problem.output_bias)):
        return None
    rank = skip_rank(problem.skip)
    if problem.one_each:
        return rank + short
    if not problem.output_bias:  # fresh pairs make up the constant as well
        return 2 * min(rank + 1, block.outputs) + short
    small = problem.up.numel() <= SMALL
    rows = int(torch.linalg.matrix_rank(problem.up, rtol=1e-10)) if small else min(block.width, n)
    return min(2 * rank, 2 * n - rows) + short


def skip_rank(skip: Tensor) -> int:
    """The rank of a skip; a multiple of the identity needs no decomposition."""
    o, n = skip.shape
    if o == n and bool((skip == torch.diag(skip.diagonal())).all()):
        return int((skip.diagonal() != 0).sum())
    return int(torch.linalg.matrix_rank(skip))
