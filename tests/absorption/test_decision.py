"""The flip criterion: planted flip sets are found, and generic blocks are impossible, with a certificate."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.absorption.blocks import CLASS_O, close, generic, normal, numbers, planted

import unskip
from unskip.absorption import Block, absorb

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def eye(d: int) -> torch.Tensor:
    return torch.eye(d, dtype=torch.float64)


@pytest.mark.parametrize("word", [*CLASS_O, "leaky_relu:0.3", "leaky_relu:-3", "silu:2.5", "softplus:0.7", "silu:-1"])
def test_planted_skips_are_found(word: str) -> None:
    block, chosen = planted(word=word, seed=len(word))
    verdict = absorb(block)
    assert verdict.status == "possible"
    assert verdict.flips is not None
    assert torch.equal(verdict.flips, chosen)
    assert verdict.error is not None
    assert verdict.error < 1e-11
    assert close(block, verdict.replacement()) < 1e-11
    assert verdict.replacement().skip == 0
    assert verdict.verify()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_planted_skips_survive_rounding(dtype: torch.dtype, seed: int) -> None:
    block, chosen = planted(16, 64, dtype=dtype, seed=seed)
    verdict = absorb(block)
    assert verdict.status == "possible"
    assert verdict.flips is not None
    assert torch.equal(verdict.flips, chosen)
    assert close(block, verdict.replacement()) < DTYPES[dtype]
    assert verdict.replacement().up.dtype == dtype
    assert verdict.verify()


SKIPS = {
    "scaled": lambda g: 0.37 * eye(6),
    "negative": lambda g: -2.0 * eye(6),
    "invertible": lambda g: normal(g, 6, 6),
    "singular": lambda g: normal(g, 6, 5) @ normal(g, 5, 6),
    "wide": lambda g: normal(g, 4, 6),
    "tall": lambda g: normal(g, 8, 6),
}


@pytest.mark.parametrize("name", SKIPS)
@pytest.mark.parametrize("word", ["relu", "gelu", "leaky_relu:-3"])
def test_every_skip(name: str, word: str) -> None:
    skip = SKIPS[name](numbers(3))
    block, chosen = planted(h=24, word=word, skip=skip, seed=1)
    verdict = absorb(block)
    assert verdict.status == "possible"
    assert verdict.flips is not None
    assert torch.equal(verdict.flips, chosen)
    assert close(block, verdict.replacement()) < 1e-10
    other = generic(6, 24, word)
    refused = absorb(Block(other.up, normal(numbers(1), len(skip), 24), activation=word, skip=skip))
    assert refused.status == "impossible"
    assert refused.verify()


def test_all_units_flip_and_none() -> None:
    verdict = absorb(Block(eye(5), -eye(5), activation="relu"))
    assert verdict.flips is not None
    assert verdict.flips.tolist() == [0, 1, 2, 3, 4]
    block = generic(skip=0.0)
    verdict = absorb(block)
    assert (verdict.status, verdict.error) == ("possible", 0.0)
    assert close(block, verdict.replacement()) == 0
    assert absorb(verdict.replacement()).status == "possible"  # absorbing again changes nothing
    assert absorb(block, width=40).replacement().width == 40


@pytest.mark.parametrize("word", CLASS_O)
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_generic_blocks_are_refused(word: str, scale: float) -> None:
    block = generic(word=word, seed=3)
    block = Block(
        scale * block.up, scale * block.down, up_bias=block.up_bias, down_bias=block.down_bias, activation=word
    )
    verdict = absorb(block)
    assert verdict.status == "impossible"
    assert verdict.certificate is not None
    assert verdict.certificate.kind == "dual"
    assert verdict.verify()
    assert verdict.extra_width == 8
    assert verdict.flip_bound is not None
    assert verdict.flip_bound > 0


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("heavy", [False, True])
def test_the_bound_recomputed_here(scale: float, heavy: bool) -> None:
    """The certificate's inequality, written out: LB(Y) is positive and below the true minimum."""
    g = numbers(4)
    up, down = scale * normal(g, 10, 3), scale * normal(g, 3, 10)
    if heavy:
        up[0] *= 20
        down[1] *= 20
    verdict = absorb(Block(up, down, activation="gelu"))
    assert verdict.status == "impossible"
    assert verdict.certificate is not None
    sets = torch.tensor(list(itertools.product((0.0, 1.0), repeat=10)), dtype=torch.float64)
    left = torch.eye(3, dtype=torch.float64) + torch.einsum("sk,ik,kj->sij", sets, down, up)
    truth = float(left.flatten(1).norm(dim=1).min())
    assert verdict.flip_bound is not None
    assert 0 < verdict.flip_bound <= truth * (1 + 1e-9)
    if verdict.certificate.kind == "dual":
        data = verdict.certificate.data
        y = torch.zeros(3, 3, dtype=torch.float64)
        y[data["rows"][:, None], data["columns"]] = data["matrix"]
        weights = torch.einsum("ik,ij,kj->k", down, y, up)
        inner = -float(y.trace())
        bound = max(inner - float(weights.clamp(min=0).sum()), float(weights.clamp(max=0).sum()) - inner)
        assert bound / float(y.norm()) == pytest.approx(data["bound"], rel=1e-6)


