"""The step loop on a small task: its schedule, log, accumulation, notes and device."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from tests.training.tasks import Feed, new, schedule, task, weights
from torch import nn

import unskip
from unskip.errors import BadInput, TrainingError
from unskip.training import RunFolder, Task, _engine, _loop, _memory, device_of, run_task


def test_schedule_and_log(tmp_path: Path) -> None:
    folder = new(tmp_path / "run")
    outcome = run_task(task(), schedule(clip=1.0), folder, quiet=True)
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


def test_accumulation_does_not_change_steps(tmp_path: Path) -> None:
    def without_dropout() -> Task:
        one = task()
        one.model[1].p = 0.0
        return one

    once, four = without_dropout(), without_dropout()
    run_task(once, schedule(steps=5), new(tmp_path / "once"), quiet=True)
    run_task(four, schedule(steps=5, accumulate=4), new(tmp_path / "four"), quiet=True)
    for a, b in zip(weights(once), weights(four), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    rows = [RunFolder(tmp_path / name).read("metrics.jsonl")[0] for name in ("once", "four")]
    assert rows[1]["twice"] == pytest.approx(rows[0]["twice"], rel=1e-5)


def test_throughput_excludes_evaluation_time(tmp_path: Path) -> None:
    now = [0.0]

    class Slow(Feed):
        def iterate(
            self, start_step: int, stop_step: int, rank: int = 0, world: int = 1, parts: int = 1
        ) -> Iterator[Any]:
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
        run_task(one, schedule(evaluate_every=3), folder, quiet=True)
    assert [row["samples_per_second"] for row in folder.read("metrics.jsonl")] == [8.0] * 5


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 0},
        {"accumulate": 0},
        {"log_every": 0},
        {"checkpoint_every": 1.5},
        {"evaluate_every": -1},
        {"warmup": -1},
        {"ema": 1.0},
        {"clip": 0.0},
        {"precision": "fp8"},
    ],
    ids=str,
)
def test_bad_schedules_are_refused(changes: dict[str, Any]) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(BadInput, match=f"{name} .*{value}"):
        schedule(**changes)


def test_accelerate_environment_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import AcceleratorState

    whole = task()
    run_task(whole, schedule(steps=3, clip=1e-3), new(tmp_path / "whole"), quiet=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("the model is compiled"))
    again, folder = task(), new(tmp_path / "again")
    run_task(again, schedule(steps=3, clip=1e-3), folder, quiet=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    for a, b in zip(weights(whole), weights(again), strict=True):
        assert torch.equal(a, b)
    assert (
        folder.read("metrics.jsonl")[0]["gradient_norm"]
        == RunFolder(tmp_path / "whole").read("metrics.jsonl")[0]["gradient_norm"]
    )


def test_sharding_by_the_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(BadInput, match=r"sets FSDP; unset it .* --fsdp"):
        run_task(task(), schedule(steps=3), new(tmp_path / "run"), quiet=True)


def test_a_run_after_a_run_on_another_device(tmp_path: Path) -> None:
    from accelerate.state import PartialState

    PartialState(cpu=True).device = torch.device("meta")  # as a run on a GPU leaves it
    run_task(task(), schedule(steps=2), new(tmp_path / "run"), quiet=True)
    assert PartialState().device.type == "cpu"


def test_sharding_refuses_learned_shortcuts() -> None:
    from unskip.training._fsdp import Sharded

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=16, depth=1, embed_dim=24, num_heads=2)
    unskip.rewire(model, "learn:1.0", torch.zeros(1, 3, 32, 32))
    with pytest.raises(BadInput, match="is a scalar"):
        Sharded(model, torch.optim.AdamW(model.parameters()))


def test_notes_are_written_once(tmp_path: Path) -> None:
    one = task(stop_at=3)
    one.notes = ("two images were left out",)
    run_task(one, schedule(), new(tmp_path / "run"), quiet=True)
    again = task()
    again.notes = one.notes
    run_task(again, schedule(), RunFolder.open(tmp_path / "run"), quiet=True)
    assert [row["text"] for row in RunFolder(tmp_path / "run").read("warnings.jsonl")] == ["two images were left out"]
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # as if killed before the first checkpoint
    run_task(task_with(one.notes), schedule(), RunFolder.open(tmp_path / "run"), quiet=True)
    assert [row["text"] for row in RunFolder(tmp_path / "run").read("warnings.jsonl")] == ["two images were left out"]


def task_with(notes: tuple[str, ...]) -> Task:
    one = task()
    one.notes = notes
    return one


def test_an_evaluation_without_a_result_is_logged_as_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = iter([3.0, None])
    one = task()
    one.evaluations = {"rank-v1": lambda network: {"rank": next(result)}}
    outcome = run_task(one, schedule(), new(tmp_path / "run"))
    assert outcome.finished
    assert math.isnan(outcome.evaluations["rank"])
    assert [row["rank"] for row in RunFolder(tmp_path / "run").read("evals.jsonl")] == [3.0, "nan"]
    errors = capsys.readouterr().err
    assert "step 10: rank 3\n" in errors
    assert "step 20: rank nan\n" in errors
    resumed = task()
    resumed.evaluations = one.evaluations
    again = run_task(resumed, schedule(), RunFolder.open(tmp_path / "run"), quiet=True)
    assert math.isnan(again.evaluations["rank"])  # of the last evaluation, not of the last finite one


def test_results_added_later_are_not_in_the_outcome(tmp_path: Path) -> None:
    outcome = run_task(task(), schedule(), new(tmp_path / "run"), quiet=True)
    row = {"step": 20, "evaluation": "probe-mae-v1", "block": 0, "probe_mae": 0.5, "bias": 9.0}
    RunFolder.open(tmp_path / "run").append("evals.jsonl", row)
    again = run_task(task(), schedule(), RunFolder.open(tmp_path / "run"), quiet=True)
    assert again.evaluations == outcome.evaluations


def test_evaluation_does_not_touch_other_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several GPUs torch would fork the generators of all of them, with a warning."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # torch may derive it from device_count
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: pytest.fail(f"woke GPU {device}"))
    assert run_task(task(), schedule(), new(tmp_path / "run"), quiet=True).finished


class Stopped(Exception):
    """Stops a run before its engine is built."""


def test_the_gpu_of_the_model_is_current_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate, CUDA graphs and memory statistics use the current GPU, which is a stand-in here."""
    current: list[str] = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = str(device)

        def __enter__(self) -> None:
            current.append(self.device)

        def __exit__(self, *_: object) -> None:
            current.pop()

    def accelerator(kind: str) -> Any:
        raise Stopped(f"{kind} on {current}")

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(_loop, "device_of_model", lambda model: torch.device("cuda:1"))
    monkeypatch.setattr(_engine, "_accelerator", accelerator)
    with pytest.raises(Stopped, match=r"cuda on \['cuda:1'\]"):
        run_task(task(), schedule(), new(tmp_path / "run"), quiet=True)
    assert current == []


