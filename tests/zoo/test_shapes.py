"""Unusual residual structures from published models: the audit, and the outputs of rewired models.

The models and the expected outputs are handwritten, without unskip.
"""

from __future__ import annotations

import pytest
import torch
from tests.zoo.handmade import Attention, mlp
from torch import Tensor, nn

import unskip
from unskip import Scale
from unskip.errors import BadInput, NoResidualError

WIDTH = 8
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


# --- Several streams --------------------------------------------------------------------------------------------------


class HyperConnection(nn.Module):
    """Four streams with input-dependent mixing; the branch reads a mixture and is added to all streams."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.f = nn.Linear(WIDTH, 5), mlp(0.0)

    def forward(self, x: Tensor) -> Tensor:
        streams = x[:, :, None].expand(-1, -1, 4, -1)
        mixed = self.mix(streams).transpose(-1, -2) @ streams  # (batch, tokens, 5, dim)
        read, rest = mixed[:, :, 0], mixed[:, :, 1:]
        return (self.f(read)[:, :, None].expand_as(rest) + rest).sum(2)


class InputDependentMixing(nn.Module):
    """Two streams: a branch reads their sum, and a matrix computed from the streams mixes them (mHC)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.f = nn.Linear(2 * WIDTH, 4), mlp(0.0)

    def forward(self, x: Tensor) -> Tensor:
        streams = torch.stack([x, x.flip(-1)], 2)
        weights = self.mix(streams.flatten(2)).unflatten(-1, (2, 2)).softmax(-1)
        branch = self.f(streams.sum(2))[:, :, None].expand_as(streams)
        return (branch + weights @ streams).sum(2)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.f = linear(), mlp(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * x + self.f(x)


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


class WeightedStack(Stacked):
    """The sum is computed by a product with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("n,nbtd->btd", self.weights, torch.stack([x, self.f(x)]))


class Concatenated(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[None], self.f(x)[None]]).sum(0)


class AttentionOverDepth(Stacked):
    """Attention over depth: a softmax over the outputs of all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        history = torch.stack([x, self.f(x)], 2)  # (batch, tokens, layers, dim)
        return (self.weights(x).softmax(-1)[:, :, None] @ history)[:, :, 0]


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (HyperConnection, "several streams"),
        (InputDependentMixing, "depends on the input"),
        (Gated, "depends on the input"),
        (Reversible, "several streams"),
        (Stacked, "stack"),
        (WeightedStack, "stack"),
        (Concatenated, "stack"),
        (AttentionOverDepth, "stack"),
    ],
)
def test_several_streams_are_reported(cls: type[nn.Module], reason: str) -> None:
    model = cls()
    audit = unskip.audit(model, X)
    assert [reason in unknown.reason for unknown in audit.unknown] == [True]
    with pytest.raises(NoResidualError, match=reason):
        unskip.rewire(model, "cut", X)


def test_a_model_without_any_sum_is_reported() -> None:
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


class LearnedMemory(nn.Module):
    """Cross-attention to keys and values that are weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.memory = nn.Parameter(torch.randn(1, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory.expand(len(x), -1, -1)
        return x + self.attention(x, memory, memory)[0]


def test_attention_to_a_learned_memory_is_cross_attention() -> None:
    assert [(site.kind, site.cross) for site in unskip.audit(LearnedMemory(), X)] == [("attention", True)]


class StateSpace(nn.Module):
    """A selective scan: h <- exp(dt A) h + dt B x with A = -exp(a weight); the output is C h."""

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


def test_the_kind_of_a_state_space_model() -> None:
    torch.manual_seed(0)
    model = StateSpace()
    (site,) = [site for site in unskip.audit(model, X) if site.path == ""]
    assert (site.kind, site.norm) == ("ssm", "pre")
    plain = model(X) - X
    with unskip.rewired(model, Scale(0.5, 0.7), X, where="ssm"):
        torch.testing.assert_close(model(X), 0.5 * X + 0.7 * plain)


class FixedDecay(nn.Module):
    """A linear recurrence whose decay exp(-exp(a weight)) does not depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out, self.log = linear(), linear(), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        state, read = torch.zeros_like(x[:, 0]), []
        for step in self.up(x).unbind(1):
            state = torch.exp(-torch.exp(self.log)) * state + step
            read.append(state)
        return x + self.out(torch.stack(read, 1))


class GatedDecay(FixedDecay):
    """The decay is an input-dependent gate times softplus(a weight), after a convolution, as in Griffin's RG-LRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.conv = linear(), nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        u = self.conv(self.up(x).transpose(1, 2)).transpose(1, 2)
        decay = torch.exp(-8 * torch.sigmoid(self.gate(u)) * nn.functional.softplus(self.log))
        state, read = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + (1 - decay[:, t] ** 2).sqrt() * u[:, t]
            read.append(state)
        return x + self.out(torch.stack(read, 1))


class TimeMixing(nn.Module):
    """RWKV's linear attention: numerator and denominator decay by exp(-exp(a weight)), scaled by a running maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = LinearAttention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.out, self.log = linear(), linear(), linear(), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        key, value, decay = self.key(x), self.value(x), -torch.exp(self.log)
        over = under = torch.zeros_like(x[:, 0])
        largest, read = torch.full_like(over, -1e38), []
        for k, v in zip(key.unbind(1), value.unbind(1), strict=True):
            new = torch.maximum(largest + decay, k)
            old, add, largest = torch.exp(largest + decay - new), torch.exp(k - new), new
            over, under = old * over + add * v, old * under + add
            read.append(over / under)
        return self.out(torch.stack(read, 1))


