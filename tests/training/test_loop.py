"""The step loop on a small task: exact resume, faults, accumulation, averaging."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import unskip
from unskip.errors import BadInput, TrainingError, UnskipWarning
from unskip.training import RunFolder, Schedule, Task, train


class Feed:
    """Regression batches as a function of (seed, step)."""

    steps_per_epoch = 7

    def __init__(self, poison: int | None = None, stop_at: int | None = None) -> None:
        self.poison, self.stop_at = poison, stop_at

    def iterate(self, start_step: int, stop_step: int, rank: int = 0, world: int = 1) -> Iterator[Any]:
        for step in range(start_step, stop_step):
            if step == self.stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            generator = torch.Generator().manual_seed(1000 + step)
            x = torch.randn(8, 6, generator=generator)
            y = torch.stack([x.sum(1), x.prod(1)], 1)
            if step == self.poison:
                y = y * torch.nan
            yield x[rank::world], y[rank::world]


def task(optimizer: str = "adamw", **feed: Any) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 2))
    if optimizer == "adamw":
        chosen: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        from unskip.optim import build

        chosen = build(model, optimizer, lr=1e-2)

    def loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        x, y = batch
        value = (network(x) - y).square().mean()
        return value, {"twice": 2 * value}

    def evaluation(network: nn.Module) -> dict[str, float]:
        assert not network.training
        return {"bias": float(network[-1].bias[0])}

    def save(network: nn.Module, folder: Any) -> None:
        from safetensors.torch import save_model

        save_model(network, str(Path(folder) / "model.safetensors"))

    return Task(model, Feed(**feed), loss, chosen, evaluations={"bias": evaluation}, save=save)


def schedule(**changes: Any) -> Schedule:
    return Schedule(
        **{"steps": 20, "warmup": 3, "log_every": 4, "checkpoint_every": 6, "evaluate_every": 10, **changes}
    )


def new(path: Path) -> RunFolder:
    return RunFolder.create(path, {"recipe": "test"}, "cpu")


def weights(one: Task) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in one.model.parameters()]


@pytest.mark.parametrize("optimizer", ["adamw", "soap", "muon"])
@pytest.mark.parametrize("stop_at", [3, 6, 13])
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(tmp_path: Path, optimizer: str, stop_at: int) -> None:
    whole = task(optimizer)
    train(whole, schedule(average=0.9), new(tmp_path / "whole"), quiet=True)
    first = task(optimizer, stop_at=stop_at)
    outcome = train(first, schedule(average=0.9), new(tmp_path / "cut"), quiet=True)
    assert not outcome.finished
    assert outcome.step == stop_at + 1
    second = task(optimizer)
    outcome = train(second, schedule(average=0.9), RunFolder.open(tmp_path / "cut"), quiet=True)
    assert outcome.finished
    for a, b in zip(weights(whole), weights(second), strict=True):
        assert torch.equal(a, b)
    averages = [
        (tmp_path / name / "checkpoints" / "step-20" / "average.safetensors").read_bytes() for name in ("whole", "cut")
    ]
    assert averages[0] == averages[1]
    steps = [[row["step"] for row in RunFolder(tmp_path / name).read("metrics.jsonl")] for name in ("whole", "cut")]
    assert set(steps[0]) <= set(steps[1])
    assert steps[1] == sorted(set(steps[1]))


def test_the_schedule_and_the_log(tmp_path: Path) -> None:
    folder = new(tmp_path / "run")
    outcome = train(task(), schedule(clip=1.0), folder, quiet=True)
    rows = folder.read("metrics.jsonl")
    assert [row["step"] for row in rows] == [4, 8, 12, 16, 20]
    assert all(row["twice"] == pytest.approx(2 * row["loss"], rel=1e-5) for row in rows)
    assert rows[0]["lr"] == pytest.approx(1e-2)  # step 3, the first after the warm-up
    assert rows[-1]["lr"] < 1e-3
    assert "gradient_norm" in rows[0]
    assert [row["step"] for row in folder.read("evals.jsonl")] == [10, 20]
    assert outcome.evaluations.keys() == {"bias"}
    kept = sorted(path.name for path in folder.checkpoints.iterdir())
    assert kept == ["step-18", "step-20"]


def test_accumulation_takes_the_same_step(tmp_path: Path) -> None:
    def without_dropout() -> Task:
        one = task()
        one.model[1].p = 0.0
        return one

    once, four = without_dropout(), without_dropout()
    train(once, schedule(steps=5), new(tmp_path / "once"), quiet=True)
    train(four, schedule(steps=5, accumulate=4), new(tmp_path / "four"), quiet=True)
    for a, b in zip(weights(once), weights(four), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    rows = [RunFolder(tmp_path / name).read("metrics.jsonl")[0] for name in ("once", "four")]
    assert rows[1]["twice"] == pytest.approx(rows[0]["twice"], rel=1e-5)
    with pytest.raises(TrainingError, match="8 samples a process cannot be divided into 3"):
        train(without_dropout(), schedule(accumulate=3), new(tmp_path / "three"), quiet=True)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    folder = new(tmp_path / "run")
    with (
        pytest.warns(UnskipWarning, match="non-finite-loss"),
        pytest.raises(TrainingError, match="checkpoint is that of step 6"),
    ):
        train(task(poison=9), schedule(), folder, quiet=True)
    assert folder.last_checkpoint() is not None
    assert folder.last_checkpoint()[0] == 6  # type: ignore[index]
    assert folder.read("warnings.jsonl")[0]["warning"] == "non-finite-loss"
    assert folder.read("metrics.jsonl")[-1]["loss"] == "nan"


@pytest.mark.parametrize("poison", [4, 5])
def test_a_checkpoint_between_two_logged_steps_never_holds_what_is_not_finite(tmp_path: Path, poison: int) -> None:
    folder = new(tmp_path / "run")
    with (
        pytest.warns(UnskipWarning, match="non-finite-loss"),
        pytest.raises(TrainingError, match=r"that of step 4.*start anew"),
    ):
        train(task(poison=poison), schedule(log_every=20, checkpoint_every=2), folder, quiet=True)
    found = folder.last_checkpoint()
    assert found is not None
    assert found[0] == 4
    from safetensors.torch import load_file

    assert all(value.isfinite().all() for value in load_file(found[1] / "model.safetensors").values())


def test_data_that_vanish_are_told_with_the_way_on(tmp_path: Path) -> None:
    class Vanishing(Feed):
        def iterate(self, start_step: int, stop_step: int, rank: int = 0, world: int = 1) -> Iterator[Any]:
            yield from super().iterate(start_step, 8)
            raise BadInput("images/7.png: not an image that can be read")

    one = task()
    one.feed = Vanishing()
    with pytest.raises(TrainingError, match=r"images/7\.png.*that of step 6.*unskip resume"):
        train(one, schedule(), new(tmp_path / "run"), quiet=True)


def test_samples_are_counted_over_the_time_they_took(tmp_path: Path) -> None:
    now = [0.0]

    class Slow(Feed):
        def iterate(self, start_step: int, stop_step: int, rank: int = 0, world: int = 1) -> Iterator[Any]:
            for batch in super().iterate(start_step, stop_step):
                now[0] += 1.0
                yield batch

    def evaluation(network: nn.Module) -> dict[str, float]:
        now[0] += 100.0
        return {}

    one = task()
    one.feed, one.evaluations = Slow(), {"slow": evaluation}
    folder = new(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unskip.training._loop.time.perf_counter", lambda: now[0])
        train(one, schedule(evaluate_every=3), folder, quiet=True)
    assert [row["samples_per_second"] for row in folder.read("metrics.jsonl")] == [8.0] * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"log_every": 0}, "log_every is 0"),
        ({"checkpoint_every": 1.5}, "checkpoint_every is 1.5"),
        ({"evaluate_every": -1}, "evaluate_every is -1"),
        ({"warmup": -1}, "warmup is -1"),
        ({"average": 1.0}, "average is 1.0"),
        ({"clip": 0.0}, "clip is 0.0"),
    ],
)
def test_schedules_that_make_no_run(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        schedule(**changes)


def test_what_the_launcher_was_told_elsewhere_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import AcceleratorState

    whole = task()
    train(whole, schedule(steps=3, clip=1e-3), new(tmp_path / "whole"), quiet=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    again, folder = task(), new(tmp_path / "again")
    train(again, schedule(steps=3, clip=1e-3), folder, quiet=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    for a, b in zip(weights(whole), weights(again), strict=True):
        assert torch.equal(a, b)
    assert (
        folder.read("metrics.jsonl")[0]["gradient_norm"]
        == RunFolder(tmp_path / "whole").read("metrics.jsonl")[0]["gradient_norm"]
    )


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "unsealed"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    whole = task()
    train(whole, schedule(), new(tmp_path / "run"), quiet=True)
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
    with pytest.warns(UnskipWarning, match="the checkpoint before it is used"):
        train(again, schedule(), folder, quiet=True)
    for a, b in zip(weights(whole), weights(again), strict=True):
        assert torch.equal(a, b)


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    new(tmp_path / "run")
    with pytest.raises(BadInput, match="unskip resume"):
        new(tmp_path / "run")
    with pytest.raises(BadInput, match="no run there"):
        RunFolder.open(tmp_path / "other")


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = new(tmp_path / "run")
    one = task()
    good = one.save

    def full(network: nn.Module, target: Any) -> None:
        if "step-12" in str(target):
            raise OSError(28, "No space left on device")
        assert good is not None
        good(network, target)

    one.save = full
    with pytest.raises(TrainingError, match=r"No space left.*that of step 6.*unskip resume"):
        train(one, schedule(), folder, quiet=True)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-6"]
    again = task()
    train(again, schedule(), folder, quiet=True)
    whole = task()
    train(whole, schedule(), new(tmp_path / "whole"), quiet=True)
    for a, b in zip(weights(whole), weights(again), strict=True):
        assert torch.equal(a, b)


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.training.test_loop import Feed, new, schedule, task
from unskip.training import RunFolder, train

one = task()
class Deadly(Feed):
    def iterate(self, start_step, stop_step, rank=0, world=1):
        for step, batch in enumerate(super().iterate(start_step, stop_step), start_step):
            if step == {at}:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch
one.feed = Deadly()
train(one, schedule(), new(Path({out!r})), quiet=True)
"""


