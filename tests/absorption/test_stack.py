"""Depth and streams."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.absorption.blocks import close, generic, normal, numbers, planted

from unskip.absorption import Block, Certificate, Norm, absorb, hyper_connection, stack
from unskip.errors import BadInput


def gated(word: str, seed: int, **more: object) -> Block:
    g = numbers(seed)
    return Block(normal(g, 9, 4), normal(g, 4, 9), normal(g, 9, 4), activation=word, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["swiglu", "geglu", "reglu", "bilinear"])
@pytest.mark.parametrize("depth", [1, 3])
def test_gated_stacks_are_impossible(word: str, depth: int) -> None:
    verdict = stack([gated(word, seed, skip=0.5) for seed in range(depth)])
    assert verdict.status == "impossible"
    assert verdict.certificate is not None
    assert verdict.verify()


def test_output_biases_move_the_point_but_not_the_verdict() -> None:
    blocks = [gated("swiglu", seed, down_bias=normal(numbers(seed + 9), 4)) for seed in range(3)]
    verdict = stack(blocks)
    assert verdict.status == "impossible"
    assert verdict.verify()


def test_with_a_hidden_bias_in_front_a_stack_is_open() -> None:
    first = gated("swiglu", 0, gate_bias=normal(numbers(1), 9))
    assert stack([first, gated("swiglu", 1)]).status == "undecided"
    assert stack([gated("swiglu", 1), first]).status == "impossible"  # only the first one counts
    assert stack([gated("swiglu", 1), gated("swiglu", 2)], biases="allowed").status == "undecided"


def test_a_product_that_vanishes_is_open() -> None:
    left, right = torch.diag(torch.tensor([1.0, 1, 0, 0])).double(), torch.diag(torch.tensor([0.0, 0, 1, 1])).double()
    assert stack([gated("swiglu", 0, skip=left), gated("swiglu", 1, skip=right)]).status == "undecided"


def test_bounded_and_pre_norm_stacks_grow() -> None:
    for blocks in (
        [generic(word="tanh", seed=s) for s in range(3)],
        [generic(word="gelu", seed=s, norm=Norm("layernorm", "pre")) for s in range(2)],
    ):
        verdict = stack(blocks)
        assert verdict.status == "impossible"
        assert verdict.certificate is not None
        assert verdict.certificate.kind == "growth"
        assert verdict.verify()


@pytest.mark.parametrize("word", ["relu", "gelu"])
def test_wide_class_o_stacks_are_open_and_narrow_ones_are_not(word: str) -> None:
    assert stack([generic(4, 12, word, s) for s in range(2)]).status == "undecided"
    verdict = stack([generic(4, 12, word, 0), generic(4, 3, word, 1)])
    assert verdict.status == "impossible"
    assert verdict.certificate is not None
    assert verdict.certificate.kind == "bottleneck"
    assert verdict.verify()


def test_possible_blocks_make_a_possible_stack() -> None:
    blocks = [planted(4, 12, "gelu", seed=s)[0] for s in range(3)]
    verdict = stack(blocks)
    assert verdict.status == "possible"
    assert verdict.verify()
    x = y = normal(numbers(0), 20, 4)
    for block, other in zip(blocks, verdict.replacement(), strict=True):
        x, y = block(x), other(y)
    assert torch.allclose(x, y, atol=1e-9)
    assert "possible" in str(verdict)
    with pytest.raises(BadInput, match="undecided"):
        stack([generic(4, 12, "gelu", s) for s in range(2)]).replacement()


# --- The check of a stack holds it to every hypothesis ----------------------------------------------------------------


def test_a_norm_on_the_branch_does_not_bend_the_origin() -> None:
    blocks = [gated("swiglu", seed, norm=Norm("rmsnorm", "pre", 1e-5)) for seed in range(2)]
    verdict = stack(blocks)
    assert {each.kind for each in verdict.obstructions} == {"linearisation", "growth"}
    assert verdict.verify()


@pytest.mark.parametrize("kind", ["linearisation", "growth", "bottleneck"])
def test_a_forged_certificate_is_refused(kind: str) -> None:
    blocks = {
        "linearisation": [gated("swiglu", 0), gated("swiglu", 1)],
        "growth": [generic(4, 12, "tanh", s) for s in range(2)],
        "bottleneck": [generic(4, 12, "relu", 0), generic(4, 3, "relu", 1)],
    }[kind]
    verdict = stack(blocks)
    held = verdict.obstructions[0]
    assert held.kind == kind
    assert verdict.verify()
    name, worse = "direction", torch.zeros(4, dtype=torch.float64)
    if kind == "bottleneck":  # on the kink of one unit
        name = "point"
        row, bias = blocks[0].up[0], blocks[0].up_bias
        assert bias is not None
        worse = -bias[0] * row / row.square().sum()
    forged = replace(held, certificate=Certificate(kind, {name: worse}))
    assert not replace(verdict, obstructions=(forged,)).verify()
    # The same claim of blocks for which it is not proved, or that may have what the theorem forbids.
    others = {
        "linearisation": [gated("glu", 0), gated("glu", 1)],  # its gate is open at 0
        "growth": [generic(4, 12, "gelu", s) for s in range(2)],
        "bottleneck": [generic(4, 12, "relu", s) for s in range(2)],
    }[kind]
    verdicts = tuple(absorb(each) for each in others)
    assert not replace(verdict, blocks=tuple(others), verdicts=verdicts).verify()
    if kind == "linearisation":
        freed = tuple(absorb(each, biases="allowed") for each in blocks)
        assert not replace(verdict, biases="allowed", verdicts=freed).verify()


def test_the_verdicts_on_the_blocks_are_checked_too() -> None:
    verdict = stack([generic(4, 12, "tanh", s) for s in range(2)])
    assert not replace(verdict, verdicts=verdict.verdicts[::-1]).verify()
    assert not replace(verdict, verdicts=verdict.verdicts[:1]).verify()
    turned = replace(verdict.verdicts[0], certificate=None)
    assert not replace(verdict, verdicts=(turned, verdict.verdicts[1])).verify()
    assert not replace(verdict, status="undecided").verify()
    assert not replace(verdict, obstructions=()).verify()


def test_a_replacement_is_checked_on_what_the_stack_sends_it() -> None:
    """A unit that bends far out is not seen on inputs around the origin, and the block before sends others."""
    block, chosen = planted(4, 12, "relu", seed=1)
    unit = next(i for i in range(12) if i not in chosen.tolist())
    bias = block.up_bias
    assert bias is not None
    bias[unit] = -300
    first = planted(4, 12, "relu", seed=0)[0]
    away = 1e4 * block.up[unit] / block.up[unit].norm()
    verdict = stack([replace(first, down_bias=away), block])
    assert verdict.status == "possible"
    assert verdict.verify()
    other = verdict.verdicts[1].replacement()
    down = other.down.clone()
    down[:, unit] += 1e-3
    wrong = replace(verdict.verdicts[1], weights=replace(other, down=down))
    assert wrong.verify()
    assert not replace(verdict, verdicts=(verdict.verdicts[0], wrong)).verify()


def test_a_block_behind_a_norm_has_to_follow_it() -> None:
    norm = {"kind": "layernorm", "eps": 1e-5, "gain": normal(numbers(0), 4).exp(), "bias": normal(numbers(1), 4)}
    first = planted(4, 12, "gelu", seed=0, norm=Norm(place="post", **norm))[0]  # type: ignore[arg-type]
    second = planted(4, 12, "gelu", seed=1, norm=Norm(place="input", **norm))[0]  # type: ignore[arg-type]
    verdict = stack([first, second])
    assert verdict.status == "possible"
    assert verdict.verify()
    for apart in (replace(first, norm=None), replace(first, norm=Norm("layernorm", "post", 1e-6))):
        verdict = stack([apart, second])
        assert verdict.status == "undecided"
        assert "norm" in verdict.reason
        assert verdict.verify()


def test_stacks_that_cannot_be() -> None:
    with pytest.raises(BadInput, match="at least one"):
        stack([])
    with pytest.raises(BadInput, match="gives 4 values"):
        stack([generic(4, 8), generic(5, 8)])


# --- Hyper-Connections ------------------------------------------------------------------------------------------------


def streams(mix: torch.Tensor, seed: int = 0) -> Block:
    g = numbers(seed)
    n = len(mix)
    return hyper_connection(normal(g, 12, 3), normal(g, 3, 12), mix, torch.ones(n) / n, torch.ones(n))


def test_one_stream_is_an_ordinary_block() -> None:
    block, chosen = planted(3, 12, "gelu", biases=False)
    one = hyper_connection(block.up, block.down, torch.ones(1, 1), torch.ones(1), torch.ones(1))
    verdict = absorb(one)
    assert verdict.flips is not None
    assert torch.equal(verdict.flips, chosen)


def test_the_formula() -> None:
    block = streams(torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    g = numbers(0)
    up, down = normal(g, 12, 3), normal(g, 3, 12)
    x = normal(numbers(1), 2, 3)
    inner = torch.nn.functional.gelu(x.mean(0) @ up.mT) @ down.mT
    mixed = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).double() @ x
    assert torch.allclose(block(x.flatten()), (mixed + inner).flatten())


@pytest.mark.parametrize("n", [2, 3])
def test_several_streams_are_impossible(n: int) -> None:
    doubly = torch.full((n, n), 0.1 / n) + 0.9 * torch.eye(n)  # rows and columns sum to 1
    for extra in (0, 2 * (n - 1) * 3 - 1):
        verdict = absorb(streams(doubly), width=12 + extra)
        assert verdict.status == "impossible"
        assert verdict.verify()
    enough = absorb(streams(doubly), width=12 + 2 * n * 3 - 3)
    assert enough.status == "possible"
    assert close(enough.block, enough.replacement()) < 1e-10


def test_streams_that_cannot_be() -> None:
    with pytest.raises(BadInput, match="mix must be"):
        hyper_connection(torch.ones(4, 3), torch.ones(3, 4), torch.ones(2, 3), torch.ones(2), torch.ones(2))
    with pytest.raises(BadInput, match="keep its width"):
        hyper_connection(torch.ones(4, 3), torch.ones(5, 4), torch.eye(2), torch.ones(2), torch.ones(2))
