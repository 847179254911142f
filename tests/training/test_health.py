"""Flat-loss warnings: for a loss that stays at the baseline, not for one that passes it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from tests.training.tasks import new, task

from unskip.errors import UnskipWarning
from unskip.training import RunFolder, Schedule
from unskip.training._health import Watch


def flat_steps(folder: RunFolder, losses: list[float], stop_after: int | None = None) -> list[int]:
    """The steps with a flat-loss warning in a run of 100 steps, logged every 5, with a baseline loss of 2."""
    one = task()
    one.baseline_loss = 2.0
    schedule = Schedule(steps=100, log_every=5)
    watch = Watch(one, schedule, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnskipWarning)
        for index, loss in enumerate(losses):
            if index == stop_after:
                before, watch = watch.state(), Watch(one, schedule, folder)
                watch.load(before)
            watch.loss(5 * (index + 1), loss)
    return [row["step"] for row in folder.read("warnings.jsonl")]


def test_a_loss_at_the_baseline_is_flat(tmp_path: Path) -> None:
    assert flat_steps(new(tmp_path / "a"), [2.0] * 6) == [20, 25, 30]  # not before a fifth of the run
    # a tenth of the run after a collapse
    assert flat_steps(new(tmp_path / "b"), [1.0] * 8 + [2.01, 1.99, 2.0]) == [50, 55]


def test_a_loss_that_passes_the_baseline_is_not_flat(tmp_path: Path) -> None:
    falling = [2.5 - 0.05 * index for index in range(20)]
    assert any(abs(loss - 2) < 0.02 for loss in falling[3:])
    assert flat_steps(new(tmp_path / "run"), falling) == []


@pytest.mark.parametrize("stop_after", [7, 8, 9, 10])
def test_a_resumed_run_has_the_same_warnings(tmp_path: Path, stop_after: int) -> None:
    losses = [1.0] * 7 + [2.0] * 4
    whole = flat_steps(new(tmp_path / "whole"), losses)
    assert flat_steps(new(tmp_path / "cut"), losses, stop_after) == whole == [45, 50, 55]


def test_a_warning_points_to_the_caller(tmp_path: Path) -> None:
    one = task()
    one.baseline_loss = 2.0
    watch = Watch(one, Schedule(steps=100, log_every=5), new(tmp_path / "run"))
    for step in (5, 10, 15):
        watch.loss(step, 2.0)
    with pytest.warns(UnskipWarning, match="flat-loss") as caught:
        watch.loss(20, 2.0)
    assert [each.filename for each in caught] == [__file__]
