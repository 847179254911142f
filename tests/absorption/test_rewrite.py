"""Wider, nearby and approximate replacements, and the module that can always absorb its skip."""

from __future__ import annotations

import pytest
import torch
from tests.absorption.blocks import CLASS_O, close, generic, normal, numbers, planted

from unskip.absorption import (
    AbsorbableMLP,
    Activation,
    Block,
    Norm,
    absorb,
    approximate,
    nearest,
    register,
    widen,
)
from unskip.errors import BadInput


@pytest.mark.parametrize("word", CLASS_O)
def test_d_more_units_are_enough(word: str) -> None:
    block = generic(3, 6, word)
    wide = widen(block)
    assert wide.extra == 3
    assert wide.block.width == 9
    assert close(block, wide.block) < 1e-12
    assert wide.verdict.verify()
    assert wide.error < 1e-12
    assert absorb(block, width=8).status != "possible"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widening_keeps_the_dtype_and_the_rule(dtype: torch.dtype) -> None:
    """The error of a stored block is at most 4 times the loss of the original, as for all replacements, or 1e-6."""
    block = generic(24, 96, dtype=dtype)
    wide = widen(block)
    assert 24 <= wide.extra <= 48
    assert wide.error <= max(4 * wide.own, 1e-5)
    assert wide.verdict.verify()
    assert wide.block.up.dtype == dtype
    assert wide.block.up_bias is not None
    assert wide.block.up_bias.dtype == dtype
    assert close(block, wide.block) < (1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize(("d", "o", "rank", "h"), [(4, 4, 1, 10), (5, 3, 3, 8), (3, 5, 3, 7), (4, 4, 4, 2)])
def test_the_least_width_for_other_skips(d: int, o: int, rank: int, h: int) -> None:
    g = numbers(1)
    block = Block(normal(g, h, d), normal(g, o, h), activation="gelu", skip=normal(g, o, rank) @ normal(g, rank, d))
    wide = widen(block)
    assert wide.extra == min(2 * rank, 2 * d - min(h, d))
    assert close(block, wide.block) < 1e-10


def test_widening_what_is_possible_changes_nothing() -> None:
    block, _ = planted()
    assert widen(block).extra == 0


@pytest.mark.parametrize("word", ["swiglu", "reglu", "glu", "bilinear"])
def test_gated_blocks_widen_with_a_gate_bias(word: str) -> None:
    g = numbers(2)
    block = Block(normal(g, 8, 3), normal(g, 3, 8), normal(g, 8, 3), activation=word)
    wide = widen(block, biases="allowed")
    assert wide.extra == 3
    assert close(block, wide.block) < 1e-12
    if word == "glu":  # sigmoid is not 0 at 0, so its gate needs no bias
        assert widen(block).block.gate_bias is None
        assert close(block, widen(block).block) < 1e-12
    else:
        with pytest.raises(BadInput, match="biases='allowed'"):
            widen(block)


def test_the_extra_width_knows_the_rank_of_the_rows() -> None:
    """An MLP on the sum of two streams: its rows span 3 of 6 directions, and the others need a fresh pair each."""
    g = numbers(6)
    inner, outer = normal(g, 8, 3), normal(g, 3, 8)
    block = Block(torch.cat([inner, inner], 1), torch.cat([outer, outer]))
    wide = widen(block)
    assert absorb(block).extra_width == wide.extra == 9
    assert wide.verdict.verify()


def test_the_extra_width_without_an_output_bias() -> None:
    g = numbers(7)
    up, down = normal(g, 8, 3), normal(g, 3, 8)
    block = Block(up, down, up_bias=normal(g, 8))
    wide = widen(block)
    assert absorb(block).extra_width == wide.extra == 6
    assert wide.verdict.verify()
    # A constant that needs a bias, which is not allowed.
    shifted = Block(up, down, down_bias=normal(g, 3))
    assert absorb(shifted, biases="none").extra_width is None
    with pytest.raises(BadInput, match="No width is known"):
        widen(shifted, biases="none")


def test_a_gate_widens_with_a_bias_of_its_own_only() -> None:
    """A bias of `up` is no bias of the gate: with biases="as-is" no constant gate can be added."""
    g = numbers(3)
    block = Block(normal(g, 8, 3), normal(g, 3, 8), normal(g, 8, 3), up_bias=normal(g, 8), activation="swiglu")
    assert absorb(block).extra_width is None
    with pytest.raises(BadInput, match="With gate biases it is possible"):
        widen(block)
    wide = widen(block, biases="allowed")
    assert wide.extra == absorb(block, biases="allowed").extra_width == 3
    assert wide.verdict.verify()


@pytest.mark.parametrize("word", ["swiglu", "bilinear", "glu"])
def test_the_extra_width_of_a_gate_is_what_widening_takes(word: str) -> None:
    g = numbers(4)
    weights = normal(g, 8, 3), normal(g, 3, 8), normal(g, 8, 3), normal(g, 8), normal(g, 8)
    block = Block(*weights, activation=word)
    wide = widen(block)
    assert absorb(block).extra_width == wide.extra == 3
    assert wide.verdict.verify()


def test_a_gate_that_the_user_registered() -> None:
    """Whether g(0) = 0 is computed, because a registered activation may leave at_zero out."""
    word = register(Activation("halved", lambda z: torch.nn.functional.silu(z) / 2)).name
    g = numbers(5)
    block = Block(normal(g, 8, 3), normal(g, 3, 8), normal(g, 8, 3), gate_bias=normal(g, 8), activation=word)
    wide = widen(block)
    assert close(block, wide.block) < 1e-12
    with pytest.raises(BadInput, match="biases='allowed'"):
        widen(Block(block.up, block.down, block.gate, activation=word))


@pytest.mark.parametrize("word", ["tanh", "elu", "mish", "abs", "relu2"])
def test_what_no_width_can_do(word: str) -> None:
    with pytest.raises(BadInput, match="approximate"):
        widen(generic(word=word))
    with pytest.raises(BadInput, match="norm"):
        widen(generic(norm=Norm("layernorm", "pre")))


def test_the_nearest_absorbable_block() -> None:
    block = generic(6, 24, "gelu")
    found = nearest(block)
    assert found.verdict.status == "possible"
    assert found.verdict.verify()
    product = found.block.down[:, found.flips] @ found.block.up[found.flips]
    assert torch.allclose(product, -torch.eye(6, dtype=torch.float64), atol=1e-10)
    moved = (found.block.up - block.up).square().sum() + (found.block.down - block.down).square().sum()
    total = block.up.square().sum() + block.down.square().sum()
    assert found.change == pytest.approx(float((moved / total).sqrt()), rel=1e-9)
    assert 0 < found.change < 1


def test_a_block_that_is_absorbable_is_its_own_nearest() -> None:
    up = torch.cat([torch.eye(4), torch.eye(4)]).double()
    up[4:] += 0.5 * normal(numbers(0), 4, 4)
    block = Block(up, -torch.linalg.pinv(up), activation="relu")
    assert nearest(block).change < 1e-12


def test_no_flips_no_nearest() -> None:
    with pytest.raises(BadInput, match="such as relu or gelu"):
        nearest(generic(word="tanh"))
    with pytest.raises(BadInput, match="fewer than the rank"):
        nearest(generic(6, 3, "relu"))
    alike = Block(torch.ones(8, 3).double(), normal(numbers(0), 3, 8))
    assert nearest(alike).verdict.status == "possible"


def test_the_ladder_falls() -> None:
    g = numbers(3)
    block = generic(6, 48, "gelu")
    found = approximate(block, normal(g, 2000, 6))
    assert found.held_out == 1000
    distilled = approximate(block, normal(numbers(3), 2000, 6), distil=100)
    assert distilled.error < found.error
    assert list(found.ladder) == ["drop", "refit", "flip", "split"]
    assert found.ladder["drop"] > found.ladder["refit"] > found.error
    assert found.step == "split"
    assert found.block.width == 48
    assert found.block.skip == 0
    # The reported error agrees with the error on new inputs.
    fresh = normal(g, 500, 6)
    truth = block(fresh)
    measured = float((found.block(fresh) - truth).norm() / (truth - truth.mean(0)).norm())
    assert measured == pytest.approx(found.error, rel=0.5)


def test_a_possible_block_is_fitted_exactly() -> None:
    """If the skip is a linear combination of hidden units, least squares finds it."""
    up = torch.cat([torch.eye(4), -torch.eye(4), normal(numbers(0), 8, 4)]).double()
    block = Block(up, normal(numbers(1), 4, 16), activation="relu")
    assert approximate(block, normal(numbers(2), 1000, 4)).error < 1e-5


def test_approximation_behind_a_norm_and_with_gates() -> None:
    g = numbers(4)
    plain = generic(6, 48, "gelu", norm=Norm("layernorm", "pre"))
    inputs = normal(g, 2000, 6)
    found = approximate(plain, inputs)
    assert found.error < found.ladder["drop"]
    gated = Block(normal(g, 24, 6), normal(g, 6, 24), normal(g, 24, 6), activation="swiglu")
    assert set(approximate(gated, inputs).ladder) == {"drop", "refit"}
    held = {"up_bias": normal(g, 24), "gate_bias": normal(g, 24)}
    biased = Block(gated.up, gated.down, gated.gate, activation="swiglu", **held)  # type: ignore[arg-type]
    opened = approximate(biased, inputs)
    assert set(opened.ladder) == {"drop", "refit", "open"}
    assert opened.error == pytest.approx(min(opened.ladder.values()), rel=1e-6)
    with pytest.raises(BadInput, match=r"bare\(\)"):
        approximate(generic(norm=Norm("layernorm", "post")), normal(g, 100, 8))


@pytest.mark.parametrize("word", ["relu", "gelu", "silu"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_module_trains_and_is_absorbed(word: str, bias: bool) -> None:
    module = AbsorbableMLP(5, 20, word, bias=bias)
    x = torch.randn(30, 5, generator=numbers(0))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    before = float((module(x) - x.roll(1, 1)).square().mean().detach())
    for _ in range(20):
        optimizer.zero_grad()
        loss = (module(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < before
    plain = module.absorbed()
    assert plain[0].weight.shape == (20, 5)
    assert torch.allclose(plain(x), module(x), atol=1e-5)
    wide = module.double().absorbed()
    assert torch.allclose(wide(x.double()), module(x.double()), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_module_with_pairs_is_absorbed_in_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, x = AbsorbableMLP(64, 256, pairs=True).to(dtype), torch.randn(300, 64, generator=numbers(0)).to(dtype)
    assert module.up.weight.shape == (128, 64)
    with torch.no_grad():
        plain = module.absorbed()
        assert plain[0].weight.shape == (256, 64)
        stored, own = plain(x).double(), module(x).double()
        truth = module.double()(x.double())
    assert float((stored - truth).norm()) < 4 * float((own - truth).norm())
    with pytest.raises(BadInput, match="pairs=True"):
        AbsorbableMLP(64, 256).to(dtype).absorbed()


def test_modules_that_cannot_be() -> None:
    with pytest.raises(BadInput, match="linear odd part"):
        AbsorbableMLP(4, 16, "tanh")
    with pytest.raises(BadInput, match="at least 2"):
        AbsorbableMLP(4, 7)
    with pytest.raises(BadInput, match="at least 3"):
        AbsorbableMLP(4, 11, pairs=True)
    assert absorb(AbsorbableMLP(4, 16).block()).status == "impossible"


def test_the_weights_that_are_asked_about_stay_as_they_are() -> None:
    for norm in (None, Norm("layernorm", "post"), Norm("rmsnorm", "pre")):
        block = generic(4, 12, "relu", norm=norm)
        before = [value.clone() for value in (block.up, block.down, block.up_bias, block.down_bias)]  # type: ignore[union-attr]
        absorb(block).verify()
        absorb(block, width=20)
        if norm is None:
            nearest(block)
            widen(block)
            approximate(block, normal(numbers(0), 100, 4), distil=2)
        after = (block.up, block.down, block.up_bias, block.down_bias)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))  # type: ignore[arg-type]