@pytest.mark.parametrize("at", [2, 11])
def test_killed_without_a_word_it_goes_on_to_the_same_weights(tmp_path: Path, at: int) -> None:
    root = str(Path(__file__).resolve().parents[2])
    code = textwrap.dedent(KILLED).format(root=root, at=at, out=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    again, whole = task(), task()
    folder = RunFolder.open(tmp_path / "run")
    found = folder.last_checkpoint()
    assert (found is None) == (at == 2)
    train(again, schedule(), folder, quiet=True)
    train(whole, schedule(), new(tmp_path / "whole"), quiet=True)
    for a, b in zip(weights(whole), weights(again), strict=True):
        assert torch.equal(a, b)
    assert [row["step"] for row in folder.read("metrics.jsonl")] == [4, 8, 12, 16, 20]


ENDLESS = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.training.test_loop import Feed, new, schedule, task
from unskip.training import train

one = task()
class Slow(Feed):
    def iterate(self, start_step, stop_step, rank=0, world=1):
        for batch in super().iterate(start_step, stop_step):
            time.sleep(0.05)
            yield batch
one.feed = Slow()
folder = new(Path({out!r}))
print("begun", flush=True)
train(one, schedule(), folder, quiet=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_killed_at_any_moment_it_goes_on_to_the_same_weights(tmp_path: Path, seed: int) -> None:
    """In a step, between steps, or while a checkpoint or a line is written."""
    code = textwrap.dedent(ENDLESS).format(root=str(Path(__file__).resolve().parents[2]), out=str(tmp_path / "run"))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        time.sleep(random.Random(seed).uniform(0, 1.5))
        process.kill()
    again, whole = task(), task()
    train(again, schedule(), RunFolder.open(tmp_path / "run"), quiet=True)
    train(whole, schedule(), new(tmp_path / "whole"), quiet=True)
    for a, b in zip(weights(whole), weights(again), strict=True):
        assert torch.equal(a, b)


def test_a_run_after_one_on_another_device(tmp_path: Path) -> None:
    from accelerate.state import PartialState

    PartialState(cpu=True).device = torch.device("meta")  # as a run on a GPU leaves it
    train(task(), schedule(steps=2), new(tmp_path / "run"), quiet=True)
    assert PartialState().device.type == "cpu"


def test_learnt_shortcuts_are_not_sharded() -> None:
    from unskip.training._shard import Sharded

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=16, depth=1, embed_dim=24, num_heads=2)
    unskip.rewire(model, "learn:1.0", torch.zeros(1, 3, 32, 32))
    with pytest.raises(BadInput, match="a single number, which cannot be shared out"):
        Sharded(model, torch.optim.AdamW(model.parameters()), first=True)


def test_config_and_versions_are_written(tmp_path: Path) -> None:
    new(tmp_path / "run")
    data = json.loads((tmp_path / "run" / "config.json").read_text())
    assert data["config"] == {"recipe": "test"}
    assert data["versions"]["torch"] == torch.__version__


def test_notes_are_written_once(tmp_path: Path) -> None:
    one = task(stop_at=3)
    one.notes = ("two images were left out",)
    train(one, schedule(), new(tmp_path / "run"), quiet=True)
    again = task()
    again.notes = one.notes
    train(again, schedule(), RunFolder.open(tmp_path / "run"), quiet=True)
    assert [row["text"] for row in RunFolder(tmp_path / "run").read("warnings.jsonl")] == ["two images were left out"]
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # as if killed before the first
    train(task_with(one.notes), schedule(), RunFolder.open(tmp_path / "run"), quiet=True)
    assert [row["text"] for row in RunFolder(tmp_path / "run").read("warnings.jsonl")] == ["two images were left out"]


def task_with(notes: tuple[str, ...]) -> Task:
    one = task()
    one.notes = notes
    return one


def test_without_a_whole_checkpoint_the_run_starts_anew_and_says_so(tmp_path: Path) -> None:
    whole = task()
    train(whole, schedule(), new(tmp_path / "run"), quiet=True)
    folder = RunFolder.open(tmp_path / "run")
    (folder.checkpoints / "step-18" / "checksums.json").write_text("[1]")
    (folder.checkpoints / "step-20" / "checksums.json").write_text("null")
    again = task()
    with (
        pytest.warns(UnskipWarning, match="step-20.*the checkpoint before it is used"),
        pytest.warns(UnskipWarning, match="step-18.*the run starts anew"),
    ):
        train(again, schedule(), folder, quiet=True)
    for a, b in zip(weights(whole), weights(again), strict=True):
        assert torch.equal(a, b)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = new(tmp_path / "run")
    folder.append("metrics.jsonl", {"step": 1, "loss": 0.5})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert folder.read("metrics.jsonl") == [{"step": 1, "loss": 0.5}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder.rewind(1)
    assert (folder.path / "metrics.jsonl").read_text().count("\n") == 1
