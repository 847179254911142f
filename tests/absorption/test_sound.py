"""Soundness: no wrong "possible" in any dtype, also for unusual weights.

The rule: weights that two dtypes hold exactly never give "possible" in one and "impossible" in the other. A
replacement in float64 matches the block to 1e-10 of the block's own terms. The error of one that is stored in a coarser
dtype is at most 4 times the loss of the block itself in that dtype, for inputs of any size. That loss is measured, and
is at least one rounding of the output and of each term that it sums.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.absorption.blocks import errors, generic, normal, numbers, planted
from torch import Tensor

from unskip.absorption import Block, absorb

HALF = (torch.bfloat16, torch.float16)
SIZES = (1e-6, 1e-3, 1e-2, 1.0, 1e2, 1e3, 1e4, 1e5)


def terms(block: Block, x: Tensor) -> Tensor:
    """(rows,) the sum of the sizes of all terms of a plain block, in float64."""
    up, down = block.up.double().abs(), block.down.double().abs()
    hidden = x.abs() @ up.mT + (0 if block.up_bias is None else block.up_bias.double().abs()) + 1
    const = 0 if block.down_bias is None else block.down_bias.double().abs()
    return (x.abs() @ block.matrix.abs().mT + hidden @ down.mT + const).norm(dim=1)


def check_rule(block: Block) -> tuple[str, str]:
    """Asserts the rule for a plain block without norms. Returns the statuses as stored and in float64."""
    stored, wide = absorb(block), absorb(block.double())
    assert {stored.status, wide.status} != {"possible", "impossible"}, (stored, wide)
    g = numbers(99)
    for size in SIZES:
        x = size * normal(g, 64, block.inputs)
        if wide.status == "possible":
            gap = (wide.replacement()(x) - block.double()(x)).norm(dim=1)
            assert bool((gap <= 1e-10 * terms(block, x)).all())
        if stored.status == "possible":
            found = errors(block, stored.replacement(), x)
            assert found is None or found[0] <= 4 * found[1]
    for verdict in (stored, wide):
        assert verdict.verify()
    return stored.status, wide.status


# --- The rule ---------------------------------------------------------------------------------------------------------


def degenerate(seed: int, word: str, dtype: torch.dtype, apart: float) -> Block:
    """Random weights with units that are equal, mirrored, dead, or `apart` from equal."""
    g = numbers(seed)
    d, h = 2 + seed % 4, 6 + seed % 11
    up, down, bias = normal(g, h, d), normal(g, d, h), normal(g, h) * (seed % 3)
    for i in range(0, h - 1, 3):
        turn = 1.0 if i % 2 else -1.0
        up[i + 1], bias[i + 1] = turn * up[i] * (1 + apart * normal(g, d)), turn * bias[i]
    down[:, -1] *= 0 if seed % 2 else 1
    const = torch.zeros(d).to(dtype)
    return Block(up.to(dtype), down.to(dtype), up_bias=bias.to(dtype), down_bias=const, activation=word)


DEGENERATE = st.builds(
    degenerate,
    seed=st.integers(0, 10**6),
    word=st.sampled_from(["relu", "gelu", "leaky_relu:0.5", "silu", "identity"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    apart=st.sampled_from([0.0, 0.01, 0.1]),
)


@settings(max_examples=30)
@given(DEGENERATE)
def test_degenerate_blocks_keep_the_rule(block: Block) -> None:
    check_rule(block)


@pytest.mark.full
@settings(max_examples=500)
@given(DEGENERATE)
def test_many_degenerate_blocks_keep_the_rule(block: Block) -> None:
    check_rule(block)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("word", ["relu", "gelu"])
def test_planted_blocks_keep_the_rule(dtype: torch.dtype, word: str) -> None:
    """A flip set that is rounded is possible in the rounded dtype, and not impossible in float64."""
    for seed in range(2):
        block, _ = planted(12, 48, word, seed=seed, dtype=dtype)
        assert check_rule(block) == ("possible", "undecided")


@pytest.mark.parametrize("seed", range(12))
def test_random_bfloat16_blocks_are_not_possible(seed: int) -> None:
    g = numbers(seed)
    block = Block(normal(g, 12, 2).bfloat16(), normal(g, 2, 12).bfloat16(), activation="relu")
    assert check_rule(block)[0] != "possible"


def test_rows_in_a_chain_are_not_one_row() -> None:
    """17 rows, each within 11 % of the next one: a chain of small steps must not merge them."""
    t = 0.11 * torch.arange(-8, 9)
    t = t[t.abs().argsort()]
    up = torch.stack([torch.ones(17), t], 1).bfloat16()
    down = torch.tensor([[0.5], [0.25]]).expand(2, 17).bfloat16()
    assert check_rule(Block(up, down, activation="gelu"))[0] != "possible"


def test_a_large_bias_does_not_make_rows_equal() -> None:
    up = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]], dtype=torch.bfloat16)
    bias = torch.full((4,), 1e4, dtype=torch.bfloat16)
    block = Block(up, torch.ones(2, 4).bfloat16(), up_bias=bias, down_bias=torch.zeros(2).bfloat16(), activation="gelu")
    assert check_rule(block)[0] != "possible"


def test_copies_ten_percent_apart_at_the_size_of_a_model() -> None:
    g = numbers(0)
    up, down = normal(g, 512, 128) / 11, normal(g, 128, 512) / 22
    up[256:] = up[:256] * (1 + 0.1 * normal(g, 256, 128))
    assert absorb(Block(up.bfloat16(), down.bfloat16(), activation="gelu")).status != "possible"


def test_weights_of_the_replacement_do_not_excuse_its_error() -> None:
    """The rows barely span the input, so splits need columns of 1e7, for which float32 is too coarse."""
    g = numbers(1)
    d, h = 4, 12
    line = normal(g, 1, d)
    up = line + 1e-7 * normal(g, h, d)
    down = normal(g, d, h)
    down[:, d:] = 0
    check_rule(Block(up.float(), down.float(), activation="gelu"))


def test_fresh_pairs_come_before_a_bad_split() -> None:
    """The rows are ill-conditioned, but there are enough spare units for fresh pairs, which are exact in the dtype."""
    g = numbers(2)
    up = normal(g, 1, 3) + 1e-5 * normal(g, 12, 3)
    down = normal(g, 3, 12)
    down[:, 6:] = 0
    block = Block(up.float(), down.float(), activation="relu")
    assert check_rule(block) == ("possible", "possible")


def test_large_biases_that_cancel_keep_the_rule_near_the_origin() -> None:
    """On inputs of 1e-6 the error of the first replacement found is 48 times the loss of the block."""
    up, down = torch.tensor([[-4.0], [-4.0625], [-4.0]]).half(), torch.tensor([[-1.0, -2.0, 0.0]]).half()
    biases = {"up_bias": torch.tensor([-1.0, 63.0, -1.015625]).half(), "down_bias": torch.tensor([125.0]).half()}
    check_rule(Block(up, down, **biases, activation="hardswish", skip=-12.125))


CANCEL = [
    Block(
        torch.tensor([[0.0], [-1.0], [1.0], [0.0], [0.0], [1.0]]),
        torch.tensor([[0.0, -1.0, 1.0, -2.0, -2.0, 0.0]]),
        up_bias=torch.tensor([-2.0, -2.0, -1.0, 2.0, -2.0, -1.0]),
        down_bias=torch.zeros(1),
        activation="leaky_relu:0.5",
        skip=-1.5,
    ),
    Block(
        torch.tensor([[-2.0], [1.0]]),
        torch.tensor([[1.0, -2.0]]),
        up_bias=torch.zeros(2),
        down_bias=torch.zeros(1),
        activation="quick_gelu",
        skip=2.0,
    ),
]


@pytest.mark.parametrize(("block", "width"), list(zip(CANCEL, (9, 3), strict=True)), ids=["leaky_relu", "quick_gelu"])
def test_blocks_that_are_exact_by_chance_keep_the_rule_on_every_draw(block: Block, width: int) -> None:
    """Far from the origin their terms cancel, and on 48 inputs they often have no error at all."""
    other = absorb(block, width).replacement()
    g = numbers(0)
    for size in (*SIZES, 1e3):
        for _ in range(100):
            found = errors(block, other, size * normal(g, 48, 1))
            assert found is not None
            assert found[0] <= 2 * found[1]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("width", [16, 128, 1024])
def test_one_rounding_of_each_term_is_what_a_block_loses_at_any_width(width: int, dtype: torch.dtype) -> None:
    """The lower bound on the loss is below twice the measured loss, at every width."""
    block, d = generic(width // 4, width, "relu", dtype=dtype), width // 4
    x = normal(numbers(1), 64, d).to(dtype)
    lost = float((block(x).double() - block.double()(x.double())).norm())
    found = errors(block, block, x)
    assert found is not None
    assert lost <= found[1] <= 2 * lost


@pytest.mark.parametrize("domain", [None, 3.0])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_skip_of_one_channel_is_not_lost_beside_larger_ones(axis: int, domain: float | None) -> None:
    """Units reproduce the skip except for one output or input, which is within the rounding of the others."""
    d, h = 7, 12
    size = torch.full((d,), 40.0).double()
    size[0] = 1.0
    for seed in range(6):
        g = numbers(seed)
        turn = torch.linalg.qr(normal(g, d, d))[0]
        skip = size[:, None] * turn if axis == 0 else turn * size
        wanted = skip.clone()
        wanted.select(axis, 0).zero_()
        up, down = normal(g, h, d) / d**0.5, 60 * normal(g, d, h)
        down[0] *= axis
        inverse = torch.linalg.pinv(up)
        down = down @ (torch.eye(h).double() - up @ inverse) - wanted @ inverse
        zeros = torch.zeros(h).bfloat16()
        biases = {"up_bias": zeros, "down_bias": zeros[:d]}
        block = Block(up.bfloat16(), down.bfloat16(), **biases, activation="relu", skip=skip)
        assert absorb(block, domain=domain).status != "possible"


def test_a_replacement_does_not_overflow_long_before_its_block() -> None:
    """Squares overflow float16 beyond 255: those of the block at inputs of 12,750, those of a fresh pair at 510."""
    up, down = torch.tensor([[0.01], [0.02], [0.0], [0.0]]).half(), torch.tensor([[1.0, 0.5, 0.0, 0.0]]).half()
    biases = {"up_bias": torch.zeros(4).half(), "down_bias": torch.zeros(1).half()}
    block = Block(up, down, **biases, activation="squareplus", skip=0.25)
    assert absorb(block).status == "undecided"
    assert absorb(block.double()).status == "possible"
