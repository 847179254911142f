"""The kind of a branch where the names or the values around it mislead."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import unskip

DIM = 8
X = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(1))


def linear() -> nn.Linear:
    return nn.Linear(DIM, DIM)


class TinyMoeAttention(nn.Module):
    """The model is called a mixture of experts; its attention is none."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1) @ self.v(x)


class TinyMoeSparseMLP(nn.Module):
    """Two experts; a product gathers what the router weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 2), nn.ModuleList(linear() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        each = torch.stack([expert(x).relu() for expert in self.experts], dim=-2)  # (batch, tokens, experts, dim)
        return (self.router(x).softmax(-1).unsqueeze(-2) @ each).squeeze(-2)


class TinyMoeLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = TinyMoeAttention(), TinyMoeSparseMLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Recurrence(nn.Module):
    """Linear attention over chunks: what the state says, decayed, plus what the chunk says. The state starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.decay = linear(), linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        state = x.new_zeros(len(x), DIM, DIM)
        f = (q * self.decay(x).exp()) @ state + (q @ k.transpose(1, 2)) @ v
        return x + f


class LearntQueries(nn.Module):
    """A decoder whose queries are weights: its first attention is among constants."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.attention, self.cross, self.memory = (
            nn.Parameter(torch.randn(3, DIM)),
            linear(),
            linear(),
            linear(),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.queries.expand(len(x), -1, -1)
        y = self.attention(h)
        h = h + (y @ y.transpose(1, 2)).softmax(-1) @ y
        m = self.memory(x)
        return h + (self.cross(h) @ m.transpose(1, 2)).softmax(-1) @ m


CASES = [
    (TinyMoeLayer, ["attention", "mlp"]),
    (Recurrence, ["attention"]),
    (LearntQueries, ["attention", "attention"]),
]


@pytest.mark.parametrize(("build", "kinds"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_operators_say_the_kind(build: type[nn.Module], kinds: list[str]) -> None:
    assert [site.kind for site in unskip.audit(build(), X)] == kinds
