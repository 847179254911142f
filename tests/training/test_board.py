"""TensorBoard reads what metrics.jsonl says, each step once, after a stop too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.training.test_loop import new, schedule, task

from unskip.errors import BadInput
from unskip.training import RunFolder, run_task


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_it_holds_the_metrics_once_after_a_stop(tmp_path: Path) -> None:
    folder = new(tmp_path / "run")
    run_task(task(stop_at=9), schedule(tensorboard=True, checkpoint_every=6), folder, quiet=True)
    folder = RunFolder.open(tmp_path / "run")
    run_task(task(), schedule(tensorboard=True, checkpoint_every=6), folder, quiet=True)
    found = scalars(tmp_path / "run")
    rows = folder.read("metrics.jsonl")
    assert found["train/loss"] == pytest.approx({row["step"]: row["loss"] for row in rows}, rel=1e-6)
    assert found["bias/bias"].keys() == {10, 20}


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BadInput, match="pip install tensorboard"):
        run_task(task(), schedule(tensorboard=True), new(tmp_path / "run"), quiet=True)
