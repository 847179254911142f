"""Removing skips from a trained model by distillation: loss, teacher, exact resume, and the command."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.commands import on_ranks
from torch import Tensor, nn

import unskip
from unskip import cli, recipes
from unskip.errors import BadInput
from unskip.recipes._distillation import Teacher
from unskip.training import COLLAPSE, RunFolder

pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")  # short runs give health warnings

TINY: dict[str, Any] = {
    "model_args": "depth=2,embed_dim=16,num_heads=2",
    "steps": 6,
    "batch": 32,
    "log_every": 2,
    "checkpoint_every": 4,
    "device": "cpu",
}
STUDENT: dict[str, Any] = {"teacher": "original", "shortcut": "anneal:keep>cut@5,last-first"}


def tiny(**changes: Any) -> recipes.Supervised:
    return recipes.supervised("digits", **{**TINY, **changes})


def weights(run: Path, step: int = 6) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"step-{step}" / "model.safetensors")


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("original") / "run"
    unskip.train(tiny(shortcut="decay:0.5", ema=0.5, drop_path=0.2, smoothing=0.1), run, quiet=True)
    return run


def test_the_loss_is_the_divergence_at_a_temperature() -> None:
    student, target = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    teacher = Teacher(nn.Linear(1, 1), temperature=3.0)
    p, q = (target / 3).softmax(-1), (student / 3).softmax(-1)
    expected = 9 * (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(teacher.loss(student, target), expected)
    assert float(teacher.loss(target, target)) == pytest.approx(0, abs=1e-12)


def test_labels_have_the_remaining_weight_of_the_loss(original: Path) -> None:
    settings = {"weights": str(original), "drop_path": 0.2, "mixup": 0.5, "smoothing": 0.1}
    found = []
    for share in (0.0, 0.25, 1.0):
        more = {"smoothing": 0.0} if share == 1 else {}
        task, _ = recipes.build_task(tiny(**settings | more, teacher="original", distillation=share))
        task.model.eval()
        found.append(task.loss(task.model, next(iter(task.feed.iterate(0, 1))))[0])
    torch.testing.assert_close(found[1], 0.75 * found[0] + 0.25 * found[2])
    plain, _ = recipes.build_task(tiny(**settings))
    plain.model.eval()
    torch.testing.assert_close(plain.loss(plain.model, next(iter(plain.feed.iterate(0, 1))))[0], found[0])


def test_the_teacher_is_the_original_model_with_skips_and_ema_weights(original: Path) -> None:
    """It equals the model of unskip.load, for any mode and shortcut of the student."""
    task, _ = recipes.build_task(tiny(**STUDENT, weights=str(original), drop_path=0.2))
    images = task.sample
    expected = unskip.load(original).eval()(images)
    objective: Any = task.loss.__self__  # type: ignore[attr-defined]
    task.model.train()
    for wiring in task.wirings:
        wiring.step(5)
    torch.testing.assert_close(objective.teacher(images), expected)
    assert not torch.allclose(task.model(images), expected, atol=1e-2)


MIXED = {"ema": 0.9, "mixup": 0.5, "cutmix": 1.0, "distillation": 0.5}


@pytest.mark.parametrize("more", [MIXED, {"precision": "bf16"}], ids=["mixed", "bf16"])
def test_a_run_resumes_exactly_from_its_folder_alone(original: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    shutil.copytree(original, tmp_path / "first")
    config = tiny(**STUDENT, **more, weights=str(tmp_path / "first"), drop_path=0.2, optimizer="soap")
    assert unskip.train(config, tmp_path / "whole", quiet=True).finished
    shutil.rmtree(tmp_path / "first")
    loaded = unskip.load(tmp_path / "whole")
    assert unskip.Wiring.of(loaded).alphas == [0.0] * 4
    for steps in ((6,), (4, 6)):  # killed after the checkpoint of step 4, and before any
        run = tmp_path / f"killed-{len(steps)}"
        shutil.copytree(tmp_path / "whole", run)
        for step in steps:
            shutil.rmtree(run / "checkpoints" / f"step-{step}")
        assert unskip.resume(run, quiet=True).finished
        assert same(weights(run), weights(tmp_path / "whole"))
    rows = RunFolder.open(tmp_path / "whole").read("metrics.jsonl")
    assert rows[-1]["effective_decay"] == 0
    assert 0 <= rows[-1]["teacher_agreement"] <= 1


def test_a_run_without_a_teacher_resumes_without_its_initial_weights(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "first")
    unskip.train(tiny(weights=str(tmp_path / "first"), drop_path=0.2), tmp_path / "run", quiet=True)
    shutil.rmtree(tmp_path / "first")
    whole = weights(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-6")
    unskip.resume(tmp_path / "run", quiet=True)
    assert same(weights(tmp_path / "run"), whole)


def test_weights_are_not_initialised_again(original: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="init is 'skipless', which has no effect: weights replace it"):
        unskip.train(tiny(weights=str(original), init="skipless"), tmp_path / "run", quiet=True)
    assert "orthogonal (in a run without weights)" in COLLAPSE  # the advice on rank collapse
    assert "init" not in recipes.supervised("cifar-skipless", weights=str(original), init="default").unused()


def test_weights_of_another_dtype_are_trained_in_float32(tmp_path: Path) -> None:
    task, _ = recipes.build_task(tiny())
    unskip.save(task.model.bfloat16(), tmp_path / "half")
    again, _ = recipes.build_task(tiny(weights=str(tmp_path / "half")))
    assert {value.dtype for value in again.model.parameters()} == {torch.float32}
    saved = task.model.state_dict()
    assert all(torch.equal(value, saved[name].float()) for name, value in again.model.state_dict().items())


@pytest.mark.full
@pytest.mark.parametrize("fsdp", [False, True])
def test_distillation_on_two_processes_matches_one(original: Path, tmp_path: Path, fsdp: bool) -> None:
    config = partial(tiny, **STUDENT, weights=str(original), drop_path=0.2, ema=0.9, health=False)
    unskip.train(config(), tmp_path / "one", quiet=True)
    on_ranks(2, tmp_path, lambda: unskip.train(config(fsdp=fsdp), tmp_path / "two", quiet=True) and None)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.allclose(two[name], value, atol=1e-5) for name, value in one.items())


@pytest.mark.full
def test_a_compiled_student_has_a_compiled_teacher(original: Path, tmp_path: Path) -> None:
    config = partial(tiny, **STUDENT, weights=str(original), drop_path=0.2)
    for name, compiled in (("eager", False), ("compiled", True)):
        unskip.train(config(compile=compiled), tmp_path / name, quiet=True)
    losses = [
        [row["loss"] for row in RunFolder(tmp_path / name).read("metrics.jsonl")] for name in ("eager", "compiled")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("given", ["", "checkpoints/step-6"])
def test_model_and_data_are_taken_from_the_run(
    original: Path, tmp_path: Path, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "supervised", "--weights", str(original / given), "--shortcut", "anneal:keep>cut@1"]
    out = tmp_path / "run"
    assert cli.main([*command, "--teacher", "original", "--ema", "None", "--steps", "2", "--out", str(out)]) == 0
    assert "using the other defaults of that run" in capsys.readouterr().err
    config, before = (RunFolder.open(run).config for run in (out, original))
    changed = {name for name in config if config[name] != before[name]}
    assert changed == {
        "weights",
        "shortcut",
        "teacher",
        "steps",
        "ema",
        "smoothing",
    }  # smoothing has no effect with a teacher


def test_a_run_goes_on_from_an_anneal_with_its_last_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Skips that the weights do without are not put back, whether the anneal had ended or not."""
    rule = "anneal:keep>cut@4"
    unskip.train(tiny(shortcut=rule), tmp_path / "run", quiet=True)

    def shortcut(weights: str, *options: str) -> tuple[str, str, set[float]]:
        out = tmp_path / "next"
        command = ["train", "supervised", "--weights", str(tmp_path / weights), "--quiet", "--out", str(out), *options]
        assert cli.main(command) == 0
        decays = {row["effective_decay"] for row in RunFolder.open(out).read("metrics.jsonl")}
        text = RunFolder.open(out).config["shortcut"]
        shutil.rmtree(out)
        return text, capsys.readouterr().err, decays

    text, note, decays = shortcut("run")
    assert (text, decays) == ("cut", {0.0})
    assert f"{rule} has ended there, so this run has --shortcut cut" in note
    text, note, decays = shortcut("run/checkpoints/step-4")
    assert (text, decays) == ("cut", {0.0})
    assert f"{rule} has not ended at step 4; this run has --shortcut cut from the start. To anneal" in note
    text, note, decays = shortcut("run", "--shortcut", rule)
    assert (text, max(decays)) == (rule, 0.75**4)
    assert "ended" not in note
