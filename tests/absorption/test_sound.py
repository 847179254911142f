"""Soundness: no wrong "possible" in any dtype, and an answer or a refusal for odd weights.

The rule: weights that two dtypes hold exactly never give "possible" in one and "impossible" in the other. A
replacement of float64 weights matches the block to 1e-10 of the block's own terms; one that is stored in a coarser
dtype errs at most 4 times what the block itself loses by computing in that dtype, whatever the size of the input. That
loss is measured, and counted as at least one rounding of the output and of each term that it sums.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.absorption.blocks import CLASS_O, generic, normal, numbers, planted
from torch import Tensor

import unskip
from unskip.absorption import Block, Norm, absorb
from unskip.errors import BadInput

HALF = (torch.bfloat16, torch.float16)
SIZES = (1e-6, 1e-2, 1.0, 1e2, 1e5)


def terms(block: Block, x: Tensor) -> Tensor:
    """(rows,) the sizes of all that a plain block adds up, in float64."""
    up, down = block.up.double().abs(), block.down.double().abs()
    hidden = x.abs() @ up.mT + (0 if block.up_bias is None else block.up_bias.double().abs()) + 1
    const = 0 if block.down_bias is None else block.down_bias.double().abs()
    return (x.abs() @ block.matrix.abs().mT + hidden @ down.mT + const).norm(dim=1)


def errors(block: Block, other: Block, x: Tensor) -> tuple[float, float] | None:
    """What a replacement errs by as stored and what the block loses, or None where the block overflows."""
    low = x.to(block.dtype)
    wide, exact = block.double(), low.double()
    truth, here = wide(exact), block(low).double()
    if not bool(torch.isfinite(here).all()):
        return None
    squares = wide.hidden(exact).square() @ wide.down.square().sum(0) + exact.square() @ block.matrix.square().sum(0)
    total = float(squares.sum()) + (0.0 if wide.down_bias is None else len(x) * float(wide.down_bias.square().sum()))
    once = block.roundoff * ((total + float(truth.square().sum())) / 3) ** 0.5
    return float((other(low).double() - truth).norm()), max(float((here - truth).norm()), once)


def check_rule(block: Block) -> tuple[str, str]:
    """Asserts the rule for a plain block without norms; the statuses as stored and in float64."""
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
    """Rounded after planting: possible within the rounding of the dtype, and then not impossible in float64."""
    for seed in range(2):
        block, _ = planted(12, 48, word, seed=seed, dtype=dtype)
        assert check_rule(block) == ("possible", "undecided")


@pytest.mark.parametrize("seed", range(12))
def test_random_bfloat16_blocks_are_not_possible(seed: int) -> None:
    g = numbers(seed)
    block = Block(normal(g, 12, 2).bfloat16(), normal(g, 2, 12).bfloat16(), activation="relu")
    assert check_rule(block)[0] != "possible"


def test_rows_in_a_chain_are_not_one_row() -> None:
    """17 rows, each within 11 % of the next: a chain of small steps makes no two of them equal."""
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
    """Rows that hardly span the input: splitting them needs columns of 1e7, which float32 cannot carry."""
    g = numbers(1)
    d, h = 4, 12
    line = normal(g, 1, d)
    up = line + 1e-7 * normal(g, h, d)
    down = normal(g, d, h)
    down[:, d:] = 0
    check_rule(Block(up.float(), down.float(), activation="gelu"))


def test_fresh_pairs_come_before_a_bad_split() -> None:
    """Ill-conditioned rows and spare units enough for pairs of new ones: the replacement is as good as the dtype."""
    g = numbers(2)
    up = normal(g, 1, 3) + 1e-5 * normal(g, 12, 3)
    down = normal(g, 3, 12)
    down[:, 6:] = 0
    block = Block(up.float(), down.float(), activation="relu")
    assert check_rule(block) == ("possible", "possible")


def test_large_biases_that_cancel_keep_the_rule_near_the_origin() -> None:
    """At 1e-6 the outputs of the first replacement that was found are off by 48 times what the block loses."""
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
    """Far from the origin their terms cancel, and on 48 inputs they often lose nothing at all."""
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
    """What its loss is counted as, at least, is below twice what is measured, and does not grow with the width."""
    block, d = generic(width // 4, width, "relu", dtype=dtype), width // 4
    x = normal(numbers(1), 64, d).to(dtype)
    lost = float((block(x).double() - block.double()(x.double())).norm())
    found = errors(block, block, x)
    assert found is not None
    assert lost <= found[1] <= 2 * lost


@pytest.mark.parametrize("domain", [None, 3.0])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_skip_of_one_channel_is_not_lost_beside_larger_ones(axis: int, domain: float | None) -> None:
    """Units make up all of the skip but what one output, or one input, has of it: within the rounding of the rest."""
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
    """Squares overflow float16 beyond 255: the block's at inputs of 12,750, those of a new pair of units at 510."""
    up, down = torch.tensor([[0.01], [0.02], [0.0], [0.0]]).half(), torch.tensor([[1.0, 0.5, 0.0, 0.0]]).half()
    biases = {"up_bias": torch.zeros(4).half(), "down_bias": torch.zeros(1).half()}
    block = Block(up, down, **biases, activation="squareplus", skip=0.25)
    assert absorb(block).status == "undecided"
    assert absorb(block.double()).status == "possible"


