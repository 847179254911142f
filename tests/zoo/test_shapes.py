"""Shapes of residuals that models in the wild have: what the audit says, and what a rewired model computes.

The models are written here, and so are the expected outputs, with nothing of unskip.
"""

from __future__ import annotations

import pytest
import torch
from tests.zoo.handmade import Attention, mlp
from torch import Tensor, nn

import unskip
from unskip import Scale
from unskip.errors import NoResidualError

WIDTH = 8
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# --- Several streams --------------------------------------------------------------------------------------------------


class HyperConnection(nn.Module):
    """Four streams, mixed by weights that depend on them; the branch reads a mixture and is added to all."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.f = nn.Linear(WIDTH, 5), mlp(0.0)

    def forward(self, x: Tensor) -> Tensor:
        streams = x[:, :, None].expand(-1, -1, 4, -1)
        mixed = self.mix(streams).transpose(-1, -2) @ streams  # (batch, tokens, 5, dim)
        read, rest = mixed[:, :, 0], mixed[:, :, 1:]
        return (self.f(read)[:, :, None].expand_as(rest) + rest).sum(2)


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return torch.cat([one + self.f(two), two], -1)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = mlp(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x, self.f(x)]).sum(0)


class OverDepth(Stacked):
    """A softmax over the outputs of all layers, as attention over depth has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        history = torch.stack([x, self.f(x)], 2)  # (batch, tokens, layers, dim)
        return (self.weights(x).softmax(-1)[:, :, None] @ history)[:, :, 0]


@pytest.mark.parametrize(
    ("cls", "reason"),
    [(HyperConnection, "several streams"), (Reversible, "several streams"), (Stacked, "stack"), (OverDepth, "stack")],
)
def test_several_streams_are_reported(cls: type[nn.Module], reason: str) -> None:
    model = cls()
    audit = unskip.audit(model, X)
    assert [reason in unknown.reason for unknown in audit.unknown] == [True]
    with pytest.raises(NoResidualError, match=reason):
        unskip.rewire(model, "cut", X)


def test_a_model_without_any_sum_says_so() -> None:
    assert "no residual" in str(unskip.audit(nn.Sequential(linear(), nn.GELU(), linear()), X))


# --- Kinds and norms --------------------------------------------------------------------------------------------------


class EinsumAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = linear(), linear(), linear()

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (self.q(x), self.k(memory), self.v(memory)))
        scores = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        return x + torch.einsum("bhij,bhjd->bhid", scores, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("context", [False, True])
def test_attention_by_einsum_and_cross_attention(tokens: int, context: bool) -> None:
    x = X[:, :tokens]
    audit = unskip.audit(EinsumAttention(), (x, x.flip(0).clone()) if context else x)
    assert [(site.kind, site.cross) for site in audit] == [("attention", context)]
    assert ("cross-attention" in str(audit)) == context


class StateSpace(nn.Module):
    """A selective scan: a state that decays by exp(dt A), A = -exp(a weight), and takes dt B x in, read out by C."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), linear()
        self.log_a = nn.Parameter(torch.randn(WIDTH, 3))
        self.dt, self.b, self.c = linear(), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        u = self.norm(x)
        dt = nn.functional.softplus(self.dt(u))
        decay = torch.exp(dt[..., None] * -torch.exp(self.log_a))  # (batch, tokens, dim, state)
        fed = (dt * u)[..., None] * self.b(u)[:, :, None]
        state, read = torch.zeros_like(fed[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + fed[:, t]
            read.append((state @ self.c(u)[:, t, :, None])[..., 0])
        return x + self.out(torch.stack(read, 1))


def test_state_spaces_are_a_kind_of_their_own() -> None:
    torch.manual_seed(0)
    model = StateSpace()
    (site,) = [site for site in unskip.audit(model, X) if site.path == ""]
    assert (site.kind, site.norm) == ("ssm", "pre")
    plain = model(X) - X
    with unskip.rewired(model, Scale(0.5, 0.7), X, where="ssm"):
        torch.testing.assert_close(model(X), 0.5 * X + 0.7 * plain)


class Adds(nn.Module):
    def forward(self, branch: Tensor, stream: Tensor) -> Tensor:
        return branch + stream


class PostNormAround(nn.Module):
    """The addition is in a module of its own, the norm in its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([f(), Adds(), nn.LayerNorm(WIDTH)]) for f in (Attention, mlp) * 2)

    def forward(self, x: Tensor) -> Tensor:
        for branch, add, norm in self.layers:
            x = norm(add(branch(x), x))
        return x


class FinalNorm(PostNormAround):
    """The same without norms but for one at the end, which is none of a block."""

    def forward(self, x: Tensor) -> Tensor:
        for branch, add, _ in self.layers:
            x = add(branch(x), x)
        return self.layers[0][2](x)


@pytest.mark.parametrize(("cls", "norm"), [(PostNormAround, "post"), (FinalNorm, "none")])
def test_post_norm_across_submodules(cls: type[nn.Module], norm: str) -> None:
    sites = unskip.audit(cls().eval(), X)
    assert [(site.kind, site.norm) for site in sites] == [("attention", norm), ("mlp", norm)] * 2


# --- Factors ----------------------------------------------------------------------------------------------------------


class Factors(nn.Module):
    """Residual lambdas and the input again (nanochat), ReZero, LayerScale, KEEL, a learnt scale on the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.fs = nn.ModuleList(mlp(0.0) for _ in range(5))
        self.lambdas, self.rezero = nn.Parameter(torch.tensor([0.9, 0.2])), nn.Parameter(torch.tensor(0.3))
        self.layerscale, self.scale = nn.Parameter(torch.full((WIDTH,), 0.1)), nn.Parameter(torch.full((WIDTH,), 0.7))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
        a, b, c, d, e = self.fs
        start = x
        x = alpha * x + beta * (self.rezero * a(x))
        x = self.lambdas[0] * x + self.lambdas[1] * start
        x = alpha * x + beta * (self.layerscale * b(x))
        x = self.norms[0](alpha * (4 * x) + beta * c(x))
        x = self.norms[1](alpha * (4 * x) + beta * d(x))
        return alpha * (self.scale * x) + beta * e(x)


class Written(Factors):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        a, b, c, d, e = self.fs
        start = x
        x = x + self.rezero * a(x)
        x = self.lambdas[0] * x + self.lambdas[1] * start
        x = x + self.layerscale * b(x)
        x = self.norms[0](4 * x + c(x))
        x = self.norms[1](4 * x + d(x))
        return self.scale * x + e(x)


def test_factors_of_known_designs_are_seen_and_multiplied() -> None:
    torch.manual_seed(0)
    model = Written()
    sites = [site for site in unskip.audit(model, X) if site.regular]
    (again,) = [site for site in unskip.audit(model, X) if not site.regular]
    assert again.doubled
    assert [again.stream_factor, again.branch_factor] == pytest.approx([0.2, 0.9])
    assert [site.branch_factor for site in sites] == pytest.approx([0.3, 0.1, 1, 1, 1])
    assert [site.stream_factor for site in sites] == pytest.approx([1, 1, 4, 4, 0.7])
    wiring = unskip.rewire(model, Scale(0.5, 0.8), X)
    assert wiring.effective_decay == pytest.approx(0.5**5 * 16 * 0.7)
    torch.testing.assert_close(model(X), Factors.forward(model, X, 0.5, 0.8))
