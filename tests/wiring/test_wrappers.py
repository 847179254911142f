"""An addition in a function whose decorator drops unknown keyword arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

import unskip
from unskip import Scale


def drop_unknown_kwargs(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapper(*args: Tensor, **kwargs: Tensor) -> Tensor:
        return function(*args, **{name: value for name, value in kwargs.items() if name in known})

    return wrapper


@drop_unknown_kwargs
def scan(x: Tensor, weight: Tensor) -> Tensor:
    return x + x @ weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return scan(x, weight=self.weight, unused=x)


def test_weights_pass_through_a_filtering_decorator() -> None:
    block, x = Block(), torch.randn(2, 3, 4)
    plain = block(x)
    wiring = unskip.rewire(block, Scale(0.5, 0.7), x)
    assert torch.allclose(block(x), 0.5 * x + 0.7 * x @ block.weight)
    wiring.undo()
    assert torch.equal(block(x), plain)
    assert torch.equal(scan(x, weight=block.weight, unused=x), plain)  # the function itself is unchanged
