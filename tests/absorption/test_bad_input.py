"""Bad input: a specific error that says what to do, or `undecided` with the reason."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.absorption.blocks import generic
from torch import nn

import unskip
from unskip.absorption import Activation, Block, Norm, absorb, fold, register
from unskip.errors import BadInput

UP, DOWN = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.ones(3, 6)


def with_value(value: float) -> torch.Tensor:
    weight = UP.clone()
    weight[2, 1] = value
    return weight


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"up": with_value(math.nan)}, r"up has 1 entries that are NaN"),
        ({"down": torch.full((3, 6), math.inf)}, r"down has 18 entries"),
        ({"up_bias": torch.full((6,), math.nan)}, r"up_bias has 6"),
        ({"up": UP.mT}, r"transpose it"),
        ({"up_bias": torch.ones(5)}, r"up_bias must have shape \(6,\)"),
        ({"down_bias": torch.ones(6)}, r"down_bias must have shape \(3,\)"),
        ({"gate": torch.ones(5, 3), "activation": "swiglu"}, r"gate must have shape"),
        ({"activation": "swiglu"}, r"needs gate"),
        ({"gate_bias": torch.ones(6)}, r"gate_bias is given without gate"),
        ({"activation": "gleu"}, r"nearest: .*g"),
        ({"activation": "tanh:2"}, r"take a number"),
        ({"activation": "silu:x"}, r"not a number"),
        ({"activation": 3}, r"must be a name"),
        ({"up": UP.int()}, r"int32.*dequantise"),
        ({"up": UP.to("meta")}, r"meta device"),
        ({"up": UP.tolist()}, r"must be a tensor"),
        ({"up": UP[0]}, r"2 dimension"),
        ({"up": UP[:0], "down": DOWN[:, :0]}, r"not be empty"),
        ({"up": UP.to_sparse()}, r"dense"),
        ({"skip": math.nan}, r"skip must be a finite number"),
        ({"skip": "identity"}, r"skip must be a finite number"),
        ({"norm": "layernorm"}, r"absorption.Norm"),
        ({"skip": torch.ones(2, 2)}, r"skip must have shape \(3, 3\)"),
        ({"down": torch.ones(4, 6)}, r"give a \(4, 3\) matrix"),
        ({"norm": (Norm("rmsnorm", "pre"), Norm("layernorm", "pre"))}, r"same place"),
        ({"norm": Norm("rmsnorm", "pre", gain=torch.ones(4))}, r"norm.gain"),
    ],
)
def test_a_block_that_cannot_be(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Block(**{"up": UP, "down": DOWN, "activation": "gelu", **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "batchnorm"}, "no kind"),
        ({"place": "before"}, "no place"),
        ({"eps": -1.0}, "eps"),
        ({"gain": torch.tensor([math.nan])}, "gain"),
    ],
)
def test_a_norm_that_cannot_be(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Norm(**arguments)  # type: ignore[arg-type]


def test_questions_that_cannot_be() -> None:
    with pytest.raises(BadInput, match="width"):
        absorb(generic(), width=0)
    with pytest.raises(BadInput, match="width"):
        absorb(generic(), width=2.5)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="biases"):
        absorb(generic(), biases="some")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="got Tensor"):
        absorb(torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="widen"):
        absorb(generic()).replacement()
    with pytest.raises(BadInput, match="got ReLU"):
        fold(generic(), nn.ReLU())  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="MlpParts"):
        fold(nn.Linear(8, 8), nn.Linear(8, 3))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="example="):
        absorb(generic(), example=torch.ones(2, 4))
    for width in (10**5, 10**9):
        with pytest.raises(BadInput, match="needs at most 50 units"):
            absorb(generic(), width=width)
    with pytest.raises(BadInput, match=r"x \+ mlp\(x\)"):
        absorb(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), example=torch.ones(2, 4))


@pytest.mark.parametrize("name", ["absorb", "widen", "nearest", "approximate", "fold", "scan"])
def test_what_is_no_block_is_named(name: str) -> None:
    with pytest.raises(BadInput, match="got NoneType"):
        getattr(unskip.absorption, name)(None, *[nn.Linear(3, 2)] * (name in ("approximate", "fold")))


DOMAINS = [-1.0, math.nan, True, "data", ("a", "b"), (3, 1), torch.ones(3), torch.ones(1, 3), 1e200, (-1e200, 1e200)]
DOMAINS += [torch.full((4, 3), math.nan), 1e200 * torch.randn(9, 3).double(), torch.randn(9, 3, dtype=torch.complex64)]
DOMAINS += [torch.ones(9, 3).to_sparse(), torch.ones(9, 3, device="meta"), torch.ones(9, 0)]


@pytest.mark.parametrize("domain", DOMAINS)
def test_domains_that_cannot_be(domain: object) -> None:
    with pytest.raises(BadInput, match=r"[Dd]omain"):
        absorb(Block(UP, DOWN), domain=domain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": torch.ones(200, 4)}, r"inputs must be \(\.\.\., 3\)"),
        ({"inputs": torch.ones(600)}, r"inputs must be"),
        ({"inputs": torch.ones(0, 3)}, r"0 inputs are too few"),
        ({"inputs": torch.full((200, 3), math.nan)}, r"inputs must be finite"),
        ({"inputs": torch.ones(200, 3, dtype=torch.complex64)}, r"real numbers"),
        ({"inputs": torch.full((200, 3), 1e200, dtype=torch.float64)}, r"below 1e\+100"),
        ({"distil": -1}, r"distil"),
    ],
)
def test_fits_that_cannot_be(arguments: dict[str, object], message: str) -> None:
    inputs = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(BadInput, match=message):
        unskip.absorption.approximate(Block(UP, DOWN), **{"inputs": inputs, **arguments})  # type: ignore[arg-type]


def test_words_that_cannot_be_registered() -> None:
    with pytest.raises(BadInput, match="taken"):
        register(Activation("relu", torch.relu))
    from fractions import Fraction

    with pytest.raises(BadInput, match="not 1 z"):
        register(Activation("wrong_odd", torch.tanh, odd=Fraction(1)))


def test_tied_weights_are_weights() -> None:
    weight = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    verdict = absorb(Block(weight, weight.mT, activation="relu"))
    assert verdict.status == "impossible"
    assert verdict.verify()


class TwoMlps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(4, 8) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(x)))
        return x


@pytest.mark.parametrize(
    "given", [{"where": "blocks.0"}, {"mode": "approximate", "data": torch.ones(20, 4), "distil": -1}]
)
def test_options_of_apply(given: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"apply: (where|distil) "):
        unskip.absorption.apply(TwoMlps(), **{"example": torch.ones(2, 4)} if "data" not in given else {}, **given)


@pytest.mark.parametrize("name", ["scan", "apply"])
def test_a_model_is_asked_about_one_batch(name: str) -> None:
    with pytest.raises(BadInput, match=f"{name}: give an example or data"):
        getattr(unskip.absorption, name)(TwoMlps(), example="junk", data=torch.ones(2, 4))


def test_sites_that_cannot_be_read_are_named_by_apply() -> None:
    model = TwoMlps()
    nn.utils.parametrizations.weight_norm(model.ups[0])
    applied = unskip.absorption.apply(model, "widen", example=torch.ones(2, 4))
    assert len(applied.done) == 1
    assert "weight_norm" in applied.left[0]


def test_modules() -> None:
    with pytest.raises(BadInput, match=r"2 MLP sites.*scan"):
        unskip.absorb(TwoMlps(), example=torch.ones(2, 4))
    model = TwoMlps()
    parts = unskip.parts(model, torch.ones(2, 4))
    verdict = unskip.absorb(next(parts.mlps()))
    assert verdict.status == "impossible"
    assert verdict.block.activation == "relu"
    assert verdict.verify()
