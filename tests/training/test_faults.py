"""Stopped, killed and damaged runs resume to the same weights."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.tasks import Feed, new, schedule, task, weights
from torch import nn

from unskip.errors import BadInput, TrainingError, UnskipWarning
from unskip.training import RunFolder, run_task


@pytest.mark.parametrize(("optimizer", "stop_at"), [("adamw", 3), ("soap", 13), ("muon", 6)])
def test_a_stopped_run_resumes_to_the_same_weights(tmp_path: Path, optimizer: str, stop_at: int) -> None:
    whole = task(optimizer)
    run_task(whole, schedule(ema=0.9), new(tmp_path / "whole"), quiet=True)
    first = task(optimizer, stop_at=stop_at)
    outcome = run_task(first, schedule(ema=0.9), new(tmp_path / "cut"), quiet=True)
    assert not outcome.finished
    assert outcome.step == stop_at + 1
    second = task(optimizer)
    outcome = run_task(second, schedule(ema=0.9), RunFolder.open(tmp_path / "cut"), quiet=True)
    assert outcome.finished
    for a, b in zip(weights(whole), weights(second), strict=True):
        assert torch.equal(a, b)
    averages = [
        (tmp_path / name / "checkpoints" / "step-20" / "ema.safetensors").read_bytes() for name in ("whole", "cut")
    ]
    assert averages[0] == averages[1]
    steps = [[row["step"] for row in RunFolder(tmp_path / name).read("metrics.jsonl")] for name in ("whole", "cut")]
    assert set(steps[0]) <= set(steps[1])
    assert steps[1] == sorted(set(steps[1]))


def test_a_non_finite_loss_stops_the_run_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    folder = new(tmp_path / "run")
    with (
        pytest.warns(UnskipWarning, match="non-finite-loss"),
        pytest.raises(TrainingError, match="step 6"),
    ):
        run_task(task(poison=9), schedule(), folder, quiet=True)
    assert folder.last_checkpoint()[0] == 6  # type: ignore[index]
    assert folder.read("warnings.jsonl")[0]["warning"] == "non-finite-loss"
    assert folder.read("metrics.jsonl")[-1]["loss"] == "nan"


@pytest.mark.parametrize("poison", [4, 5])
def test_checkpoints_between_logged_steps_are_finite(tmp_path: Path, poison: int) -> None:
    folder = new(tmp_path / "run")
    with (
        pytest.warns(UnskipWarning, match="non-finite-loss"),
        pytest.raises(TrainingError, match=r"step 4.*new run"),
    ):
        run_task(task(poison=poison), schedule(log_every=20, checkpoint_every=2), folder, quiet=True)
    checkpoint = folder.last_checkpoint()
    assert checkpoint[0] == 4
    from safetensors.torch import load_file

    assert all(value.isfinite().all() for value in load_file(checkpoint[1] / "model.safetensors").values())


def test_missing_data_error_says_how_to_resume(tmp_path: Path) -> None:
    class Vanishing(Feed):
        def iterate(
            self, start_step: int, stop_step: int, rank: int = 0, world: int = 1, parts: int = 1
        ) -> Iterator[Any]:
            yield from super().iterate(start_step, self.until)
            raise BadInput("images/7.png: not an image that can be read")

    one = task()
    one.feed = Vanishing()
    for one.feed.until, then in ((8, "step 6.*unskip resume"), (2, "no checkpoint.*same command again")):
        with pytest.raises(TrainingError, match=rf"images/7\.png.*{then}"):
            run_task(one, schedule(), new(tmp_path / str(one.feed.until)), quiet=True)


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "unsealed"])
def test_resume_skips_a_damaged_checkpoint(tmp_path: Path, damage: str) -> None:
    whole = task()
    run_task(whole, schedule(), new(tmp_path / "run"), quiet=True)
    folder = RunFolder.open(tmp_path / "run")
    victim = folder.checkpoints / "step-20" / "optimizer.safetensors"
    if damage == "truncate":
        victim.write_bytes(victim.read_bytes()[:-7])
    elif damage == "flip":
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        victim.write_bytes(bytes(data))
    elif damage == "delete":
        victim.unlink()
    else:
        (folder.checkpoints / "step-20" / "checksums.json").unlink()
    again = task()
    with pytest.warns(UnskipWarning, match="checkpoint before"):
        run_task(again, schedule(), folder, quiet=True)
    for a, b in zip(weights(whole), weights(again), strict=True):
        assert torch.equal(a, b)


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new(tmp_path / "run")
    one = task()
    good = one.save

    def full(network: nn.Module, target: Any) -> None:
        if "step-12" in str(target):
            raise OSError(28, "No space left on device")
        assert good is not None
        good(network, target)

    one.save = full
    with pytest.raises(TrainingError, match=r"No space left.*step 6.*unskip resume"):
        run_task(one, schedule(), folder, quiet=True)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-6"]
    again = task()
    run_task(again, schedule(), folder, quiet=True)
    whole = task()
    run_task(whole, schedule(), new(tmp_path / "whole"), quiet=True)
    for a, b in zip(weights(whole), weights(again), strict=True):
        assert torch.equal(a, b)


def test_an_unwritable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_task(task(), schedule(), new(tmp_path / "run"), quiet=True)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", refused)
    with pytest.raises(TrainingError, match=r"Read-only.*step 20.*unskip resume"):
        run_task(task(), schedule(), RunFolder.open(tmp_path / "run"), quiet=True)
    with pytest.raises(BadInput, match=r"other.*Read-only.*--out"):
        new(tmp_path / "other")


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.training.tasks import Feed, new, schedule, task
from unskip.training import RunFolder, run_task

one = task()
class Killing(Feed):
    def iterate(self, start_step, stop_step, rank=0, world=1, parts=1):
        for step, batch in enumerate(super().iterate(start_step, stop_step), start_step):
            if step == {at}:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch
one.feed = Killing()
run_task(one, schedule(), new(Path({out!r})), quiet=True)
"""


