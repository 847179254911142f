"""The supervised recipe: configs, runs on digits with every position of the knob, resume, seeds, two processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import unskip
from unskip import cli, recipes
from unskip.errors import BadInput, UnskipWarning
from unskip.training import RunFolder

# Runs of a few steps look unhealthy, and are told so.
pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")

TINY: dict[str, Any] = {
    "model_args": "depth=2,embed_dim=16,num_heads=2",
    "steps": 6,
    "batch": 32,
    "log_every": 2,
    "checkpoint_every": 4,
    "device": "cpu",
}


def tiny(**changes: Any) -> recipes.Supervised:
    return recipes.supervised("digits", **{**TINY, **changes})


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "step-6" / "model.safetensors")


def test_an_unknown_field_or_preset_is_an_error_with_the_nearest_names() -> None:
    with pytest.raises(BadInput, match="nearest: optimizer"):
        recipes.supervised("digits", optimiser="soap")
    with pytest.raises(BadInput, match="nearest: cifar"):
        recipes.supervised("cifa")
    with pytest.raises(BadInput, match="no config of a recipe"):
        unskip.train(object(), "nowhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": "skiples"}, "init is 'skiples'"),
        ({"init": "skipless:vit-huge"}, "presets are vit-base"),
        ({"teacher": "original"}, "give --weights"),
        ({"model_args": "depth"}, "name=value"),
        ({"data": "nosuch"}, "nosuch"),
    ],
)
def test_bad_fields_are_told_before_anything_is_written(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        unskip.train(tiny(**changes), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shortcut": "cut", "init": "skipless", "optimizer": "soap"},
        {"shortcut": "decay:0.6", "init": "zero", "optimizer": "muon", "average": 0.9},
        {"shortcut": "anneal:keep>cut@4", "mixup": 0.5, "crop": "pad"},
    ],
    ids=["residual", "skipless", "decayed", "annealed"],
)
def test_a_run_leaves_a_whole_folder_and_can_be_loaded(tmp_path: Path, changes: dict[str, Any]) -> None:
    outcome = unskip.train(tiny(**changes), tmp_path / "run", quiet=True)
    assert outcome.finished
    assert 0 <= outcome.evaluations["test_accuracy"] <= 1
    folder = RunFolder.open(tmp_path / "run")
    assert [row["step"] for row in folder.read("metrics.jsonl")] == [2, 4, 6]
    data = json.loads((tmp_path / "run" / "config.json").read_text())
    assert data["config"]["recipe"] == "supervised"
    assert recipes.from_dict(data["config"]) == tiny(**changes)
    model = unskip.load(tmp_path / "run" / "checkpoints" / "step-6")
    alphas = unskip.Wiring.of(model).alphas if "shortcut" in changes else [1.0] * 4
    if changes.get("shortcut") in ("cut", "anneal:keep>cut@4"):
        assert alphas == [0.0] * 4
    if changes.get("shortcut") == "decay:0.6":
        assert alphas == pytest.approx([1, 1 - 0.4 / 3, 1 - 0.8 / 3, 0.6])


def test_it_learns(tmp_path: Path) -> None:
    config = recipes.supervised("digits", device="cpu", epochs=5, optimizer="soap")
    outcome = unskip.train(config, tmp_path / "run", quiet=True)
    assert outcome.evaluations["test_accuracy"] > 0.4  # a guess has 0.1


def test_a_stopped_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    changes = {"shortcut": "cut", "init": "skipless", "optimizer": "soap", "average": 0.9}
    unskip.train(tiny(**changes), tmp_path / "whole", quiet=True)
    unskip.train(tiny(**changes), tmp_path / "cut", quiet=True)
    # As if it had been killed after the checkpoint of step 4.
    for file in (tmp_path / "cut" / "checkpoints" / "step-6").iterdir():
        file.unlink()
    (tmp_path / "cut" / "checkpoints" / "step-6").rmdir()
    outcome = unskip.resume(tmp_path / "cut", quiet=True)
    assert outcome.finished
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_skips_are_taken_away_from_a_trained_model_by_its_own_teaching(tmp_path: Path) -> None:
    unskip.train(tiny(), tmp_path / "first", quiet=True)
    saved = tmp_path / "first" / "checkpoints" / "step-6"
    config = tiny(weights=str(saved), teacher="original", shortcut="anneal:keep>cut@5", optimizer="soap")
    outcome = unskip.train(config, tmp_path / "second", quiet=True)
    assert outcome.finished
    assert RunFolder.open(tmp_path / "second").read("metrics.jsonl")[-1]["effective_decay"] == 0


@pytest.mark.parametrize("others", [["two"], pytest.param(["sharded", "resumed"], marks=pytest.mark.full)])
def test_two_processes_take_the_same_steps_as_one(tmp_path: Path, others: list[str]) -> None:
    # No dropout, float32: only the order of sums differs.
    fields = {key: value for key, value in TINY.items() if key != "device"} | {"steps": 3, "checkpoint_every": 2}
    words = [f"--{key.replace('_', '-')}={value}" for key, value in fields.items()]
    command = ["-m", "unskip", "train", "supervised", "--preset", "digits", *words, "--device=cpu", "--quiet"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    runs = {
        "one": [sys.executable, *command, "--out", str(tmp_path / "one")],
        "two": [*launch, *command, "--out", str(tmp_path / "two")],
        "sharded": [*launch, *command, "--shard", "--out", str(tmp_path / "sharded")],
        "resumed": [*launch, "-m", "unskip", "resume", str(tmp_path / "resumed"), "--quiet"],
    }
    runs = {name: runs[name] for name in ["one", *others]}
    for name, words in runs.items():
        if name == "resumed":  # the sharded run again, from its checkpoint of step 2
            shutil.copytree(tmp_path / "sharded", tmp_path / "resumed")
            shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-3")
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    found = {name: load_file(tmp_path / name / "checkpoints" / "step-3" / "model.safetensors") for name in runs}
    for key, value in found["one"].items():
        for name in runs:
            assert torch.allclose(found[name][key], value, atol=1e-5), (name, key)
    accuracies = [RunFolder.open(tmp_path / name).read("evals.jsonl")[-1]["test_accuracy"] for name in runs]
    assert max(accuracies) - min(accuracies) < 0.01


def test_the_command_line_trains_resumes_and_summarises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model-args", TINY["model_args"], "--steps", "2", "--batch", "32", "--device", "cpu", "--quiet"]
    out = str(tmp_path / "runs")
    assert cli.main(["train", "supervised", "--preset", "digits", *words, "--seeds", "0,1", "--out", out]) == 0
    assert "over seeds 0, 1" in capsys.readouterr().out
    summary = json.loads((tmp_path / "runs" / "seeds.json").read_text())
    assert len(summary["test_accuracy"]["values"]) == 2
    assert cli.main(["resume", f"{out}/seed-0", "--quiet"]) == 0
    resumed = capsys.readouterr().out
    assert "done at step 2" in resumed
    assert "test_accuracy" in resumed
    assert cli.main(["train", "supervised", *words, "--out", f"{out}/seed-0"]) == 2
    assert "unskip resume" in capsys.readouterr().err
    assert cli.main(["train", "supervised", "--optimiser", "soap"]) == 2
    assert "nearest: optimizer" in capsys.readouterr().err
    assert cli.main(["resume", out]) == 2
    assert cli.main(["recipes"]) == 0
    assert "vit-b16" in capsys.readouterr().out


def test_a_run_that_learns_nothing_says_so(tmp_path: Path) -> None:
    with pytest.warns(UnskipWarning, match="flat-loss"):
        unskip.train(tiny(lr=1e-9), tmp_path / "run", quiet=True)
    assert "flat-loss" in {row["warning"] for row in RunFolder.open(tmp_path / "run").read("warnings.jsonl")}
