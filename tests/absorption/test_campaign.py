"""Adversarial blocks, compared with an oracle in exact fractions that shares no code with the library."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from unskip.absorption import Block

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import _absorb_oracle as oracle
import absorb_campaign as campaign


def test_sixty_blocks() -> None:
    found = campaign.run(60, seed=1)
    assert found["wrong"] == []
    counts = found["counts"]
    assert counts["blocks"] == 60
    assert min(counts["possible"], counts["impossible"]) > 8
    assert counts["undecided"] < 20  # a third


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10_000, 10_004))
def test_thousands(seed: int) -> None:
    found = campaign.run(600, seed)
    assert found["wrong"] == []
    assert found["counts"]["blocks"] == 600


def test_the_oracle_knows_blocks_that_were_solved_by_hand() -> None:
    """x - relu(x) is absorbed by a flip, x - relu(x) / 2 is not, and two dead units represent any rank-one skip."""

    def truth(up: list[float], down: list[float], width: int) -> bool:
        weights = {"up": np.array(up)[:, None], "down": np.array(down)[None], "bias": np.zeros(len(up))}
        form = oracle.canonical({**weights, "skip": np.ones((1, 1))}, Fraction(1), True)
        return bool(oracle.absorbable(form, Fraction(1), width, False))

    assert truth([1.0], [-1.0], 1)
    assert not truth([1.0], [-0.5], 1)
    assert truth([1.0, 1.0], [-0.5, -0.5], 1)
    assert truth([1.0], [-0.5], 2)  # the row and its mirror
    assert not truth([0.0], [1.0], 1)
    assert truth([0.0, 0.0], [1.0, 1.0], 2)


def test_the_attack_sees_a_wrong_replacement() -> None:
    one = torch.ones(1, 1).double()
    block = Block(one, -one, activation="relu")
    right, wrong = Block(-one, -one, activation="relu", skip=0.0), Block(one, -one, activation="relu", skip=0.0)
    random = np.random.default_rng(0)
    for other, holds in ((right, True), (wrong, False)):
        assert oracle.within_rounding(block, other, None, random) is holds
        assert oracle.equal_exactly(block, other, random) is holds