@pytest.mark.parametrize("at", [pytest.param(2, marks=pytest.mark.full), 11])
def test_resume_after_sigkill(tmp_path: Path, at: int) -> None:
    root = str(Path(__file__).resolve().parents[2])
    code = textwrap.dedent(KILLED).format(root=root, at=at, out=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    again, whole = task(), task()
    folder = RunFolder.open(tmp_path / "run")
    checkpoint = folder.last_checkpoint()
    assert (checkpoint is None) == (at == 2)
    run_task(again, schedule(), folder, quiet=True)
    run_task(whole, schedule(), new(tmp_path / "whole"), quiet=True)
    for a, b in zip(weights(whole), weights(again), strict=True):
        assert torch.equal(a, b)
    assert [row["step"] for row in folder.read("metrics.jsonl")] == [4, 8, 12, 16, 20]


ENDLESS = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.training.tasks import Feed, new, schedule, task
from unskip.training import run_task

one = task()
class Slow(Feed):
    def iterate(self, start_step, stop_step, rank=0, world=1, parts=1):
        for batch in super().iterate(start_step, stop_step):
            time.sleep(0.05)
            yield batch
one.feed = Slow()
folder = new(Path({out!r}))
print("begun", flush=True)
run_task(one, schedule(), folder, quiet=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_resume_after_sigkill_at_a_random_time(tmp_path: Path, seed: int) -> None:
    """During a step, between steps, or during a write of a checkpoint or a log line."""
    code = textwrap.dedent(ENDLESS).format(root=str(Path(__file__).resolve().parents[2]), out=str(tmp_path / "run"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"begun\n"
        time.sleep(random.Random(seed).uniform(0, 1.5))
        process.kill()
    again, whole = task(), task()
    run_task(again, schedule(), RunFolder.open(tmp_path / "run"), quiet=True)
    run_task(whole, schedule(), new(tmp_path / "whole"), quiet=True)
    for a, b in zip(weights(whole), weights(again), strict=True):
        assert torch.equal(a, b)


def test_resume_without_an_intact_checkpoint_restarts_with_a_warning(tmp_path: Path) -> None:
    whole = task()
    run_task(whole, schedule(), new(tmp_path / "run"), quiet=True)
    folder = RunFolder.open(tmp_path / "run")
    (folder.checkpoints / "step-18" / "checksums.json").write_text("[1]")
    (folder.checkpoints / "step-20" / "checksums.json").write_text("null")
    again = task()
    with (
        pytest.warns(UnskipWarning, match=r"step-20.*checkpoint before"),
        pytest.warns(UnskipWarning, match=r"step-18.*from step 0"),
    ):
        run_task(again, schedule(), folder, quiet=True)
    for a, b in zip(weights(whole), weights(again), strict=True):
        assert torch.equal(a, b)
