"""Runs an optimizer with given gradients and returns its trajectory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

STEPS = 50


def gradients(shape: tuple[int, ...], steps: int = STEPS, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Noise with a decaying spectrum on both sides, plus a constant part: (steps, *shape)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, *shape, generator=generator, dtype=torch.float64)
    for axis, size in enumerate(shape):
        scale = torch.logspace(0, -1.5, size, dtype=torch.float64)[torch.randperm(size, generator=generator)]
        noise = noise * scale.view([-1 if i == axis else 1 for i in range(len(shape))])
    return (noise + 0.3 * noise[:1]).to(dtype)


def start(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 1) -> nn.Parameter:
    return nn.Parameter(
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    )


def run(optimizer: torch.optim.Optimizer, pairs: list[tuple[nn.Parameter, Tensor]], steps: range) -> list[list[Tensor]]:
    """The parameters after every step."""
    history = []
    for step in steps:
        for param, grads in pairs:
            param.grad = grads[step].clone()
        optimizer.step()
        history.append([param.detach().clone() for param, _ in pairs])
    return history


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
