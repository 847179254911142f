"""Activations of modules are read correctly or refused, even if they differ from a known one only between points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.absorption.blocks import generic, normal, numbers
from torch import Tensor, nn

import unskip
from unskip.absorption import absorb
from unskip.errors import BadInput


class Mlp(nn.Module):
    def __init__(self, act: nn.Module | Callable[[Tensor], Tensor], d: int = 4, h: int = 12) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(d, h), act, nn.Linear(h, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


def word_of(act: nn.Module | Callable[[Tensor], Tensor]) -> str:
    """The name that the activation of a module is read as, or "refused"."""
    torch.manual_seed(0)
    model = Mlp(act).eval()
    try:
        return absorb(model, example=torch.randn(5, 4)).block.activation
    except BadInput:
        return "refused"


READ = [
    (nn.Hardtanh(0, 50), "hardtanh:0,50"),
    (nn.Hardtanh(-50, 50), "hardtanh:-50,50"),
    (nn.Hardtanh(), "hardtanh"),
    (nn.Hardshrink(0.04), "refused"),
    (nn.Softshrink(0.04), "refused"),
    (nn.Threshold(0.1, 0.0), "refused"),
    (nn.RReLU(), "refused"),
    (nn.LeakyReLU(0.2), "leaky_relu:0.2"),
    (nn.PReLU(init=0.25), "leaky_relu:0.25"),
    (nn.PReLU(12, init=0.25), "refused"),
    (nn.Softplus(2.0), "softplus:2"),
    (nn.ELU(0.5), "elu:0.5"),
    (nn.CELU(0.5), "celu:0.5"),
    (nn.ReLU6(), "relu6"),
    (nn.ReLU(), "relu"),
    (nn.GELU("tanh"), "gelu_tanh"),
    (nn.Mish(), "mish"),
    (lambda z: nn.functional.hardtanh(z, 0.0, 50.0), "hardtanh:0,50"),
    (lambda z: nn.functional.threshold(z, 0.1, 0.0), "refused"),
    (lambda z: nn.functional.hardshrink(z, 0.04), "refused"),
    (lambda z: z.clamp(-50, 50), "hardtanh:-50,50"),
    (lambda z: z.clamp(min=0), "relu"),
    (lambda z: torch.where(z > 1e-3, z, 0.0), "refused"),
    (lambda z: torch.relu(z).square(), "relu2"),
    (lambda z: nn.functional.leaky_relu(z, 0.2).square(), "refused"),
    (lambda z: z * torch.sigmoid(1.702 * z), "quick_gelu"),
    (lambda z: torch.relu(z), "relu"),
    (lambda z: nn.functional.gelu(z), "gelu"),
    (nn.Hardtanh(0, 1e7), "hardtanh:0,10000000"),  # beyond all points that are checked
    (nn.Softplus(1.0, threshold=5.0), "refused"),
    (lambda z: torch.relu(z + 0.01), "refused"),
    (lambda z: nn.functional.gelu(z - 1e-3), "refused"),
    (lambda z: torch.relu(z) * ~((z > 3.015) & (z < 3.02)), "refused"),  # between the points
    (lambda z: torch.relu(z).masked_fill(z > 1e7, 0.0), "refused"),
    (lambda z: torch.relu(z) - torch.relu(z - 1e7), "refused"),
    (lambda z: z + 1e-7 * torch.sin(z), "refused"),
    (lambda z: 2 * z - z, "identity"),
    (lambda z: z + 1 / (1 + ((z - 3.3) * 1e9) * ((z - 3.3) * 1e9)), "refused"),  # bumps between the points
    (lambda z: nn.functional.silu(z) + torch.exp(-(((z - 3.3) * 100) ** 2)), "refused"),
    (lambda z: nn.functional.silu(z) + 1 / (1 + ((z - 3.3) * 1e9) ** 2), "refused"),
    (lambda z: torch.relu(z) + 1e-9 * torch.sin(z), "refused"),
    (lambda z: z * torch.sigmoid(z) + torch.sigmoid((z - 3.3) * 1e9) * torch.sigmoid((3.301 - z) * 1e9), "refused"),
    (lambda z: z / (1 + torch.exp(-z)), "silu"),
    (lambda z: 0.5 * z * (1 + torch.erf(z / 2**0.5)), "gelu"),
    (lambda z: 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))), "gelu_tanh"),
    (lambda z: z * torch.tanh(nn.functional.softplus(z)), "mish"),
    (lambda z: (z + (z.square() + 4).sqrt()) / 2, "squareplus"),
    (lambda z: nn.functional.softplus(z) - 2**-0.5, "refused"),
    (nn.Softsign(), "softsign"),
    (nn.Hardswish(), "hardswish"),
    (nn.LogSigmoid(), "log_sigmoid"),
    (lambda z: z * nn.functional.relu6(z + 3) / 6, "hardswish"),
]


@pytest.mark.parametrize(("act", "word"), READ, ids=[f"{i}-{type(act).__name__}" for i, (act, _) in enumerate(READ)])
def test_activations_are_read_from_their_module(act: nn.Module, word: str) -> None:
    assert word_of(act) == word


def test_parts_carry_what_their_activation_is_made_of() -> None:
    part = next(unskip.parts(Mlp(nn.Hardtanh(0, 1e7)).eval(), torch.randn(5, 4)).mlps())
    assert part.activation == "relu"  # by values
    assert absorb(part).status == "impossible"
    assert "Curve(hardtanh)" in repr(part)


@pytest.mark.parametrize("word", ["hardtanh:0,50", "hardtanh:-50,50", "celu:0.5", "elu:0.5"])
def test_parametrised_words_are_never(word: str) -> None:
    verdict = absorb(generic(4, 12, word))
    assert verdict.status == "impossible"
    assert verdict.verify()


def test_a_read_activation_is_the_function_that_runs() -> None:
    for act in (nn.LeakyReLU(0.2), nn.Softplus(2.0), nn.ELU(0.5), nn.CELU(0.5), nn.Hardtanh(-2, 3), nn.PReLU(init=0.3)):
        torch.manual_seed(0)
        model = Mlp(act.double()).double().eval()
        x = 20 * normal(numbers(0), 50, 4)
        block = absorb(model, example=x).block
        assert torch.allclose(block(x), model(x), atol=1e-7)


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda x: x.clamp(-100, 100),
    "where": lambda x: torch.where(x > 100, 0.0, x),
    "fmin": lambda x: torch.fmin(x, torch.tensor(100.0)),
    "fmod": lambda x: torch.fmod(x, 100.0),
    "atan": lambda x: 1e4 * torch.atan(x / 1e4),
    "logaddexp": lambda x: torch.logaddexp(x, torch.tensor(-50.0)),
    "square": lambda x: x + 1e-6 * x * x,
    "scaled": lambda x: 0.9995 * x,
    "shifted": lambda x: x + 1e-4,
    "half": lambda x: x.half().float(),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("before", [True, False])
def test_steps_that_do_nothing_on_the_example_are_named(step: Callable[[Tensor], Tensor], before: bool) -> None:
    class Stepped(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            inner = self.down(self.act(self.up(step(x) if before else x)))
            return x + (inner if before else step(inner))

    model, x = Stepped(nn.GELU()).eval(), torch.randn(5, 4)
    for asked in (lambda: absorb(model, example=x), lambda: absorb(unskip.parts(model, x)[0])):
        with pytest.raises(BadInput, match="more than an MLP"):
            asked()


@pytest.mark.parametrize("alpha", [0.9995, 1.0005, torch.tensor([1.0, 1.0, 1.0, 0.999]), "half"], ids=str)
def test_a_skip_that_is_nearly_the_identity_is_not_read_as_it(alpha: Any) -> None:
    class Scaled(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            skip = x.half().float() if isinstance(alpha, str) else alpha * x
            return skip + self.down(self.act(self.up(x)))

    model, x = Scaled(nn.GELU()).eval(), torch.randn(5, 4)
    for asked in (lambda: absorb(model, example=x), lambda: absorb(unskip.parts(model, x)[0])):
        with pytest.raises(BadInput, match="stream"):
            asked()


def test_a_branch_that_reads_another_sample_is_refused() -> None:
    class Rolled(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.act(self.up(x.roll(1, 0))))

    with pytest.raises(BadInput, match="steps besides its weights"):
        absorb(Rolled(nn.GELU()).eval(), example=torch.randn(5, 4))