# --- Answers, not crashes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [*CLASS_O, "tanh", "elu", "mish", "relu2", "identity"])
@pytest.mark.parametrize("norm", [None, Norm("layernorm", "post")])
def test_rows_of_zeros_with_a_bias(word: str, norm: Norm | None) -> None:
    block = Block(
        torch.zeros(6, 3).double(), normal(numbers(0), 3, 6), up_bias=normal(numbers(1), 6), activation=word, norm=norm
    )
    for biases in ("as-is", "allowed", "none"):
        assert absorb(block, biases=biases).verify()  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_weights_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(BadInput, match=r"float8.*bfloat16"):
        Block(torch.ones(4, 2).to(dtype), torch.ones(2, 4).to(dtype), activation="relu")


def test_too_few_inputs_are_refused() -> None:
    block = generic(6, 24)
    for count in (1, 7, 40):
        with pytest.raises(BadInput, match=str(count)):
            unskip.absorption.approximate(block, normal(numbers(0), count, 6))
    with pytest.raises(BadInput, match="the same"):
        unskip.absorption.approximate(block, torch.ones(500, 6))


def test_a_replacement_that_only_float64_holds_is_named() -> None:
    """d spare units are enough, but split rows carry their biases along, which costs digits in float32."""
    g = numbers(0)
    up, down = 0.3 * normal(g, 24, 8), 0.2 * normal(g, 8, 24)
    down[:, :8] = 0
    biases = {"up_bias": torch.full((24,), 0.1), "down_bias": torch.zeros(8)}
    block = Block(up.float(), down.float(), **biases, activation="gelu")
    verdict = absorb(block)
    assert verdict.status == "undecided"
    assert "stored in float32" in verdict.reason
    assert absorb(block.double()).status == "possible"
    block = replace(block, down=torch.cat([torch.zeros(8, 16), block.down[:, 16:]], 1))  # 2 d spare units
    assert absorb(block).status == "possible"


def test_what_cannot_be_measured_is_not_possible() -> None:
    """The block overflows float16 at every size of input, so nothing says that a replacement is as good."""
    g = numbers(0)
    up, down, bias = ((2e4 * normal(g, *shape)).half() for shape in ((6, 3), (3, 6), (6,)))
    block = Block(up, down, up_bias=bias, down_bias=torch.zeros(3).half(), activation="relu", skip=1e4)
    assert absorb(block, width=12).status == "undecided"
    assert absorb(block.double(), width=12).status == "possible"
    with pytest.raises(BadInput, match="float16"):
        unskip.absorption.widen(block)


