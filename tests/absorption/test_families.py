"""Activations that need no search: closed-form verdicts, and the hypotheses on biases that they need."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.absorption.blocks import CLASS_O, generic, normal, numbers, planted

from unskip.absorption import Block, absorb
from unskip.absorption._activations import BUILT_IN, GATED, resolve
from unskip.anatomy._activations import ACTIVATIONS

BOUNDED = [name for name, each in BUILT_IN.items() if each.family == "bounded"]
GRID = torch.linspace(-30, 30, 6001, dtype=torch.float64)


def gated(word: str, biases: bool = False, seed: int = 0, **more: object) -> Block:
    g = numbers(seed)
    up, gate, down = normal(g, 12, 5), normal(g, 12, 5), normal(g, 5, 12)
    held = {"up_bias": normal(g, 12), "gate_bias": normal(g, 12)} if biases else {}
    return Block(up, down, gate, activation=word, **held, **more)  # type: ignore[arg-type]


# --- Properties of activations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [*CLASS_O, "leaky_relu:0.3", "leaky_relu:-3", "silu:2.5", "softplus:0.7"])
def test_odd_part_is_linear(word: str) -> None:
    phi = resolve(word)[0]
    assert phi.odd is not None
    gap = phi.function(GRID) - phi.function(-GRID) - float(phi.odd) * GRID
    assert float(gap.abs().max()) < 1e-12 * 90


@pytest.mark.parametrize("word", BUILT_IN)
def test_facts_hold_in_numbers(word: str) -> None:
    phi = BUILT_IN[word]
    values = phi.function(GRID)
    assert float(phi.function(torch.zeros(1, dtype=torch.float64))) == pytest.approx(phi.at_zero, abs=1e-15)
    if phi.homogeneous or phi.family == "power":
        assert torch.allclose(phi.function(3 * GRID), (9 if phi.family == "power" else 3) * values)
    if phi.family == "bounded":
        assert float(phi.function(1e6 * GRID).abs().max()) <= 6
    if phi.family == "even":
        assert torch.equal(values, phi.function(-GRID))
    if phi.family not in ("odd-linear", "linear"):  # no other activation has a linear odd part
        odd = values - phi.function(-GRID)
        assert word == "square" or phi.family == "even" or float((odd / GRID.clamp(min=1e-3))[3100:].std()) > 1e-3


# --- Closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [*BOUNDED, "elu", "selu", "celu", "mish", "abs", "elu:0.5"])
@pytest.mark.parametrize("width", [32, 1000])
def test_never_at_any_width(word: str, width: int) -> None:
    verdict = absorb(generic(word=word), width=width)
    assert verdict.status == "impossible"
    assert verdict.extra_width is None
    assert verdict.verify()
    assert {each.kind for each in verdict.obstructions} == {"growth" if word in BOUNDED else "family"}


@pytest.mark.parametrize("word", [*BOUNDED, "elu", "mish", "abs", "relu2", "swiglu"])
def test_without_a_skip_there_is_nothing_to_do(word: str) -> None:
    block = gated(word, skip=0.0) if word == "swiglu" else generic(word=word, skip=0.0)
    assert absorb(block).status == "possible"
    assert absorb(block).verify()


@pytest.mark.parametrize("word", ["reglu", "bilinear", "swiglu", "relu2", "square"])
def test_without_hidden_biases_they_are_flat_at_the_origin(word: str) -> None:
    g = numbers(0)
    block = gated(word) if word in GATED else Block(normal(g, 12, 5), normal(g, 5, 12), activation=word)
    for width in (3, 12, 100):
        verdict = absorb(block, width=width)
        assert [each.kind for each in verdict.obstructions] == ["linearisation"]
        assert verdict.verify()


@pytest.mark.parametrize("word", GATED)
def test_gated(word: str) -> None:
    block = gated(word)
    verdict = absorb(block)
    assert verdict.status == ("undecided" if word == "glu" else "impossible")
    assert verdict.verify()
    assert absorb(block, biases="allowed").status == "undecided"
    assert absorb(gated(word, biases=True)).status == "undecided"
    # An output bias does not change the verdict.
    const = gated(word, down_bias=torch.ones(5).double())
    assert absorb(const).status == verdict.status


def test_a_plain_word_with_a_gate_is_the_gated_word() -> None:
    block = gated("swiglu")
    same = Block(block.up, block.down, block.gate, activation="silu")
    x = normal(numbers(1), 7, 5)
    assert torch.equal(block(x), same(x))
    assert absorb(same).status == "impossible"


def test_the_quotients_that_the_linearisation_is_about() -> None:
    """F(t x) / t -> A x and G(t x) / t -> 0, checked numerically."""
    block = gated("swiglu", skip=0.5)
    x = normal(numbers(2), 5)
    assert torch.allclose(block(1e-7 * x) / 1e-7, 0.5 * x, atol=1e-4)
    free = gated("swiglu", skip=0.0, seed=9)
    assert float((free(1e-7 * x) / 1e-7).norm()) < 1e-4


def test_squared_relu_and_square_with_biases_are_open() -> None:
    for word in ("relu2", "square"):
        assert absorb(generic(word=word)).status == "undecided"
        assert absorb(generic(word=word), biases="none").status in ("impossible", "undecided")
        bare = Block(generic().up, generic().down, activation=word)
        assert absorb(bare).status == "impossible"
        assert absorb(bare, biases="allowed").status == "undecided"


# --- Biases -----------------------------------------------------------------------------------------------------------


def test_without_output_biases_the_constant_has_to_fit() -> None:
    """Flipping moves a constant into the output bias; without an output bias the same flip set is not enough."""
    block, chosen = planted(5, 20, "gelu", seed=3)
    asked = Block(block.up, block.down, up_bias=block.up_bias, activation="gelu")
    verdict = absorb(asked)
    assert verdict.status == "impossible"
    assert verdict.verify()
    assert absorb(asked, biases="allowed").status == "possible"
    # If W_down[:, S] b[S] = 0, no output bias is needed.
    bias = block.up_bias.clone()  # type: ignore[union-attr]
    down = block.down[:, chosen]
    bias[chosen] -= torch.linalg.pinv(down) @ (down @ bias[chosen])
    fits = Block(block.up, block.down, up_bias=bias, activation="gelu")
    verdict = absorb(fits)
    assert verdict.status == "possible"
    assert verdict.replacement().down_bias is None
    assert verdict.verify()


def test_without_hidden_biases_a_bent_unit_cannot_be_had() -> None:
    verdict = absorb(generic(word="relu"), biases="none")
    assert verdict.status == "impossible"
    assert verdict.verify()


# --- Numbers ----------------------------------------------------------------------------------------------------------


def test_shifted_softplus_keeps_its_digits() -> None:
    phi = resolve("shifted_softplus")[0].function
    z = torch.linspace(-60, 60, 4801, dtype=torch.float64)
    assert torch.allclose(phi(z), ACTIVATIONS["shifted_softplus"](z), rtol=1e-13, atol=3e-9)  # torch's threshold
    assert torch.allclose(phi(z), torch.logaddexp(z, torch.zeros_like(z)) - math.log(2), rtol=1e-14, atol=1e-15)
    tiny = 10.0 ** -torch.arange(3.0, 200, 7, dtype=torch.float64)
    for side in (tiny, -tiny):
        assert torch.allclose(phi(side), side / 2 + side.square() / 8, rtol=1e-6, atol=0)
    assert torch.allclose(phi(tiny) - phi(-tiny), tiny, rtol=1e-15, atol=0)
    x = torch.tensor([-1e4, -2.0, 0.0, 2.0, 1e4], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(phi(x).sum(), x)
    assert torch.allclose(slope, torch.sigmoid(x.detach()), rtol=1e-13)


@pytest.mark.parametrize("word", CLASS_O)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tiny_rows_with_large_columns(word: str, dtype: torch.dtype) -> None:
    """Rounding to a coarse dtype changes the planted weights, so one of the scales may be undecided there."""
    statuses = []
    for scale in (1e-6, 1e-12, 1e-20):
        block, chosen = planted(4, 12, word)
        assert block.up_bias is not None
        assert block.down_bias is not None
        block = replace(
            block,
            up=(block.up * scale).to(dtype),
            up_bias=(block.up_bias * scale).to(dtype),
            down=(block.down / scale).to(dtype),
            down_bias=block.down_bias.to(dtype),
        )
        verdict = absorb(block)
        statuses.append(verdict.status)
        if verdict.status == "possible":
            assert verdict.flips is not None
            assert torch.equal(verdict.flips, chosen)
            assert verdict.verify()
    assert statuses.count("possible") >= (3 if dtype == torch.float64 else 2)
    assert "impossible" not in statuses
