"""Trackers log the rows of metrics.jsonl, each step once, also in a resumed run; offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.training.tasks import new, schedule, task

from unskip.errors import BadInput, UnskipWarning
from unskip.training import RunFolder, run_task


def interrupted(path: Path, tracker: str) -> list[dict[str, Any]]:
    """The log of a run that was stopped after step 10 and resumed."""
    run_task(task(stop_at=9), schedule(tracker=tracker), new(path), quiet=True)
    folder = RunFolder.open(path)
    run_task(task(), schedule(tracker=tracker), folder, quiet=True)
    return folder.read("metrics.jsonl")


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = interrupted(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "unskip"))
    events.Reload()
    found = {each.step: each.value for each in events.Scalars("train/loss")}
    assert found == pytest.approx({row["step"]: row["loss"] for row in rows}, rel=1e-6)
    assert {each.step for each in events.Scalars("bias/bias")} == {10, 20}


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    interrupted(tmp_path / "run", "wandb")
    files = [*(tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")]
    # Files are named by the id of the run; folders by the second, so both parts of the run may share one.
    assert len({file.name for file in files}) == 1
    content = b"".join(file.read_bytes() for file in files)
    assert b"train/loss" in content
    assert b"bias/bias" in content


@pytest.mark.parametrize(("name", "message"), [("wandbb", "nearest: wandb"), ("aim", "pip install aim")])
def test_unknown_and_missing_trackers_are_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        run_task(task(), schedule(tracker=name), new(tmp_path / "run"), quiet=True)


def test_a_tracker_that_fails_to_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As W&B does without a login."""
    monkeypatch.setattr("accelerate.tracking.TensorBoardTracker.start", fail)
    with pytest.raises(BadInput, match=r"tracker tensorboard cannot be started: no server"):
        run_task(task(), schedule(tracker="tensorboard"), new(tmp_path / "run"), quiet=True)


def test_a_tracker_that_fails_later_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.tracking.TensorBoardTracker.log", fail)
    with pytest.warns(UnskipWarning, match=r"tracker tensorboard stops at step 4: no server") as found:
        assert run_task(task(), schedule(tracker="tensorboard"), new(tmp_path / "run"), quiet=True).finished
    assert len(found) == 1


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("no server")
