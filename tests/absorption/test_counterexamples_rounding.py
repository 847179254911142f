"""Blocks whose sizes and rounding mislead a careless decision: large units, tiny columns, squares that overflow."""

from __future__ import annotations

import pytest
import torch
from tests.absorption.blocks import close, eye, generic, normal, numbers

from unskip.absorption import Block, absorb


@pytest.mark.parametrize("seed", range(10))
def test_large_bfloat16_weights_do_not_hide_the_skip(seed: int) -> None:
    g = numbers(seed)
    block = Block((8 * normal(g, 64, 16)).bfloat16(), (8 * normal(g, 16, 64)).bfloat16(), activation="gelu")
    assert absorb(block).status != "possible"


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 512.0), (torch.float32, 3e7)])
def test_one_heavy_unit_does_not_hide_the_skip(dtype: torch.dtype, size: float) -> None:
    block = generic(16, 64, "relu", dtype=torch.float64)
    up, down = block.up.clone(), block.down.clone()
    assert block.up_bias is not None
    bias = block.up_bias.clone()
    up[0] = size**0.5 * up[0] / up[0].norm()
    down[:, 0] = size**0.5 * down[:, 0] / down[:, 0].norm()
    bias[0] = -100 * size**0.5  # never active on data
    asked = Block(
        up.to(dtype), down.to(dtype), up_bias=bias.to(dtype), down_bias=torch.zeros(16, dtype=dtype), activation="relu"
    )
    assert absorb(asked).status != "possible"


def test_scaled_duplicates_that_rounding_told_apart() -> None:
    """In exact arithmetic no unit is spare. Merging the units would make d of them spare, and the skip absorbable."""
    g = numbers(0)
    d = 6
    up = normal(g, 12, d).float()
    up[6:] = up[:6] * torch.rand(6, 1, generator=g) * 3
    down = normal(g, d, 12).float()
    verdict = absorb(Block(up, down, activation="relu"))
    assert verdict.status != "impossible"
    if verdict.status == "possible":
        assert close(verdict.block, verdict.replacement()) < 1e-5
    same = Block(up, down, activation="gelu")  # for GELU scaled rows are different units
    assert absorb(same).status == "impossible"


def test_columns_of_next_to_nothing() -> None:
    g = numbers(0)
    up, down = normal(g, 12, 4), normal(g, 4, 12)
    down[:, :4] = 1e-20 * down[:, :4]
    block = Block(up, down, activation="gelu")
    verdict = absorb(block)
    assert verdict.status != "impossible"
    assert verdict.status != "possible" or close(block, verdict.replacement()) < 1e-12


def test_weights_whose_squares_leave_float64() -> None:
    """x 1e-20 - 1e150 relu(1e-170 x) can be flipped; the norms of its rows are 0 in floating point."""
    block = Block(1e-170 * eye(2), -1e150 * eye(2), activation="relu", skip=1e-20)
    verdict = absorb(block)
    assert verdict.status == "undecided"
    assert "float64" in verdict.reason


@pytest.mark.parametrize("scale", [4.0, 8.0, 30.0])
def test_a_linear_block_does_not_drop_its_skip(scale: float) -> None:
    """In bfloat16 a skip may be within the rounding of large weights, and must not be dropped."""
    g = numbers(0)
    up, down = (scale * normal(g, 8, 16) / 4).bfloat16(), (scale * normal(g, 16, 8) / 3).bfloat16()
    assert absorb(Block(up, down, activation="identity")).status != "possible"


def test_box_constraints_on_weights_of_uneven_size() -> None:
    """Numbers on which a trust-region method for box constraints does not converge."""
    from unskip.absorption._search import full_equation, search

    joint = [
        [2147483647.9999998, -715827882.6666665, 2147483648.0, 1789569706.6666665, 1073741824.0, 1789569706.6666667],
        [-(2.0**-24), 357913941.3333335, 1073741824.0, 715827882.6666666, -3221225472.0, -1431655765.3333333],
        [-2147483648.0, 357913941.3333335, -3221225472.0, -2505397589.3333335, 2147483648.0, -357913941.3333333],
    ]
    rows = [
        [413.5384615384615, 275.6923076923076],
        [472.6153846153846, 315.0769230769231],
        [-118.15384615384619, -78.76923076923066],
        [-354.4615384615384, -236.3076923076924],
        [-177.23076923076923, -118.15384615384613],
        [59.07692307692304, 39.38461538461547],
    ]
    goal = [
        [-232588998183.38458, -155059332122.2564],
        [-296022361324.3077, -197348240882.8719],
        [528611359507.6922, 352407573005.1283],
    ]
    parts = (torch.tensor(part, dtype=torch.float64) for part in (joint, rows, goal))
    assert search(full_equation(*parts, 1e13), lambda flips: False) is None


@pytest.mark.parametrize("word", ["softplus:0.5", "log_sigmoid", "squareplus"])
def test_units_that_are_not_zero_at_zero_stand_the_check(word: str) -> None:
    """A fresh pair adds up to a linear map: the values of its units at the origin cancel, with their rounding."""
    up = torch.tensor([[2.0, 1, 1], [0, 0, -2], [-2, -1, -1], [0, 0, -2]], dtype=torch.float64)
    down = 2.0**-20 * torch.tensor([[-1.0, 3, 0, 0], [-3, 0, 4, 0], [-2, -1, 6, 1]], dtype=torch.float64)
    skip = 2.0**-20 * torch.tensor([[2.0, 1, 1], [6, 3, 3], [4, 2, 2]], dtype=torch.float64)
    verdict = absorb(Block(up, down, activation=word, skip=skip))
    assert verdict.status == "possible"
    assert verdict.verify()