@pytest.mark.parametrize(("radius", "status"), [(1e2, "possible"), (1e7, "undecided")])
def test_a_wide_domain_is_measured_near_its_center_too(radius: float, status: str) -> None:
    """A unit that is affine on a wide domain has a large bias, which costs digits where the inputs are small."""
    g = numbers(0)
    up, down = normal(g, 8, 3), normal(g, 3, 8)
    up[5:] = 0
    zeros = torch.zeros(11).double()
    block = Block(up, down, up_bias=zeros[:8], down_bias=zeros[:3], activation="relu")
    verdict = absorb(block, domain=radius)
    assert verdict.status == status
    if verdict.status == "possible":
        x = 0.01 * normal(g, 200, 3)
        terms = x.abs().sum(1) + (x.abs() @ up.abs().mT @ down.abs().mT).norm(dim=1)
        assert bool(((block(x) - verdict.replacement()(x)).norm(dim=1) <= 1e-10 * terms).all())


def test_a_possible_is_checked_before_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    from unskip.absorption import _decide

    monkeypatch.setattr(_decide, "verify", lambda verdict: False)
    block, _ = planted()
    assert absorb(block).status == "undecided"
    assert absorb(replace(block, skip=0.0)).status == "undecided"


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("stored", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64)])
def test_weights_of_two_dtypes_are_asked_like_the_same_numbers_in_one(
    stored: tuple[torch.dtype, torch.dtype], seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    up, down = torch.randn(9, 3, generator=draw).double(), torch.randn(3, 9, generator=draw).double()
    down[:, :3] = -torch.linalg.inv(up[:3])
    mixed = Block(up.to(stored[0]), down.to(stored[1]))
    assert {unskip.absorb(each).status for each in (mixed, mixed.double())} != {"possible", "impossible"}


@pytest.mark.parametrize(
    ("seed", "size", "share", "dtype"),
    [(24, 3, 1 / 32, torch.bfloat16), (0, 20, 1 / 64, torch.float16), (0, 3000, 2e-4, torch.float32)],
)
def test_an_oblique_direction_of_the_skip_is_not_dropped(
    seed: int, size: float, share: float, dtype: torch.dtype
) -> None:
    """No unit sees (1, -1, 0), along which the skip is small, so no block of these units has it."""
    draw = torch.Generator().manual_seed(seed)
    rows, other = normal(draw, 3, 2), normal(draw, 2, 3)
    inverse = torch.linalg.pinv(rows)
    columns = -inverse + size * (other - other @ rows @ inverse)
    up = rows @ torch.tensor([[0.5, 0.5, 0], [0, 0, 1]], dtype=torch.float64)
    down = torch.tensor([[1, 0], [1, 0], [0, 1.0]], dtype=torch.float64) @ columns
    skip = torch.tensor([[1 + share, 1 - share, 0], [1 - share, 1 + share, 0], [0, 0, 2]], dtype=torch.float64) / 2
    bias = torch.randn(3, generator=draw).to(dtype)
    block = Block(up.to(dtype), down.to(dtype), up_bias=bias, down_bias=torch.zeros(3).to(dtype), skip=skip.to(dtype))
    assert absorb(block).status != "possible"


@pytest.mark.parametrize("seed", range(5))
def test_large_units_of_other_channels_do_not_pay_for_an_error(seed: int) -> None:
    """Units that cancel are large in three channels; in the fourth a part of 1e-4 of the skip is missing."""
    draw = torch.Generator().manual_seed(seed)
    rows, other = normal(draw, 5, 3), normal(draw, 3, 5)
    inverse = torch.linalg.pinv(rows)
    columns = -inverse + 1000 * (other - other @ rows @ inverse)
    up, down = torch.zeros(8, 4, dtype=torch.float64), torch.zeros(4, 8, dtype=torch.float64)
    up[:5, :3], down[:3, :5], up[5, 3], down[3, 5] = rows, columns, 1, -(1 - 1e-4)
    up[6:], down[:, 6:] = normal(draw, 2, 4), normal(draw, 4, 2)
    biases = {"up_bias": normal(draw, 8).float(), "down_bias": torch.zeros(4)}
    assert absorb(Block(up.float(), down.float(), **biases, activation="gelu")).status != "possible"