def test_peak_memory_excludes_earlier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory statistics cover the process, with its earlier runs; the GPU is a stand-in here."""
    peak = {"bytes": 5 * 2**30}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak["bytes"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.update(bytes=2**30))
    monkeypatch.setattr(_loop, "forget_peak", lambda kind: _memory.forget_peak("cuda"))
    monkeypatch.setattr(_loop, "peak_memory", lambda kind: _memory.peak_memory("cuda"))
    run_task(task(), schedule(), new(tmp_path / "run"), quiet=True)
    assert {row["peak_memory_gib"] for row in RunFolder(tmp_path / "run").read("metrics.jsonl")} == {1.0}


def test_graph_note_is_recorded_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "graph is off: a CUDA graph needs a GPU, and this run is on cpu"
    run_task(task(stop_at=3), schedule(graph=True), new(tmp_path / "run"))
    assert note in capsys.readouterr().err
    run_task(task(), schedule(graph=True), RunFolder.open(tmp_path / "run"))
    assert note in capsys.readouterr().err
    assert [row["text"] for row in RunFolder(tmp_path / "run").read("warnings.jsonl")] == [note]


@pytest.mark.parametrize(
    "returned",
    [lambda loss: loss, lambda loss: (loss[None], {}), lambda loss: (loss, {"half": 0.5}), lambda loss: None],
    ids=["no pair", "a vector", "a float to log", "nothing"],
)
def test_bad_return_values_of_the_loss_are_refused(returned: Any, tmp_path: Path) -> None:
    one = task()
    one.loss = lambda model, batch: returned(model(batch[0]).square().mean())
    with pytest.raises(TrainingError, match=r"loss\(model, batch\) must return"):
        run_task(one, schedule(), new(tmp_path / "run"), quiet=True)


def test_fp16_scales_gradients_that_would_underflow(tmp_path: Path) -> None:
    def norms(precision: str) -> list[float]:
        one = task()
        one.model[1].p = 0.0
        loss = one.loss
        one.loss = lambda model, batch: ((found := loss(model, batch))[0] * 1e-9, found[1])
        folder = new(tmp_path / precision)
        run_task(one, schedule(precision=precision, clip=1.0, steps=4), folder, quiet=True)
        return [row["gradient_norm"] for row in folder.read("metrics.jsonl")]

    assert norms("fp16") == pytest.approx(norms("float32"), rel=0.02)


def test_fp16_resumes_with_its_loss_scale(tmp_path: Path) -> None:
    whole, parts = task(), task(stop_at=9)
    run_task(whole, schedule(precision="fp16"), new(tmp_path / "whole"), quiet=True)
    folder = new(tmp_path / "parts")
    run_task(parts, schedule(precision="fp16"), folder, quiet=True)
    again = task()
    run_task(again, schedule(precision="fp16"), folder, quiet=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(again), strict=True))


def test_auto_is_the_best_available_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, mps, kind in [(False, False, "cpu"), (False, True, "mps"), (True, True, "cuda")]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert device_of("auto").type == kind
