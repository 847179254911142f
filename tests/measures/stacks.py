"""Stacks of linear branches, whose measurements have closed forms."""

import json
from typing import Any

from torch import Tensor, nn

from unskip.measures._measurement import Measurement


class Linear(nn.Module):
    """x + W x."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.f = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def stack(depth: int = 3, dim: int = 6) -> nn.Sequential:
    return nn.Sequential(*(Linear(dim) for _ in range(depth))).double()


def matrices(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters() if p.ndim == 2]


def strict(result: Measurement) -> dict[str, Any]:
    """The result of a strict JSON reader."""
    return json.loads(json.dumps(result.to_dict(), allow_nan=False))  # type: ignore[no-any-return]
