"""The kind of a branch with misleading names or operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unskip

DIM = 8
X = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(1))


def linear() -> nn.Linear:
    return nn.Linear(DIM, DIM)


class TinyMoeAttention(nn.Module):
    """A model named after a mixture of experts, with ordinary attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1) @ self.v(x)


class TinyMoeSparseMLP(nn.Module):
    """Two experts; a product combines their outputs with the router's weights."""

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
    """Linear attention over chunks: the decayed output of the state plus that of the chunk. The state starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.decay = linear(), linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        state = x.new_zeros(len(x), DIM, DIM)
        f = (q * self.decay(x).exp()) @ state + (q @ k.transpose(1, 2)) @ v
        return x + f


class LearnedQueries(nn.Module):
    """A decoder whose queries are weights, so the inputs of its first attention are constants."""

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


class Deformable(nn.Module):
    """Values sampled at computed positions and weighted by a softmax: attention without a product of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.weights, self.values = nn.Linear(DIM, 4), nn.Linear(DIM, 2), linear()

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        values = self.values(x).transpose(1, 2).unsqueeze(2)  # (batch, dim, 1, tokens)
        places = self.places(x).view(batch, tokens, 2, 2).tanh()
        sampled = functional.grid_sample(values, places, align_corners=False)  # (batch, dim, tokens, points)
        f = (sampled * self.weights(x).softmax(-1).unsqueeze(1)).sum(-1)
        return x + f.transpose(1, 2)


class Queries(nn.Module):
    """A detection decoder: the queries and the positions added to them are selected from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU(), linear())
        self.q, self.k, self.v = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        position = self.position(x)[:, :3]
        h = x[:, :3]
        y = h + position
        return h + (self.q(y) @ self.k(y).transpose(1, 2)).softmax(-1) @ self.v(h)


CASES = [
    (TinyMoeLayer, ["attention", "mlp"]),
    (Recurrence, ["attention"]),
    (LearnedQueries, ["attention", "attention"]),
    (Deformable, ["attention"]),
    (Queries, ["attention"]),
]


@pytest.mark.parametrize(("build", "kinds"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_operators_determine_the_kind(build: type[nn.Module], kinds: list[str]) -> None:
    audit = unskip.audit(build(), X)
    assert [site.kind for site in audit] == kinds
    assert not audit.unknown
    assert not any(site.projected for site in audit)