class DeltaRule(nn.Module):
    """The delta rule, with a matrix as the state: S <- S + k (v - k S)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = linear(), linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), nn.functional.normalize(self.k(x), dim=-1), self.v(x)
        state, read = x.new_zeros(len(x), WIDTH, WIDTH), []
        for t in range(x.shape[1]):
            state = state + k[:, t, :, None] * (v[:, t, None] - k[:, t, None] @ state)
            read.append((q[:, t, None] @ state)[:, 0])
        return x + self.out(torch.stack(read, 1))


class Modulation(nn.Module):
    """A gated sum of contexts with growing receptive fields, inside one branch, as in FocalNet."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gates, self.out = linear(), nn.Linear(WIDTH, 2), linear()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        context, (first, second) = self.up(x), self.gates(x).split(1, -1)
        wider = nn.functional.gelu(self.conv(context.transpose(1, 2)).transpose(1, 2))
        return x + self.out(first * context + second * wider)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lstm = nn.LayerNorm(WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(self.norm(x))[0]


class Spectrum(nn.Module):
    """A global filter over tokens, as a product of Fourier spectra."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.out = nn.Parameter(torch.randn(5, WIDTH)), linear()

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, n=10, dim=1) * torch.fft.rfft(self.filter, n=10, dim=0)
        return x + self.out(torch.fft.irfft(spectrum, n=10, dim=1)[:, :5])


class Routed(nn.Module):
    """An einsum of the two largest router weights with the outputs of all experts; no name contains "expert"."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.each = nn.Linear(WIDTH, 4), nn.ModuleList(mlp(0.0) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.choose(x).softmax(-1).topk(2, -1)
        made = torch.stack([f(x) for f in self.each], 2)  # (batch, tokens, experts, dim)
        made = made.gather(2, chosen[..., None].expand(-1, -1, -1, WIDTH))
        return x + torch.einsum("bte,bted->btd", weights / weights.sum(-1, keepdim=True), made)


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (FixedDecay, "ssm"),
        (GatedDecay, "ssm"),
        (TimeMixing, "attention"),
        (DeltaRule, "attention"),
        (Modulation, "conv"),
        (Recurrent, "other"),
        (Spectrum, "conv"),
        (Routed, "mlp"),
    ],
)
def test_the_kind_of_token_mixers_and_mixtures_of_experts(cls: type[nn.Module], kind: str) -> None:
    torch.manual_seed(0)
    model = cls()
    audit = unskip.audit(model, X)
    assert [(site.kind, site.long) for site in audit if site.path == ""] == [(kind, False)]
    assert not audit.unknown
    branch = model(X) - X
    with unskip.rewired(model, Scale(0.5, 0.7), X, where=kind):
        torch.testing.assert_close(model(X), 0.5 * X + 0.7 * branch)


class Adds(nn.Module):
    def forward(self, branch: Tensor, stream: Tensor) -> Tensor:
        return branch + stream


class PostNormAround(nn.Module):
    """The addition is in a separate module, and the norm in its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([f(), Adds(), nn.LayerNorm(WIDTH)]) for f in (Attention, mlp) * 2)

    def forward(self, x: Tensor) -> Tensor:
        for branch, add, norm in self.layers:
            x = norm(add(branch(x), x))
        return x


class FinalNorm(PostNormAround):
    """Like PostNormAround, but with a single final norm, which does not belong to a block."""

    def forward(self, x: Tensor) -> Tensor:
        for branch, add, _ in self.layers:
            x = add(branch(x), x)
        return self.layers[0][2](x)


@pytest.mark.parametrize(("cls", "norm"), [(PostNormAround, "post"), (FinalNorm, "none")])
def test_post_norm_across_submodules(cls: type[nn.Module], norm: str) -> None:
    sites = unskip.audit(cls().eval(), X)
    assert [(site.kind, site.norm) for site in sites] == [("attention", norm), ("mlp", norm)] * 2


def test_a_rule_that_selects_only_projected_shortcuts_names_the_predicate() -> None:
    class Streams(nn.Module):
        """Two streams, mixed by a matrix of weights."""

        def __init__(self) -> None:
            super().__init__()
            self.f, self.mix = mlp(0.0), nn.Parameter(torch.rand(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            streams = torch.stack([x, x])
            branch = self.f(streams.mean(0))
            return (torch.einsum("ij,jbtd->ibtd", self.mix, streams) + torch.stack([branch, branch])).sum(0)

    with pytest.raises(BadInput, match="which only a function picks"):
        unskip.rewire(Streams(), "cut", X)
