"""Copies of the stream that are no residual of a block, and factors that a model has on its own stream and branch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unskip
from unskip import Cut, Decay

DIM = 8
X = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def branch(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Smear(nn.Module):
    """Each token gets a gated share of the one before it, then blocks follow."""

    def __init__(self, learnt: bool) -> None:
        super().__init__()
        self.gate, self.blocks = nn.Linear(4, 1, bias=False), nn.ModuleList(Block() for _ in range(2))
        self.share = nn.Parameter(torch.tensor(0.5)) if learnt else None

    def smeared(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x[:, 1:, :4]))
        gate = gate if self.share is None else self.share * gate
        return torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.smeared(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("where", [None, "mlp"])
def test_token_smear_is_no_residual_of_a_block(learnt: bool, where: str | None) -> None:
    torch.manual_seed(0)
    model = Smear(learnt)
    sites = unskip.audit(model, X)
    assert [(site.kind, site.copies) for site in sites] == [("other", True), ("mlp", False), ("mlp", False)]
    assert "copy of the stream" in str(sites)
    wiring = unskip.rewire(model, Decay(0.6), X, where=where)
    assert wiring.alphas == [1.0, 1.0, 0.6]  # the alphas of the blocks do not shift
    x = model.smeared(X)
    first, second = model.blocks
    x = x + first.branch(x)
    torch.testing.assert_close(model(X), 0.6 * x + second.branch(x))
    assert len(unskip.features(model, X)) == len(unskip.measure(model, X, jacobians="off").blocks) == 2


def test_a_predicate_may_still_cut_a_smear() -> None:
    model = Smear(False)
    unskip.rewire(model, Cut(), X, where=lambda site: site.copies)
    gate = torch.sigmoid(model.gate(X[:, 1:, :4]))
    x = torch.cat([X[:, :1], gate * X[:, :-1]], 1)
    for block in model.blocks:
        x = x + block.branch(x)
    torch.testing.assert_close(model(X), x)


class Scaled(nn.Module):
    """Factors on the stream and on the branch: a number, a quotient, a parameter, a buffer, one by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor([0.8, 0.25]))
        self.channels = nn.Parameter(torch.linspace(0.5, 1.5, DIM))
        self.register_buffer("fixed", torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        x = 0.5 * x + a(x)
        x = x / 4 + 2 * b(x)
        x = x * self.scale[0] + self.scale[1] * c(x)
        return x * self.channels + d(x) / self.fixed


def test_factors_of_the_model_are_shown_and_counted() -> None:
    model = Scaled()
    sites = unskip.audit(model, X)
    assert [site.stream_factor for site in sites] == pytest.approx([0.5, 0.25, 0.8, 1.0])
    assert [site.branch_factor for site in sites] == pytest.approx([1.0, 2.0, 0.25, 1 / 3])
    assert "factor on the stream: 0.5" in str(sites)
    plain = model(X)
    wiring = unskip.rewire(model, Decay(1.0), X, force=True)
    assert wiring.effective_decay == pytest.approx(0.5 * 0.25 * 0.8)
    torch.testing.assert_close(model(X), plain)
    wiring.set(Decay(0.6))
    alphas = torch.tensor(wiring.alphas)
    assert wiring.effective_decay == pytest.approx(float(alphas.prod()) * 0.1)


def test_a_plain_model_has_no_factors() -> None:
    sites = unskip.audit(nn.Sequential(Block(), Block()), X)
    assert {(site.stream_factor, site.branch_factor, site.copies) for site in sites} == {(1.0, 1.0, False)}
