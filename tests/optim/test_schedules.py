"""Schedules: closed forms, their ends, and use with torch's schedulers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unskip.errors import BadInput
from unskip.optim import schedules
from unskip.optim.schedules import warmup_cosine


def test_closed_forms() -> None:
    wave = [warmup_cosine(t, total=5) for t in range(5)]
    assert wave == pytest.approx([(1 + math.cos(math.pi * t / 4)) / 2 for t in range(5)])
    assert schedules.cosine(0, total=10, start=0.04, end=0.4) == pytest.approx(0.04)
    assert schedules.cosine(9, total=10, start=0.04, end=0.4) == pytest.approx(0.4)


@given(st.integers(1, 100), st.integers(0, 20), st.floats(0, 1))
def test_the_factor_rises_to_one_in_warmup_and_falls_to_the_floor(total: int, warmup: int, floor: float) -> None:
    values = [warmup_cosine(t, total=total + warmup, warmup=warmup, floor=floor) for t in range(total + warmup + 3)]
    assert values[:warmup] == sorted(values[:warmup])
    assert all(0 < value <= 1 for value in values[:warmup])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    assert values[-4:] == pytest.approx([floor] * 4)  # and is constant afterwards


def optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.0}]
    groups[0]["lr"] = 0.5  # type: ignore[assignment]
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.05)


def test_apply_keeps_the_ratios_of_groups_and_groups_without_decay() -> None:
    one = optimizer()
    for factor in (0.5, 0.25):
        schedules.apply(one, lr=factor, weight_decay=0.4 * factor)
    assert [group["lr"] for group in one.param_groups] == [0.125, 0.025]
    assert [group["weight_decay"] for group in one.param_groups] == [0.1, 0.0]


def test_warmup_may_last_the_whole_run() -> None:
    """LambdaLR evaluates one step after the last, for which the factor is constant."""
    assert [warmup_cosine(t, total=4, warmup=4) for t in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert [warmup_cosine(t, total=2, warmup=4) for t in range(6)] == [0.25, 0.5, 0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("wrong", [{"step": -1}, {"total": 0}, {"warmup": -3}])
def test_steps_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadInput, match=f"warmup_cosine: .*{next(iter(wrong))}"):
        warmup_cosine(**{"step": 0, "total": 5, **wrong})
