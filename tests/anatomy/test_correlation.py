"""The correlation map of an MLP against closed forms and against sampled pairs of tokens."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unskip
from unskip.anatomy import MlpParts, correlation_map, mean_output


class Mlp(nn.Module):
    """x + W_down phi(W_up norm(x)), W_up and W_down orthogonal."""

    def __init__(self, activation: nn.Module, bias: float = 0.0, dim: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(dim),
            nn.Linear(dim, dim),
            activation,
            nn.Linear(dim, dim),
        )
        draw = torch.Generator().manual_seed(0)
        for layer in (self.up, self.down):
            nn.init.orthogonal_(layer.weight, generator=draw)
            nn.init.zeros_(layer.bias)
        nn.init.constant_(self.up.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return out


def part_of(model: nn.Module) -> MlpParts:
    part = unskip.parts(model, torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(1)))[0]
    assert isinstance(part, MlpParts)
    return part


def centred(model: Mlp) -> Mlp:
    with torch.no_grad():
        model.down.bias.copy_(-mean_output(part_of(model)))
    return model


def test_relu_in_closed_form() -> None:
    """E[phi'^2] = 1/2, E[phi^2] = 1/2, E[phi]^2 = 1/(2 pi): the slope is 1, and centred (1/2) / (1/2 - 1/(2 pi))."""
    found = correlation_map(part_of(Mlp(nn.ReLU())))
    assert found is not None
    assert found.slope == pytest.approx(1, abs=1e-4)
    assert found.at_zero == pytest.approx(1 / math.pi, abs=1e-4)
    found = correlation_map(part_of(centred(Mlp(nn.ReLU()))))
    assert found is not None
    assert found.slope == pytest.approx(0.5 / (0.5 - 1 / (2 * math.pi)), abs=1e-4)
    assert found.at_zero == pytest.approx(0, abs=1e-9)


def test_a_linear_map_keeps_angles() -> None:
    found = correlation_map(part_of(centred(Mlp(nn.GELU(), bias=30.0))))  # far in the linear range
    assert found is not None
    assert found.slope == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.SiLU()])
@pytest.mark.parametrize("bias", [0.0, 1.5])
def test_the_slope_is_that_of_sampled_tokens(activation: nn.Module, bias: float) -> None:
    model = Mlp(activation, bias)
    found = correlation_map(part_of(model))
    draw = torch.Generator().manual_seed(2)
    x, other = torch.randn(2, 20_000, 64, generator=draw)
    turn = 0.02

    def branch(z: Tensor) -> Tensor:
        return model.down(model.act(model.up(z))).double().detach()

    a, b, c = branch(x), branch(math.cos(turn) * x + math.sin(turn) * other), branch(other)
    size = (a.square().sum(1).mean() + b.square().sum(1).mean()) / 2
    slope = (a - b).square().sum(1).mean() / 2 / size / (1 - math.cos(turn))  # 1 - C(rho) over 1 - rho
    assert found is not None
    assert found.slope == pytest.approx(float(slope), rel=0.03)
    assert found.at_zero == pytest.approx(float((a * c).sum(1).mean() / size), abs=0.02)


def test_the_gain_and_bias_of_the_norm_are_included() -> None:
    one, other = Mlp(nn.GELU()), Mlp(nn.GELU())
    with torch.no_grad():
        one.norm.weight.fill_(2.0)
        one.norm.bias.normal_(generator=torch.Generator().manual_seed(3))
        other.up.bias.copy_(other.up.weight @ one.norm.bias)
        other.up.weight.mul_(2.0)
    assert correlation_map(part_of(one)) == pytest.approx(correlation_map(part_of(other)))


def test_a_gated_mlp_has_none() -> None:
    timm: Any = pytest.importorskip("timm")
    shape = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 16, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", **shape, mlp_layer=timm.layers.SwiGLU)
    assert correlation_map(next(unskip.parts(model, torch.randn(1, 3, 8, 8)).mlps())) is None
