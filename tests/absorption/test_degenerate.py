"""Inactive and spare units: dead, constant, equal, mirrored and cancelling ones, and which skips they absorb."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.absorption.blocks import close, normal, numbers

from unskip.absorption import Block, _decide, absorb
from unskip.absorption._activations import resolve
from unskip.absorption._check_keys import group_units
from unskip.absorption._keys import canonical_keys
from unskip.absorption._problem import problem_of


def block_with(spares: int, how: str, word: str, d: int = 4, h: int = 12) -> Block:
    g = numbers(spares)
    up, down, bias = normal(g, h, d), normal(g, d, h), normal(g, h)
    for i in range(spares):
        j = h - 1 - i
        if how == "dead column":
            down[:, j] = 0
        elif how == "zero row":
            up[j] = 0
        elif how == "equal":
            up[j], bias[j] = up[i], bias[i]
        elif how == "mirrored":
            up[j], bias[j] = -up[i], -bias[i]
        elif how == "scaled":
            up[j], bias[j] = 2 * up[i], 2 * bias[i]
        else:  # both units of a key whose columns cancel
            up[j], bias[j], down[:, j] = up[i], bias[i], -down[:, i]
    return Block(up, down, up_bias=bias, down_bias=torch.zeros(d).double(), activation=word)


WAYS = ["dead column", "zero row", "equal", "mirrored", "scaled", "cancelling"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("word", ["relu", "gelu", "leaky_relu:0.5"])
def test_they_are_counted(how: str, word: str) -> None:
    block = block_with(3, how, word)
    keys = canonical_keys(problem_of(block, 12, "allowed"))
    expected = {"cancelling": 6, "scaled": 0 if word == "gelu" else 3}.get(how, 3)
    assert keys.spares == expected


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("word", ["relu", "gelu"])
def test_d_of_them_make_any_skip_possible(how: str, word: str) -> None:
    block = block_with(4, how, word)
    verdict = absorb(block)
    if how == "scaled" and word == "gelu":
        assert verdict.status == "impossible"
    else:
        assert verdict.status == "possible"
        assert close(block, verdict.replacement()) < 1e-11
        assert verdict.replacement().width == 12
    assert verdict.verify()


@pytest.mark.parametrize("how", ["dead column", "zero row", "equal", "mirrored"])
def test_one_fewer_is_not_enough(how: str) -> None:
    block = block_with(3, how, "gelu", d=4, h=9)
    verdict = absorb(block)
    assert verdict.status in ("impossible", "undecided")
    assert verdict.verify()


def test_a_middle_that_is_left_open() -> None:
    """There are too many uses of the spare units to try and no obstruction, so the verdict is undecided."""
    g = numbers(0)
    d, h = 8, 40
    up, down = 3 * normal(g, h, d), 3 * normal(g, d, h)
    down[:, :4] = 0
    verdict = absorb(Block(up, down, activation="gelu"))
    assert verdict.status == "undecided"
    assert "spare" in verdict.reason
    assert verdict.weights is None
    assert verdict.verify()
    weak = absorb(Block(0.02 * up, 0.02 * down, activation="gelu"))
    assert weak.status == "impossible"
    assert weak.certificate is not None
    assert weak.certificate.kind == "spectral"
    assert weak.verify()


def test_no_unit_at_all_counts() -> None:
    verdict = absorb(Block(torch.zeros(3, 4).double(), torch.ones(4, 3).double(), activation="gelu"))
    assert verdict.status == "impossible"
    assert verdict.verify()
    wide = absorb(Block(torch.zeros(8, 4).double(), torch.ones(4, 8).double(), activation="gelu"))
    assert wide.status == "possible"  # eight inactive units are four pairs
    assert close(wide.block, wide.replacement()) < 1e-12


# --- Without output biases --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dead column", "zero row", "equal", "mirrored", "cancelling"])
@pytest.mark.parametrize("word", ["gelu", "relu", "softplus"])
def test_idle_units_leave_flips_alone_where_no_unit_is_spare(
    how: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the width is the number of keys only flips are possible, and they have to reproduce the constants too."""
    monkeypatch.setattr(_decide, "MAX_CHECKED", 0)  # keep the certificate of the search, unchecked
    block = replace(block_with(2, how, word), down_bias=None)
    verdict = absorb(block, width=8 if how == "cancelling" else 10)
    assert verdict.status == "impossible"
    assert verdict.certificate is not None
    assert verdict.certificate.kind == "dual"
    assert verdict.verify()


@pytest.mark.parametrize("word", ["gelu", "relu"])
def test_the_constant_of_a_dead_unit_is_counted(word: str) -> None:
    """A dead unit adds W_down phi(b). A flip set is accepted only if it reproduces this constant as well."""
    g = numbers(3)
    up, down, bias = normal(g, 9, 3), normal(g, 3, 9), normal(g, 9)
    down[:, :3] = -torch.linalg.inv(up[:3])  # the first three units reproduce the skip
    up[8], bias[8] = 0, 0.7
    height = resolve(word)[0].function(bias[8:])
    down[:, 8] = -(down[:, :3] @ bias[:3]) / height  # and this one the constant that their flips leave
    block = Block(up, down, up_bias=bias, activation=word)
    verdict = absorb(block, width=8)
    assert verdict.status == "possible"
    assert verdict.verify()
    assert verdict.replacement().down_bias is None
    assert close(block, verdict.replacement()) < 1e-12
    down = down.clone()
    down[0, 8] += 1e-3
    verdict = absorb(replace(block, down=down), width=8)
    assert verdict.status == "impossible"
    assert verdict.verify()


def test_what_output_biases_do_not_make_possible_is_impossible_without_them() -> None:
    """With spare units and no output bias, the certificates of the problem with output biases hold."""
    weak = block_with(1, "dead column", "gelu")
    weak = replace(weak, up=weak.up / 20, down=weak.down / 20, down_bias=None)
    verdict = absorb(weak)
    assert verdict.status == "impossible"
    assert "spectral" in {each.kind for each in verdict.obstructions}
    assert verdict.verify()


# --- Many units -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["relu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_thousands_of_equal_and_mirrored_units(word: str, dtype: torch.dtype) -> None:
    """2,000 units have three keys: pairs that are already merged are not compared again."""
    g = numbers(0)
    rows, which = normal(g, 3, 6), torch.randint(3, (2000,), generator=g)
    sign = torch.randint(0, 2, (2000, 1), generator=g) * 2.0 - 1
    up, down = (sign * rows[which]).to(dtype), normal(g, 6, 2000).to(dtype)
    block = Block(up, down, activation=word)
    keys = canonical_keys(problem_of(block, 3, "as-is"))
    assert keys.count == 3
    assert torch.equal(keys.sizes.sort().values, torch.bincount(which).sort().values)
    verdict = absorb(block, width=3)
    assert verdict.verify()
    if dtype == torch.float64:  # in bfloat16 each contributes less than the rounding of all
        seen = group_units(problem_of(block, 3, "as-is"))
        assert seen is not None
        assert torch.equal(seen.first, keys.first)
        assert torch.equal(seen.group, keys.member)
