"""Decides an example of every cell of the map."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.absorption.blocks import close

from unskip.absorption import Block, absorb, widen
from unskip.absorption._activations import BUILT_IN, GATED

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "absorb_map.py"))
GROUPS, CELLS = SCRIPT["GROUPS"], SCRIPT["table"]()
Cell = Any


def name(cell: Cell) -> str:
    return f"{cell.word}-{'biases' if cell.biases else 'plain'}-{cell.norm}"


@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_the_engine_agrees(cell: Cell) -> None:
    verdict = absorb(cell.example())
    expected = {"flips": "impossible", "never": "impossible", "open": "undecided", "rank": "possible"}[cell.same]
    assert verdict.status == expected
    assert verdict.verify()
    if cell.same == "flips":
        block = cell.example(planted=True)
        possible = absorb(block)
        assert possible.status == "possible"
        assert close(block, possible.replacement()) < 1e-9


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.extra and cell.same != "rank"], ids=name)
def test_the_extra_width_is_enough(cell: Cell) -> None:
    block = cell.example()
    wide = widen(block)
    assert wide.extra <= (cell.units(4, 10, 4) or 0)
    assert close(block, wide.block) < 1e-9


@pytest.mark.parametrize("word", [word for every in GROUPS.values() for word in every])
@pytest.mark.parametrize("biases", [False, True])
def test_every_word_behaves_like_the_one_that_stands_for_it(word: str, biases: bool) -> None:
    head = next(head for head, every in GROUPS.items() if word in every)
    cell = next(cell for cell in CELLS if (cell.word, cell.biases, cell.norm) == (head, biases, "none"))
    block = cell.example()
    same = Block(block.up, block.down, block.gate, block.up_bias, block.gate_bias, block.down_bias, word)
    assert absorb(same).status == absorb(block).status


def test_no_word_is_left_out() -> None:
    assert {word for every in GROUPS.values() for word in every} == {*BUILT_IN, *GATED}
