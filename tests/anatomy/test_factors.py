"""Copies of the stream that are not residuals of a block, and a model's own factors on stream and branch."""

import pytest
import torch
import torch.nn.functional as F
from tests.zoo.handmade import mlp
from torch import Tensor, nn

import unskip
from unskip import Cut, Decay, Scale

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
    """Adds to each token a gated copy of the previous one (token smearing); blocks follow."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.gate, self.blocks = nn.Linear(4, 1, bias=False), nn.ModuleList(Block() for _ in range(2))
        self.share = nn.Parameter(torch.tensor(0.5)) if learned else None

    def smeared(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x[:, 1:, :4]))
        gate = gate if self.share is None else self.share * gate
        return torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.smeared(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("where", [None, "mlp"])
def test_token_smearing_is_not_a_residual_of_a_block(learned: bool, where: str | None) -> None:
    torch.manual_seed(0)
    model = Smear(learned)
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


def test_a_predicate_can_cut_token_smearing() -> None:
    model = Smear(False)
    unskip.rewire(model, Cut(), X, where=lambda site: site.copies)
    gate = torch.sigmoid(model.gate(X[:, 1:, :4]))
    x = torch.cat([X[:, :1], gate * X[:, :-1]], 1)
    for block in model.blocks:
        x = x + block.branch(x)
    torch.testing.assert_close(model(X), x)


class TokenShift(nn.Module):
    """Inside a branch, each token is interpolated with the previous one by an input-dependent factor (RWKV-6)."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.padded, self.norm, self.share = padded, nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.f = nn.Sequential(nn.Linear(DIM, 16), nn.GELU(), nn.Linear(16, DIM))

    def branch(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        before = F.pad(y, (0, 0, 1, -1)) if self.padded else torch.zeros_like(y)
        if not self.padded:
            before[:, 1:] = y[:, :-1]
        return self.f(y + (before - y) * torch.tanh(self.share(y)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


@pytest.mark.parametrize("padded", [True, False])
def test_a_token_shift_inside_a_branch_is_not_a_residual(padded: bool) -> None:
    torch.manual_seed(0)
    model = TokenShift(padded)
    assert [(site.kind, site.copies, site.long) for site in unskip.audit(model, X)] == [
        ("other", True, False),
        ("mlp", False, False),
    ]
    branch = model.branch(X)
    unskip.rewire(model, Scale(0.5, 0.8), X)
    torch.testing.assert_close(model(X), 0.5 * X + 0.8 * branch)


class Scaled(nn.Module):
    """Factors on the stream and on the branch: a number, a quotient, a parameter, a buffer, a vector per channel."""

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


def test_own_factors_are_shown_and_enter_the_effective_decay() -> None:
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


# --- Known designs ---------------------------------------------------------------------------------------------------


class Factors(nn.Module):
    """Residual lambdas and the re-added input (nanochat), ReZero, LayerScale, KEEL, a learned scale on the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.fs = nn.ModuleList(mlp(0.0) for _ in range(5))
        self.lambdas, self.rezero = nn.Parameter(torch.tensor([0.9, 0.2])), nn.Parameter(torch.tensor(0.3))
        self.layerscale, self.scale = nn.Parameter(torch.full((DIM,), 0.1)), nn.Parameter(torch.full((DIM,), 0.7))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))

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


def test_factors_of_known_designs_are_found_and_multiplied() -> None:
    torch.manual_seed(0)
    model = Written()
    sites = [site for site in unskip.audit(model, X) if site.regular]
    (again,) = [site for site in unskip.audit(model, X) if not site.regular]
    assert again.doubled
    assert [again.stream_factor, again.branch_factor] == pytest.approx([0.2, 0.9])
    assert [site.branch_factor for site in sites] == pytest.approx([0.3, 0.1, 1, 1, 1])
    assert [site.stream_factor for site in sites] == pytest.approx([1, 1, 4, 4, 0.7])
    wiring = unskip.rewire(model, Scale(0.5, 0.8), X)
    assert wiring.effective_decay == pytest.approx(0.5**5 * 16 * 0.7 * 0.9)
    torch.testing.assert_close(model(X), Factors.forward(model, X, 0.5, 0.8))


class Nanochat(nn.Module):
    """Token smearing of normalised embeddings; residual lambdas and the re-added input before every block; a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.blocks = nn.Linear(4, 1), nn.ModuleList(mlp(0.0) for _ in range(3))
        self.stream, self.again = (nn.Parameter(torch.tensor(v)) for v in ([0.9, 0.8, 0.7], [0.1, 0.2, 0.3]))

    def forward(self, x: Tensor, alphas: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Tensor:
        x = F.rms_norm(x, (DIM,))
        gate = torch.sigmoid(self.gate(x[:, 1:, :4]))
        x = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], 1)
        first = middle = x
        for index, block in enumerate(self.blocks):
            x = self.stream[index] * x + self.again[index] * first
            x = alphas[index] * x + block(F.rms_norm(x, (DIM,)))
            middle = x if index == 1 else middle
        return x - 0.5 * middle


class NanochatWritten(Nanochat):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = F.rms_norm(x, (DIM,))
        gate = torch.sigmoid(self.gate(x[:, 1:, :4]))
        x = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], 1)
        first = middle = x
        for index, block in enumerate(self.blocks):
            x = self.stream[index] * x + self.again[index] * first
            x = x + block(F.rms_norm(x, (DIM,)))
            middle = x if index == 1 else middle
        return x - 0.5 * middle


def test_token_smearing_and_the_input_re_added_before_every_block() -> None:
    torch.manual_seed(0)
    model = NanochatWritten()
    audit = unskip.audit(model, X)
    assert next((site.kind, site.regular) for site in audit) == ("other", False)
    assert [site.copies for site in audit] == [True, *[False] * 5]
    assert [site.index for site in audit if site.doubled] == [2, 4]  # the first adds the input to itself
    assert ["minus sign" in unknown.reason for unknown in audit.unknown] == [True]
    with pytest.warns(UserWarning, match="minus sign"):
        wiring = unskip.rewire(model, "decay:0.5", X)
    assert wiring.alphas == [1, 1, 1, 0.75, 1, 0.5]
    assert wiring.effective_decay == pytest.approx(0.75 * 0.5 * 0.8 * 0.7)
    torch.testing.assert_close(model(X), Nanochat.forward(model, X, (1.0, 0.75, 0.5)))


class ScaledSum(nn.Module):
    """A factor on the sum, so on the stream and the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.fs = nn.ModuleList(mlp(0.0) for _ in range(2))
        self.register_buffer("scale", torch.tensor(0.8))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.fs
        x = (x + first(x)) * 0.5
        return self.scale * (2 * x + 3 * second(x))


def test_a_factor_on_the_sum_is_a_factor_on_stream_and_branch() -> None:
    sites = unskip.audit(model := ScaledSum(), X)
    assert [site.stream_factor for site in sites] == pytest.approx([0.5, 1.6])
    assert [site.branch_factor for site in sites] == pytest.approx([0.5, 2.4])
    assert unskip.rewire(model, "decay:0.5", X).effective_decay == pytest.approx(0.5 * 0.5 * 1.6)
