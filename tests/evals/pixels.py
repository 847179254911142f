"""Small images, and extractors with a few features."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Pixels(nn.Module):
    """An extractor that torchmetrics can use too."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 3 * size * size, generator=draw) / 10)
        self.num_features = 6

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh(images.float().flatten(1) / 64 @ self.weight.T)


class Doubled(Pixels):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(2 * self.weight.detach())


def pictures(count: int, seed: int, low: int = 0, size: int = 4) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(low, 256, (count, 3, size, size), generator=draw, dtype=torch.uint8)
