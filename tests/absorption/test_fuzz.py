"""Random blocks of every kind: nothing crashes, and every verdict passes verification."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from unskip.absorption import Block, Norm, absorb
from unskip.absorption._activations import BUILT_IN, GATED


def some_block(dice: random.Random, generator: torch.Generator) -> tuple[Block, int, str]:
    word = dice.choice([*BUILT_IN, *GATED])
    d, h = dice.randint(1, 5), dice.randint(1, 12)
    o = d if dice.random() < 0.7 else dice.randint(1, 5)
    whole, dtype = dice.random() < 0.5, dice.choice([torch.float64, torch.float32, torch.bfloat16])

    def weight(*shape: int) -> Tensor:
        if whole:
            return torch.randint(-2, 3, shape, generator=generator).to(dtype)
        return (dice.choice([0.1, 1.0, 5.0]) * torch.randn(*shape, generator=generator)).to(dtype)

    def maybe(*shape: int) -> Tensor | None:
        return weight(*shape) if dice.random() < 0.5 else None

    norms = [
        Norm(dice.choice(["layernorm", "rmsnorm", "other"]), place, dice.choice([0.0, 1e-5, 0.1]))  # type: ignore[arg-type]
        for place in ("pre", "post", "out")
        if dice.random() < 0.2
    ]
    gate = weight(h, d) if word in GATED else None
    gate_bias = maybe(h) if gate is not None else None
    skip = weight(o, d) if o != d or dice.random() < 0.3 else dice.choice([1.0, 0.5, -1.0, 0.0])
    block = Block(weight(h, d), weight(o, h), gate, maybe(h), gate_bias, maybe(o), word, skip, tuple(norms) or None)
    return block, max(1, h + dice.choice([0, 0, 0, -1, 1, 2])), dice.choice(["as-is", "allowed", "none"])


def check(count: int, seed: int) -> set[str]:
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    seen = set()
    for index in range(count):
        block, width, biases = some_block(dice, generator)
        verdict = absorb(block, width, biases)  # type: ignore[arg-type]
        assert verdict.verify(), f"seed {seed}, block {index}: {verdict}"
        assert len(verdict.reason) > 20
        assert (verdict.status == "impossible") == (verdict.certificate is not None and bool(verdict.obstructions))
        seen.add(verdict.status)
    return seen


def test_a_few() -> None:
    assert check(100, 0) == {"possible", "impossible", "undecided"}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 5))
def test_many(seed: int) -> None:
    assert check(3_000, seed) == {"possible", "impossible", "undecided"}
