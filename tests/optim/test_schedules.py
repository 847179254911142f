"""Schedules: closed forms, ends, and torch's own schedulers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unskip.errors import BadInput
from unskip.optim import schedules


def test_closed_forms() -> None:
    assert [schedules.constant(t, warmup=4) for t in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    linear = [schedules.warmup_linear(t, total=6, warmup=2, floor=0.1) for t in range(8)]
    assert linear == pytest.approx([0.5, 1, 1, 0.7, 0.4, 0.1, 0.1, 0.1])
    wave = [schedules.warmup_cosine(t, total=5) for t in range(5)]
    assert wave == pytest.approx([(1 + math.cos(math.pi * t / 4)) / 2 for t in range(5)])
    stable = [schedules.warmup_stable_decay(t, total=8, warmup=2, decay=4) for t in range(9)]
    assert stable == pytest.approx([0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    assert schedules.cosine(0, total=10, start=0.04, end=0.4) == pytest.approx(0.04)
    assert schedules.cosine(9, total=10, start=0.04, end=0.4) == pytest.approx(0.4)


@given(st.integers(1, 200), st.integers(0, 50), st.floats(0, 1), st.integers(0, 400))
def test_factors_stay_between_the_floor_and_one(total: int, warmup: int, floor: float, step: int) -> None:
    for schedule in (schedules.warmup_cosine, schedules.warmup_linear):
        value = schedule(step, total=total + warmup, warmup=warmup, floor=floor)
        assert 0 < value <= 1 if step < warmup else floor - 1e-12 <= value <= 1
        assert schedule(total + warmup + step, total=total + warmup, warmup=warmup, floor=floor) == pytest.approx(floor)


@given(st.integers(2, 100), st.integers(0, 20))
def test_after_the_warm_up_it_only_falls(total: int, warmup: int) -> None:
    for schedule in (
        partial(schedules.warmup_cosine, total=total + warmup, warmup=warmup),
        partial(schedules.warmup_linear, total=total + warmup, warmup=warmup),
        partial(schedules.warmup_stable_decay, total=total + warmup, warmup=warmup, decay=total // 2),
    ):
        values = [schedule(t) for t in range(total + warmup)]
        assert values[:warmup] == sorted(values[:warmup])
        assert values[warmup:] == sorted(values[warmup:], reverse=True)


def optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.0}]
    groups[0]["lr"] = 0.5  # type: ignore[assignment]
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.05)


def test_apply_keeps_the_ratio_of_the_groups_and_the_groups_without_decay() -> None:
    one = optimizer()
    for factor in (0.5, 0.25):
        schedules.apply(one, lr=factor, weight_decay=0.4 * factor)
    assert [group["lr"] for group in one.param_groups] == [0.125, 0.025]
    assert [group["weight_decay"] for group in one.param_groups] == [0.1, 0.0]


def test_torch_can_drive_them() -> None:
    one = optimizer()
    driven = torch.optim.lr_scheduler.LambdaLR(one, partial(schedules.warmup_cosine, total=10, warmup=2))
    one.step()
    driven.step()
    assert one.param_groups[0]["lr"] == 0.5
    schedules.apply(one, lr=0.5)
    assert one.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("schedule", [schedules.warmup_cosine, schedules.warmup_linear])
def test_a_warm_up_may_take_the_whole_run(schedule: Any) -> None:
    """LambdaLR asks for one step more than there are: the factor stays where it is."""
    assert [schedule(t, total=4, warmup=4) for t in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert [schedule(t, total=2, warmup=4) for t in range(6)] == [0.25, 0.5, 0.5, 0.5, 0.5, 0.5]
    with pytest.raises(BadInput, match=f"{schedule.__name__}: total"):
        schedule(0, total=0)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(BadInput, match="do not fit"):
        schedules.warmup_stable_decay(0, total=5, warmup=3, decay=3)
    with pytest.raises(BadInput, match="count from 0"):
        schedules.warmup_linear(-1, total=5)
    for schedule in (schedules.warmup_cosine, schedules.warmup_linear):
        with pytest.raises(BadInput, match="count from 0"):
            schedule(0, total=5, warmup=-3)
    with pytest.raises(BadInput, match="count from 0"):
        schedules.warmup_stable_decay(0, total=5, warmup=-3, decay=2)
    with pytest.raises(BadInput, match="1 step or more"):
        schedules.cosine(0, total=0, start=1, end=0)