def test_a_certificate_that_is_tampered_with_fails() -> None:
    from dataclasses import replace

    from unskip.absorption import Certificate

    verdict = absorb(generic())
    assert verdict.certificate is not None
    data = dict(verdict.certificate.data)
    data["matrix"] = torch.randn(8, 8, generator=numbers(0)).double()
    wrong = Certificate("dual", data)
    assert not replace(verdict, certificate=wrong).verify()
    block, _ = planted()
    possible = absorb(block)
    assert not replace(possible, status="impossible", certificate=verdict.certificate, obstructions=()).verify()
    assert not replace(verdict, status="possible", weights=possible.weights).verify()


@pytest.mark.parametrize(("shift", "status"), [(1e-3, "impossible"), (1e-6, "impossible"), (1e-9, "impossible")])
def test_near_misses_are_refused(shift: float, status: str) -> None:
    block, _ = planted(seed=2)
    down = block.down.clone()
    down[0, int(absorb(block).flips[0])] += shift  # type: ignore[index]
    verdict = absorb(Block(block.up, down, up_bias=block.up_bias, down_bias=block.down_bias))
    assert verdict.status == status
    assert verdict.verify()


def test_below_rounding_a_near_miss_is_possible_and_says_by_how_much() -> None:
    block, _ = planted(seed=2)
    down = block.down.clone()
    down[0, int(absorb(block).flips[0])] += 1e-14  # type: ignore[index]
    verdict = absorb(Block(block.up, down, up_bias=block.up_bias, down_bias=block.down_bias))
    assert verdict.status == "possible"
    assert verdict.error is not None
    assert 0 < verdict.error < 1e-12


@pytest.mark.parametrize("h", [1, 3, 4, 5])
def test_narrow_blocks(h: int) -> None:
    verdict = absorb(generic(4, h, "relu", seed=h))
    assert verdict.status == "impossible"
    assert verdict.verify()


def test_low_rank_weights_are_refused() -> None:
    g = numbers(0)
    up, down = normal(g, 20, 3) @ normal(g, 3, 6), normal(g, 6, 20)
    verdict = absorb(Block(up, down, activation="gelu"))
    assert verdict.status == "impossible"
    assert verdict.verify()


# --- Invariances ------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), plant=st.booleans(), word=st.sampled_from(["relu", "gelu", "silu"]))
def test_the_order_of_units_does_not_matter(seed: int, plant: bool, word: str) -> None:
    block = planted(4, 9, word, seed=seed)[0] if plant else generic(4, 9, word, seed=seed)
    order = torch.randperm(9, generator=numbers(seed))
    assert block.up_bias is not None
    moved = Block(
        block.up[order], block.down[:, order], up_bias=block.up_bias[order], down_bias=block.down_bias, activation=word
    )
    first, second = absorb(block), absorb(moved)
    assert first.status == second.status == ("possible" if plant else "impossible")
    if first.flips is not None and second.flips is not None:
        assert sorted(order[second.flips].tolist()) == first.flips.tolist()


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), plant=st.booleans())
def test_relu_units_may_be_rescaled(seed: int, plant: bool) -> None:
    block = planted(4, 9, "relu", seed=seed)[0] if plant else generic(4, 9, "relu", seed=seed)
    scale = torch.exp(normal(numbers(seed), 9))
    assert block.up_bias is not None
    moved = Block(
        block.up * scale[:, None],
        block.down / scale,
        up_bias=block.up_bias * scale,
        down_bias=block.down_bias,
        activation="relu",
    )
    assert absorb(moved).status == absorb(block).status == ("possible" if plant else "impossible")


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), plant=st.booleans())
def test_an_invertible_skip_reduces_to_the_identity(seed: int, plant: bool) -> None:
    g = numbers(seed)
    skip = normal(g, 4, 4) + 3 * eye(4)
    block = planted(4, 9, "gelu", seed=seed)[0] if plant else generic(4, 9, "gelu", seed=seed)
    moved = Block(block.up, skip @ block.down, up_bias=block.up_bias, down_bias=block.down_bias, skip=skip)
    assert absorb(moved).status == absorb(block).status == ("possible" if plant else "impossible")


def test_round_trip_from_a_block_without_a_skip() -> None:
    """A residual-free block with V_S U_S = I, its S flipped, is a block with a skip; absorbing gives it back."""
    g = numbers(1)
    up, down, bias = normal(g, 12, 4), normal(g, 4, 12), normal(g, 12)
    chosen = torch.arange(6)
    down[:, :6] = torch.linalg.pinv(up[:6]) + down[:, :6] @ (eye(6) - up[:6] @ torch.linalg.pinv(up[:6]))
    free = Block(up, down, up_bias=bias, down_bias=torch.zeros(4).double(), activation="silu", skip=0.0)
    sign = torch.ones(12, dtype=torch.float64)
    sign[chosen] = -1
    shift = -down[:, :6] @ bias[:6]
    skipped = Block(up * sign[:, None], down, up_bias=bias * sign, down_bias=-shift, activation="silu")
    assert close(free, skipped) < 1e-13
    verdict = absorb(skipped)
    assert verdict.flips is not None
    assert torch.equal(verdict.flips, chosen)
    assert close(free, verdict.replacement()) < 1e-12


def test_it_is_at_the_top() -> None:
    assert unskip.absorb is absorb
