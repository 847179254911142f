"""Blocks on which a careless decision is wrong. Each equality is written out, so the test itself is the proof."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from tests.absorption.blocks import close, eye, generic, normal, numbers, planted

from unskip.absorption import Activation, Block, Certificate, Norm, absorb, register


def test_hardswish_with_three_parallel_rows() -> None:
    """No flip set adds up to -1, but another block of three units is the same function."""
    up = torch.tensor([[6.0], [2.0], [6.0]], dtype=torch.float64)
    bias = torch.tensor([-3.0, -3.0, -9.0], dtype=torch.float64)
    down = -torch.tensor([[1 / 48, 3 / 16, 1 / 16]], dtype=torch.float64)
    zero = torch.zeros(1).double()
    block = Block(up, down, up_bias=bias, down_bias=zero, activation="hardswish")
    other = Block(
        torch.tensor([[-3.0], [-3.0], [6.0]], dtype=torch.float64),
        torch.tensor([[-1 / 6, -1 / 6, 1 / 48]], dtype=torch.float64),
        up_bias=torch.tensor([3.0, 6.0, -15.0], dtype=torch.float64),
        down_bias=torch.tensor([1.5], dtype=torch.float64),
        activation="hardswish",
        skip=0.0,
    )
    assert close(block, other, torch.linspace(-9, 9, 400).double()[:, None]) < 1e-13
    verdict = absorb(block)
    assert verdict.status == "undecided"
    assert "HardSwish" in verdict.reason
    # Two parallel rows are safe.
    fine = Block(up[:2], down[:, :2], up_bias=bias[:2], down_bias=zero, activation="hardswish")
    assert absorb(fine).status == "impossible"
    assert absorb(fine).verify()


def test_a_user_activation_never_leads_to_impossible() -> None:
    """Snake, z + sin(z)^2, is of class O, but its units satisfy additional linear relations."""
    snake = register(Activation("snake", lambda z: z + torch.sin(z).square(), odd=Fraction(2)))
    assert not snake.trusted
    block = generic(4, 9)
    asked = Block(block.up, block.down, up_bias=block.up_bias, down_bias=block.down_bias, activation="snake")
    verdict = absorb(asked)
    assert verdict.status == "undecided"
    assert "snake" in verdict.reason
    up = torch.cat([eye(4), normal(numbers(0), 3, 4)])
    down = torch.cat([-eye(4) / 2, normal(numbers(1), 4, 3)], 1)
    verdict = absorb(Block(up, down, activation="snake"))
    assert verdict.status == "possible"
    assert close(verdict.block, verdict.replacement()) < 1e-13
    other = register(Activation("cube", lambda z: z**3, trusted=True))
    assert absorb(Block(up, down, activation="cube")).status == "undecided"
    assert not other.trusted


def test_spectral_test_on_a_skip_with_few_outputs() -> None:
    """d_out < d: W_down has no third singular value, but a split and a fresh pair reproduce a skip of rank two.

    The search does not find the row to split, but the singular values must not rule it out.
    """
    g = numbers(0)
    up, down = normal(g, 12, 10), normal(g, 2, 12)
    down[:, 9:] = 0  # three spare units
    first, second = normal(g, 2, 1), normal(g, 2, 1)
    skip = first @ up[:1] + second @ normal(g, 1, 10)
    block = Block(up, down, activation="relu", skip=skip)
    verdict = absorb(block)
    assert verdict.status != "impossible"
    assert verdict.verify()


@pytest.mark.parametrize("word", ["relu", "leaky_relu", "elu", "abs", "relu6", "hardswish"])
def test_on_a_ball_units_can_be_affine(word: str) -> None:
    """s + v phi(s + 10) = (1 + v) phi(s + 10) - 10 for small s, so the verdict for R^d does not hold on a ball."""
    shift = 3.0 if word == "relu6" else 10.0
    v = 0.3
    one = torch.ones(1, 1).double()
    bias, zero = torch.full((1,), shift, dtype=torch.float64), torch.zeros(1).double()
    block = Block(one, v * one, up_bias=bias, down_bias=zero, activation=word)
    other = Block(one, (1 + v) * one, up_bias=bias, down_bias=-bias, activation=word, skip=0.0)
    x = torch.linspace(-0.999, 0.999, 99).double()[:, None]
    assert close(block, other, x) < 1e-13
    verdict = absorb(block, domain=1.0)
    assert verdict.status != "impossible"
    if word in ("relu", "leaky_relu"):
        assert verdict.status == "possible"
        assert close(block, verdict.replacement(), x) < 1e-12
        assert "ball" in verdict.domain
    bare = absorb(block)
    assert bare.status == "impossible"
    assert bare.verify()


def test_on_a_ball_one_spare_relu_makes_up_rank_one() -> None:
    """One spare unit is not enough on R^3; on a ball a unit with its kink outside represents any rank-one map."""
    g = numbers(1)
    up, down = normal(g, 6, 3), normal(g, 3, 6)
    down[:, 5] = 0
    skip = normal(g, 3, 1) @ normal(g, 1, 3)
    zeros = torch.zeros(6).double(), torch.zeros(3).double()
    block = Block(up, down, up_bias=zeros[0], down_bias=zeros[1], activation="relu", skip=skip)
    assert absorb(block).status != "possible"
    verdict = absorb(block, domain=2.0)
    assert verdict.status == "possible"
    x = verdict.inputs.sample(500, numbers(2))  # type: ignore[union-attr]
    assert close(block, verdict.replacement(), x) < 1e-12


@pytest.mark.parametrize("d", range(5, 14, 2))
def test_columns_that_the_norm_hides_are_spare(d: int) -> None:
    """A LayerNorm removes a column of equal entries, although its projection is not exactly zero in floating point."""
    g = numbers(d)
    h = 3 * d
    up, down = normal(g, h, d), normal(g, d, h)
    down[:, : d + 1] = normal(g, 1, d + 1).expand(d, -1)
    block = Block(up, down, activation="relu", norm=Norm("layernorm", "post", 1e-5))
    verdict = absorb(block)
    assert verdict.status == "possible"
    assert close(block, verdict.replacement()) < 1e-10
    assert verdict.verify()


def test_pre_norm_on_a_sphere_is_an_ordinary_block() -> None:
    """Inputs that are already normalised, with eps = 0: norm(x) = x, so the verdict for R^d does not hold there."""
    block, _ = planted(6, 24, "relu", seed=1)
    norm = Norm("rmsnorm", "pre", 0.0)
    normed = Block(block.up, block.down, up_bias=block.up_bias, down_bias=block.down_bias, activation="relu", norm=norm)
    plain = absorb(block)
    x = Norm("rmsnorm", "pre", 0.0)(normal(numbers(0), 100, 6))
    assert float((normed(x) - plain.replacement()(x)).abs().max()) < 1e-12
    assert absorb(normed).status == "impossible"
    assert "open set" in absorb(normed).domain
    assert "approximation" in absorb(normed).reason


def test_negative_odd_part() -> None:
    """LeakyReLU with slope below -1 has c < 0."""
    block, chosen = planted(5, 20, "leaky_relu:-3", seed=0)
    verdict = absorb(block)
    assert verdict.flips is not None
    assert torch.equal(verdict.flips, chosen)
    refused = absorb(generic(5, 20, "leaky_relu:-3"))
    assert refused.status == "impossible"
    assert refused.flip_bound is not None
    assert refused.flip_bound > 0
    assert refused.verify()


def test_swiglu_with_gate_biases_can_absorb() -> None:
    """x + x silu(x) - x silu(x + 1) = x silu(-x) - x silu(-x - 1)."""
    one = torch.ones(2, 1).double()
    gates = torch.tensor([0.0, 1.0], dtype=torch.float64)
    block = Block(one, torch.tensor([[1.0, -1.0]], dtype=torch.float64), one, gate_bias=gates, activation="swiglu")
    other = Block(
        one, torch.tensor([[1.0, -1.0]], dtype=torch.float64), -one, gate_bias=-gates, activation="swiglu", skip=0.0
    )
    assert close(block, other) < 1e-13
    assert absorb(block).status == "undecided"
    assert absorb(block, biases="allowed").status == "undecided"


def test_squared_relu_with_biases_can_absorb() -> None:
    """x - r2(x + 1) / 2 + r2(x) / 2 = r2(-x - 1) / 2 - r2(-x) / 2 - 1 / 2."""
    one, half = torch.ones(2, 1).double(), torch.tensor([[-0.5, 0.5]], dtype=torch.float64)
    bias, zero = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.zeros(1).double()
    block = Block(one, half, up_bias=bias, down_bias=zero, activation="relu2")
    other = Block(-one, -half, up_bias=-bias, down_bias=zero - 0.5, activation="relu2", skip=0.0)
    assert close(block, other) < 1e-13
    assert absorb(block).status == "undecided"


def test_edges_of_the_parameters() -> None:
    up, down = torch.ones(1, 2).double(), torch.ones(2, 1).double()
    assert absorb(Block(eye(2), -eye(2), activation="elu:0")).status == "possible"  # ELU with alpha 0 is ReLU
    assert absorb(Block(eye(2), eye(2), activation="leaky_relu:-1")).status == "impossible"  # |z|
    for word in ("leaky_relu:1", "silu:0", "identity"):  # linear
        assert absorb(Block(eye(2), eye(2), activation=word)).status == "possible"
        narrow = absorb(Block(up, down, activation=word))
        assert narrow.status == "impossible"
        assert narrow.verify()
    assert absorb(Block(torch.eye(2).double(), -2 * eye(2), activation="silu:0")).status == "possible"  # 0.5 z


def test_widths_below_and_above() -> None:
    block = generic(3, 6, "gelu", skip=0.0)
    narrow = absorb(block, width=5)
    assert narrow.status == "impossible"
    assert {each.kind for each in narrow.obstructions} == {"count"}
    assert narrow.verify()
    assert absorb(generic(3, 6, "hardswish", skip=0.0), width=5).status == "undecided"
    block = generic(3, 6, "gelu")
    for extra in (1, 2):
        verdict = absorb(block, width=6 + extra)
        assert verdict.status != "possible"
        assert verdict.verify()
    enough = absorb(block, width=9)
    assert enough.status == "possible"
    assert close(block, enough.replacement()) < 1e-12
    assert enough.replacement().width == 9


def test_units_that_cancel_once_a_norm_has_taken_most_of_them() -> None:
    """The norm removes a large part of the columns, and the rounding that remains of it must not count as a key.

    The first two units are one key with columns that cancel, so they are spare; the third reproduces the skip.
    """
    small = 2.0**-20 * torch.tensor([1.0, -3.0, 2.0], dtype=torch.float64)
    other = 2.0**-20 * torch.tensor([3.0, 1.0, -5.0], dtype=torch.float64)
    row = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    up, skip = torch.stack([row, row, row.flip(0)]), -torch.outer(other, row.flip(0))
    for seed in range(20):
        large = torch.randint(-9, 9, (3,), generator=numbers(seed)).double()
        down = torch.stack([small + large[0], -small + large[1], other + large[2]], 1)
        block = Block(up, down, activation="gelu", skip=skip, norm=Norm("layernorm", "post", 1e-5))
        assert absorb(block, width=1).status != "impossible"


def test_forged_verdicts() -> None:
    """A certificate of another block, and a dropped skip that is within the rounding of the weights."""
    one = torch.ones(1, 1).double()
    ten, zero = torch.full((1,), 10.0).double(), torch.zeros(1).double()
    block = Block(one, 0.3 * one, up_bias=ten, down_bias=zero, activation="relu")
    verdict = absorb(block, domain=1.0)
    assert verdict.status == "possible"
    forged = Certificate("dual", {"matrix": one, "rows": torch.tensor([0]), "columns": torch.tensor([0])})
    assert not replace(verdict, status="impossible", certificate=forged, weights=None).verify()
    for dtype in (torch.bfloat16, torch.float16):
        block, _ = planted(16, 64, dtype=dtype, biases=False)
        verdict = absorb(block)
        assert verdict.status == "possible"
        assert verdict.verify()
        assert not replace(verdict, weights=replace(block, skip=0.0)).verify()
        assert not replace(verdict, weights=replace(verdict.replacement(), activation="silu")).verify()
