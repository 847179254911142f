"""Soundness away from ordinary inputs: tiny ones, weak directions of the weights, and the edge of overflow.

The rule of `test_sound.py` holds for every norm and direction of the input, and verdicts do not depend on the size of
inputs.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from tests.absorption.blocks import errors, eye, normal, numbers, planted
from torch import Tensor

from unskip.absorption import Block, Norm, absorb
from unskip.absorption._activations import resolve
from unskip.absorption._construct import build
from unskip.absorption._keys import canonical_keys
from unskip.absorption._measure import compare_outputs
from unskip.absorption._problem import problem_of

SMALL = 2.0**-60  # 1e-18


def f64(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def exactly(block: Block, x: Fraction) -> Fraction:
    """The output of a ReLU block with one input and one output, without rounding."""

    def numbers_of(value: Tensor | None) -> list[Fraction]:
        return (
            [Fraction(0)] * block.width if value is None else [Fraction(v) for v in value.double().flatten().tolist()]
        )

    units = zip(numbers_of(block.up), numbers_of(block.up_bias), numbers_of(block.down), strict=True)
    return (
        Fraction(block.matrix.item()) * x
        + sum(v * max(u * x + b, 0) for u, b, v in units)
        + numbers_of(block.down_bias)[0]
    )


# --- Tiny biases ------------------------------------------------------------------------------------------------------

HINGES = {
    "apart": Block(f64([1.0], [1.0], [1.0]), f64([1.0, 2.0, 4.0]), up_bias=f64(1.0, 2.0, 0.0), down_bias=f64(0.0)),
    "mirrored": Block(f64([1.0], [-1.0], [2.0]), f64([1.0, -1.0, 1.0]), up_bias=f64(1.0, 1.0, 3.0), down_bias=f64(0.0)),
    "flips, but for the constant": Block(f64([1.0], [1.0]), f64([-1.0, 1.0]), up_bias=f64(1.0, -1.0)),
    "flips": Block(f64([1.0], [1.0]), f64([-1.0, 1.0]), up_bias=f64(1.0, -1.0), down_bias=f64(0.0)),
    "spare": Block(f64([1.0], [1.0], [1.0]), f64([1.0, 2.0, 0.0]), up_bias=f64(1.0, 1.0, 0.0), down_bias=f64(0.0)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HINGES)
def test_inputs_of_another_size_change_no_verdict(name: str, dtype: torch.dtype) -> None:
    """Scaling the biases of a ReLU block to 1e-18 rescales its inputs and outputs only."""
    found = []
    for scale in (1.0, SMALL, 1 / SMALL):
        plain = replace(HINGES[name], activation="relu")
        biases = {word: scale * bias for word in ("up_bias", "down_bias") if (bias := getattr(plain, word)) is not None}
        block = replace(plain, **biases)
        stored = {word: value.to(dtype) for word, value in block.tensors().items()}
        verdict = absorb(replace(block, **stored))
        assert verdict.verify()
        found.append(verdict.status)
        if verdict.status == "possible":
            for step in range(-40, 41):
                x = Fraction(step, 10) * Fraction(scale)
                gap = exactly(block, x) - exactly(verdict.replacement(), x)
                assert abs(gap) <= Fraction(1e-6) * (abs(x) + Fraction(scale))
    assert len(set(found)) == 1
    assert found[0] == ("possible" if name in ("flips", "spare") else "impossible")


@pytest.mark.parametrize("scale", [2.0**-70, 2.0**40])
def test_rows_and_columns_of_another_size_change_no_verdict(scale: float) -> None:
    for seed in range(4):
        block, _ = planted(3, 9, "relu", seed=seed)
        assert block.up_bias is not None
        other = replace(block, up=scale * block.up, up_bias=scale * block.up_bias, down=block.down / scale)
        assert absorb(other).status == absorb(block).status == "possible"


# --- Weak directions --------------------------------------------------------------------------------------------------


def weak(seed: int, word: str, dtype: torch.dtype, least: float) -> Block:
    """A planted flip set, with rows that are nearly orthogonal to some directions."""
    g, d, h = numbers(seed), 6, 24
    turn = torch.linalg.qr(normal(g, d, d))[0]
    sizes = torch.logspace(0, least, d, dtype=torch.float64)
    up, down = normal(g, h, d) @ (turn * sizes) @ turn.mT / d**0.5, normal(g, d, h) / h**0.5
    inverse = torch.linalg.pinv(up[: h // 2])
    free = eye(h // 2) - up[: h // 2] @ inverse
    odd = resolve(word)[0].odd
    down[:, : h // 2] = -inverse / float(odd or 1) + down[:, : h // 2] @ free
    biases = {"up_bias": 0.1 * normal(g, h), "down_bias": normal(g, d)}
    stored = {name: value.to(dtype) for name, value in biases.items()}
    return Block(up.to(dtype), down.to(dtype), **stored, activation=word)


@pytest.mark.parametrize("word", ["relu", "gelu"])
@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.float16, -2.0), (torch.bfloat16, -1.0), (torch.float32, -3.0), (torch.float32, -4.0)]
)
def test_the_rule_holds_along_directions_that_the_rows_hardly_see(word: str, dtype: torch.dtype, least: float) -> None:
    for seed in range(6):
        block = weak(seed, word, dtype, least)
        verdict = absorb(block)
        if verdict.status != "possible":
            continue
        for way in torch.linalg.svd(block.up.double())[2]:
            for size in (1e-3, 1.0, 1e2):
                found = errors(block, verdict.replacement(), size * normal(numbers(seed), 48, 1) * way)
                assert found is None or found[0] <= 4 * found[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_that_see_every_direction_alike_are_still_absorbed(dtype: torch.dtype) -> None:
    assert all(absorb(weak(seed, "gelu", dtype, 0.0)).status == "possible" for seed in range(6))


def test_a_weak_channel_is_as_exact_as_the_others_in_float64() -> None:
    """The rounding of the strong channels is 1e-5 of the outputs for the weak one."""
    for seed in range(6):
        block, _ = planted(3, 9, "relu", seed=seed)
        size = f64(1.0, 1.0, 1e-12)
        block = replace(block, up=block.up * size, skip=block.matrix * size)
        verdict = absorb(block)
        if verdict.status == "possible":
            assert block.up_bias is not None
            x = f64([0.0, 0.0, 1e6])
            hidden = x @ block.up.abs().mT + block.up_bias.abs()
            terms = x @ block.matrix.abs().mT + hidden @ block.down.abs().mT
            assert float((block(x) - verdict.replacement()(x)).norm()) <= 1e-10 * float(terms.norm())


# --- Overflow ---------------------------------------------------------------------------------------------------------


def finite(block: Block, x: Tensor) -> Tensor:
    """(rows,) whether no number in a plain block overflows."""
    rows = x @ block.up.mT + (0 if block.up_bias is None else block.up_bias)
    parts = (rows, block.hidden(x), replace(block, skip=0.0)(x), block(x))
    return torch.stack([part.isfinite().all(1) for part in parts]).all(0)


def dead(word: str, row: float, skip: Tensor | float, d: int = 1) -> Block:
    """A block of two small units and four spare ones, which can reproduce the skip."""
    up, down = torch.zeros(6, d).half(), torch.zeros(1, 6).half()
    up[:2], down[:, :2] = row, 1.0
    return Block(up, down, up_bias=torch.zeros(6).half(), down_bias=torch.zeros(1).half(), activation=word, skip=skip)


@pytest.mark.parametrize(
    "block",
    [
        dead("squareplus", 0.5, 4.0),
        dead("squareplus", 0.25, 1.0),
        dead("gelu", 0.125, f64([0.5, 0.5]), 2),
        dead("relu", 0.0625, f64([0.25, 0.25, 0.25, 0.25]), 4),
    ],
    ids=["squareplus", "squareplus small", "gelu", "relu"],
)
def test_a_float16_replacement_does_not_overflow_before_its_block(block: Block) -> None:
    verdict = absorb(block)
    if verdict.status == "possible":
        rows = torch.cat([normal(numbers(0), 200, block.inputs).sign(), normal(numbers(1), 200, block.inputs)])
        for size in torch.logspace(1, 4.81, 60).tolist():
            x = (size * rows).half()
            x = x[x.isfinite().all(1)]
            assert bool(finite(verdict.replacement(), x[finite(block, 1.04 * x)]).all())


def test_rows_of_float16_that_carry_a_skip_take_every_input() -> None:
    assert absorb(dead("gelu", 0.125, f64([0.5, 0.5]), 2)).status == "possible"


@pytest.mark.parametrize(("word", "norm"), [("leaky_relu:-3", None), ("relu", Norm("layernorm", "post", 1e-5))])
def test_float16_flips_that_could_overflow_first_are_not_taken(word: str, norm: Norm | None) -> None:
    """A flipped row gives -3 z, three times the value in the block; a LayerNorm removes a mean of any size."""
    block, _ = planted(4, 16, word, norm=norm, dtype=torch.float16)
    assert absorb(block).status == "undecided"


# --- phi(0) -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["softplus", "squareplus", "log_sigmoid"])
def test_what_an_activation_is_at_0_does_not_round_the_constant(word: str) -> None:
    """Dead units reproduce the skip and the others keep their sign, so the constant is kept bit for bit."""
    for seed in range(8):
        g = numbers(seed)
        up, down = 1e-3 * normal(g, 9, 2), normal(g, 2, 9)
        down[:, :4] = 0
        zero = torch.zeros(9).double()
        block = Block(up, down, up_bias=zero, down_bias=torch.zeros(2).double(), activation=word)
        made = absorb(block).replacement()
        assert made.down_bias is None or not bool(made.down_bias.any())


def test_a_linear_block_stays_silent_where_it_is() -> None:
    """Its rows are orthogonal to (0, 1, 1). A unit made from the rounding of an SVD would not be."""
    up = torch.tensor([[0.0, 2.0, -2.0], [-1.0, 0.0, 0.0], [0.0, 1.03125, -1.03125]]).bfloat16()
    down = torch.tensor([[0.0, 1.0, 1.0], [1.0, -2.0, 0.0], [1.0, -1.0, -2.0]]).bfloat16()
    skip = f64([2.0, 0.0, 0.0], [-4.0, 0.0, 0.0], [-2.0, 0.0, 0.0])
    made = absorb(Block(up, down, activation="identity", skip=skip)).replacement()
    assert not bool(made(torch.tensor([[0.0, 1.0, 1.0]]).bfloat16()).any())


def test_badly_conditioned_splits_in_float64() -> None:
    """Splits of nearly parallel rows, with weights of 5e5: 9e-11 of the terms where measured, and 1.1e-10 elsewhere."""
    one, two = [0.08071931271563587, 0.24178826915789842], [0.08073349641553951, 0.24196136017580455]
    down = [[0.01375728700036942, 0.04325074231974506, 0.018008318383037607, 0.034802970874127245],
            [-0.013794005793266721, 0.02031666833686042, 0.026808376641160238, 0.018132819927489455]]  # fmt: skip
    up = torch.tensor([one, two] * 2, dtype=torch.float64)
    bias = torch.tensor([2.5427756196840163, 0.3740649112272844] * 2, dtype=torch.float64)
    block = Block(
        up, torch.tensor(down, dtype=torch.float64), up_bias=bias, down_bias=torch.zeros(2).double(), activation="gelu"
    )
    problem = problem_of(block, 4, "as-is")
    keys = canonical_keys(problem)
    made = build(problem, keys, torch.zeros(2, dtype=torch.bool), split=(0, 1))
    assert made is not None
    assert not compare_outputs(block, made.block).holds
    assert absorb(block).status != "impossible"
