"""The decision and its check run on the device of the weights: only vectors and numbers are copied to the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.absorption.blocks import generic, normal, numbers, planted
from tests.absorption.far import Far, send

from unskip.absorption import Block, Norm, _search, absorb

D, H = 16, 64


def twins(h: int = H, word: str = "gelu") -> Block:
    """A block with equal, mirrored, cancelling and dead units."""
    block = generic(D, h, word)
    up, down, bias = block.up.clone(), block.down.clone(), block.up_bias
    assert bias is not None
    bias = bias.clone()
    up[1], bias[1] = up[0], bias[0]
    up[3], bias[3] = -up[2], -bias[2]
    up[5], bias[5], down[:, 5] = up[4], bias[4], -down[:, 4]
    up[6], down[:, 7] = 0, 0
    return replace(block, up=up, down=down, up_bias=bias)


def gated() -> Block:
    g = numbers(0)
    return Block(normal(g, H, D), normal(g, D, H), normal(g, H, D), activation="swiglu")


def fraction() -> Block:
    return replace(planted(D, H, "gelu")[0], skip=0.5)


def biases() -> tuple[torch.Tensor, torch.Tensor]:
    return normal(numbers(1), D).exp(), normal(numbers(2), D)


BLOCKS = {
    "generic": lambda: generic(D, H, dtype=torch.float32),
    "strong": lambda: replace(generic(D, H, dtype=torch.float32), skip=0.01),
    "bfloat16": lambda: generic(D, H, "relu", dtype=torch.bfloat16),
    "planted": lambda: planted(D, H)[0],
    "fraction": fraction,
    "twins": twins,
    "twins-relu": lambda: twins(word="relu"),
    "no output bias": lambda: replace(generic(D, H), down_bias=None),
    "hardswish": lambda: generic(D, H, "hardswish"),
    "softplus": lambda: generic(D, H, "softplus"),
    "post": lambda: generic(D, H, norm=Norm("layernorm", "post", 1e-5, *biases())),
    "pre": lambda: generic(D, H, norm=Norm("rmsnorm", "pre", 1e-5, biases()[0])),
    "linear": lambda: generic(D, H, "identity"),
    "tanh": lambda: generic(D, H, "tanh"),
    "gated": gated,
    "narrow": lambda: generic(D, 9, "relu"),
    "matrix": lambda: generic(D, H, skip=normal(numbers(3), D, D)),
}


@pytest.mark.parametrize("dense", [_search.MAX_DENSE, 1000])
@pytest.mark.parametrize("name", BLOCKS)
def test_weights_stay_where_they_are(name: str, dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_search, "MAX_DENSE", dense)
    block = BLOCKS[name]()
    here = absorb(block)
    with Far() as far:
        there = absorb(send(block))
        assert there.verify()
        assert there.status == here.status
        assert [o.kind for o in there.obstructions] == [o.kind for o in here.obstructions]
        if here.flips is not None:
            assert there.flips is not None
            assert there.flips.tolist() == here.flips.tolist()
            assert there.replacement().up.device == there.block.up.device
    large = [size for size in far.moved if size > 2 * max(D, H)]
    assert len(large) <= (1 if name.startswith("twins") else 0)  # with spare units, the rows for a QR with pivoting


def test_spare_units_are_used_there() -> None:
    block = generic(4, 6, "relu")
    for width in (7, 8, 12):
        here = absorb(block, width=width)
        with Far():
            there = absorb(send(block), width=width)
            assert there.verify()
            assert there.status == here.status


@pytest.mark.parametrize("degenerate", [False, True])
def test_the_number_of_steps_does_not_grow_with_the_units(degenerate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number that is read synchronises the GPU with the host, and every step launches a kernel."""
    monkeypatch.setattr(_search, "MAX_DENSE", 1000)
    found = []
    for h in (64, 768):
        with Far() as far:
            block = twins(h) if degenerate else generic(D, h, dtype=torch.float32)
            verdict = absorb(send(replace(block, skip=20.0)), width=h - 6 if degenerate else h)  # as many units as keys
            assert verdict.status == "impossible"
            assert verdict.verify()
        found.append(far)
    few, many = found
    assert len(many.moved) <= len(few.moved) + 10
    assert many.steps <= few.steps + 30
    assert len(many.moved) < 150
    assert many.steps < 2000
