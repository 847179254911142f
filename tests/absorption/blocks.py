"""Blocks that many tests use."""

from __future__ import annotations

import torch
from torch import Tensor

from unskip.absorption import Block, Norm
from unskip.absorption._activations import BUILT_IN, resolve

CLASS_O = [name for name, each in BUILT_IN.items() if each.family == "odd-linear"]


def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def eye(d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64)


def generic(
    d: int = 8, h: int = 32, word: str = "gelu", seed: int = 0, dtype: torch.dtype = torch.float64, **more: object
) -> Block:
    """A block of random weights with both biases."""
    g = numbers(seed)
    up, down = normal(g, h, d) / d**0.5, normal(g, d, h) / h**0.5
    bias, const = normal(g, h), normal(g, d)
    parts = {"up": up, "down": down, "up_bias": bias, "down_bias": const}
    return Block(**{name: value.to(dtype) for name, value in parts.items()}, activation=word, **more)  # type: ignore[arg-type]


def planted(
    d: int = 8,
    h: int = 32,
    word: str = "gelu",
    skip: Tensor | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    biases: bool = True,
    norm: Norm | None = None,
) -> tuple[Block, Tensor]:
    """A block that can absorb its skip by flipping the units S, W_down[:, S] W_up[S] = -A / c, and that S."""
    g = numbers(seed)
    skip = torch.eye(d, dtype=torch.float64) if skip is None else skip
    o, d = skip.shape
    odd = resolve(word)[0].odd
    assert odd is not None
    up, down = normal(g, h, d) / d**0.5, normal(g, o, h) / h**0.5
    chosen = torch.randperm(h, generator=g)[: h // 2].sort().values
    inverse = torch.linalg.pinv(up[chosen])
    free = torch.eye(len(chosen), dtype=torch.float64) - up[chosen] @ inverse
    down[:, chosen] = -(skip / float(odd)) @ inverse + down[:, chosen] @ free
    bias, const = (normal(g, h).to(dtype), normal(g, o).to(dtype)) if biases else (None, None)
    block = Block(up.to(dtype), down.to(dtype), up_bias=bias, down_bias=const, activation=word, skip=skip, norm=norm)
    return block, chosen


def close(block: Block, other: Block, inputs: Tensor | None = None, seed: int = 5) -> float:
    """The largest difference of the outputs of two blocks in float64, relative to the first."""
    x = normal(numbers(seed), 200, block.inputs) * 3 if inputs is None else inputs
    truth = block.double()(x)
    return float((other.double()(x) - truth).abs().max() / truth.abs().max())


def errors(block: Block, other: Block, x: Tensor) -> tuple[float, float] | None:
    """The error of a stored replacement and the loss of the block, or None if the block overflows."""
    low = x.to(block.dtype)
    wide, exact = block.double(), low.double()
    truth, here = wide(exact), block(low).double()
    if not bool(torch.isfinite(here).all()):
        return None
    squares = wide.hidden(exact).square() @ wide.down.square().sum(0) + exact.square() @ block.matrix.square().sum(0)
    total = float(squares.sum()) + (0.0 if wide.down_bias is None else len(x) * float(wide.down_bias.square().sum()))
    once = block.roundoff * ((total + float(truth.square().sum())) / 3) ** 0.5
    return float((other(low).double() - truth).norm()), max(float((here - truth).norm()), once)
