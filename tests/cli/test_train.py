"""`unskip train`, `resume` and `recipes`: from arguments to configs and runs."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from unskip import cli, recipes
from unskip.recipes import RECIPES, field_groups
from unskip.recipes._fields import Field
from unskip.training import Outcome

SMALL = ["--model-args", "depth=2,embed_dim=16,num_heads=2", "--steps", "2", "--batch", "32", "--device", "cpu"]


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The configs that were to be trained; nothing is."""
    result = []

    def train(config: Any, out: Path, *_: object) -> Outcome:
        result.append(config)
        return Outcome(out, 1, True, {})

    monkeypatch.setattr(recipes, "train", train)
    monkeypatch.chdir(tmp_path)
    return result


# --- Options ---


def test_epochs_replace_the_steps_of_another_run(configs: list[Any], tmp_path: Path) -> None:
    saved = recipes.to_dict(recipes.supervised("digits", steps=20))
    (tmp_path / "config.json").write_text(json.dumps(saved))
    cli.main(["train", "supervised", "--config", "config.json", "--epochs", "3"])
    cli.main(["train", "supervised", "--config", "config.json", "--epochs", "3", "--steps", "7"])
    assert [(config.epochs, config.steps) for config in configs] == [(3, None), (3, 7)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_field_is_an_option_in_one_group(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    groups, no_use = field_groups(RECIPES[recipe].config), RECIPES[recipe].config.no_use
    names = [field.name for members in groups.values() for field in members]
    assert sorted(names) == sorted({field.name for field in fields(RECIPES[recipe].config)} - no_use.keys())
    assert {"data", "model and shortcut", "optimisation", "evaluation", "run"} <= {*groups}
    assert [field.name for members in groups.values() for field in members if not field.about] == []
    assert cli.main(["train", recipe, "--help"]) == 0
    out = capsys.readouterr().out
    for name in (*names, "out", "seeds", "config", "quiet"):
        assert f"--{name.replace('_', '-')}" in out
    assert [name for name in no_use if re.search(rf"--{name.replace('_', '-')}\b(?!-)", out)] == []
    assert "run options" in out


def test_fields_of_a_recipe_from_outside_have_a_group_and_a_description() -> None:
    @dataclass(frozen=True)
    class Mine(recipes.Config):
        noise: float = 0.5  # standard deviation of the noise
        lr: float = 1.0

    groups = field_groups(Mine)
    assert groups["recipe"] == [Field("noise", float, "standard deviation of the noise")]
    assert "lr" in [each.name for each in groups["optimisation"]]


def test_options_presets_and_defaults(configs: list[Any]) -> None:
    assert cli.main(["train", "supervised", "--preset", "cifar", "--lr=0.5", "--no-flip", "--clip", "None"]) == 0
    assert configs == [recipes.supervised("cifar", lr=0.5, flip=False, clip=None)]


def test_arguments_of_a_presets_model_are_for_that_model_alone(configs: list[Any]) -> None:
    other = "timm:deit_tiny_patch16_224"
    assert cli.main(["train", "supervised", "--model", other]) == 0
    assert cli.main(["train", "supervised", f"--model={other}", "--model-args", "depth=2"]) == 0
    assert [config.model_args for config in configs] == ["", "depth=2"]


def test_data_of_its_own_needs_a_size(configs: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "supervised", "--data", "photos"]) == 2
    err = capsys.readouterr().err
    assert "--preset" in err
    assert "--size" in err
    assert "cifar (32)" in err
    assert cli.main(["train", "supervised", "--data", "photos", "--size", "48"]) == 0
    assert "tiny-imagenet" in capsys.readouterr().err  # patches of 2 would make 576 tokens of such an image
    assert cli.main(["train", "supervised", "--data", "photos", "--preset", "cifar"]) == 0
    assert [(config.preset, config.size) for config in configs] == [("tiny-imagenet", 48), ("cifar", 32)]


def test_data_that_a_preset_is_made_for_choose_it(configs: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "supervised", "--data", "cifar10"]) == 0
    assert configs == [recipes.supervised("cifar")]
    assert "preset cifar" in capsys.readouterr().err
    assert cli.main(["train", "supervised", "--data", "digits"]) == 0
    assert configs[1] == recipes.supervised("digits")
    assert capsys.readouterr().err == ""


def test_a_config_is_run_again_with_changes(configs: list[Any], tmp_path: Path) -> None:
    first = recipes.mae("digits", shortcut="cut", lr=0.25, model_args="depth=2")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"config": {"recipe": "mae", **vars(first)}, "device": "cpu"}))
    assert cli.main(["train", "--config", str(file), "--lr", "0.5", "--out", "again"]) == 0
    assert cli.main(["train", "mae", "--config", str(file), "--model", "timm:vit_small_patch16_224"]) == 0
    assert configs[0] == recipes.mae("digits", shortcut="cut", lr=0.5, model_args="depth=2")
    assert (configs[1].shortcut, configs[1].model_args) == ("cut", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["supervisd"], "nearest: supervised"),
        (["supervised", "--optimiser", "soap"], "--optimizer"),
        (["supervised", "--preset", "cifer"], "nearest: cifar"),
        (["supervised", "--seeds", "0,0"], "the same seed twice"),
        (["supervised", "--seeds", "a"], "whole numbers"),
        (["--lr", "3"], "name a recipe"),
        (["--config", "no.json"], "no.json"),
        (["supervised", "--config", "mae.json"], "mae.json: it is a config of mae"),
        (["--config", "list.json"], "holds no config"),
        (["--config", "mae.json", "--preset", "digits"], "leave one out"),
    ],
    ids=str,
)
def test_bad_arguments(
    arguments: list[str], words: str, configs: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mae.json").write_text('{"recipe": "mae"}')
    (tmp_path / "list.json").write_text("[]")
    assert cli.main(["train", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, configs) == ("", [])
    assert words in err


# --- Runs ---


def test_several_seeds_that_were_stopped_are_told_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipes, "train", lambda config, out, *_: Outcome(out, 1, False, {}))
    assert cli.main(["train", "supervised", "--seeds", "0,1", "--out", str(tmp_path / "runs")]) == 130
    message = capsys.readouterr()
    assert "seed-0: stopped at step 1" in message.out
    assert "seed-1" not in message.out
    assert "the same command" in message.err


def test_train_resume_and_summarise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "runs")
    command = ["train", "supervised", *SMALL, "--quiet", "--seeds", "0,1", "--out", out]
    assert cli.main(command) == 0
    assert "over seeds 0, 1" in capsys.readouterr().out
    summary = json.loads((tmp_path / "runs" / "seeds.json").read_text())
    assert len(summary["test_accuracy"]["values"]) == 2
    assert cli.main(["resume", f"{out}/seed-0", "--quiet"]) == 0
    resumed = capsys.readouterr().out
    assert "done at step 2" in resumed
    assert "test_accuracy" in resumed
    # The same command again goes on with what is missing, and so does `resume` with the folder of all seeds.
    for again in (command, ["resume", out, "--quiet"]):
        shutil.rmtree(tmp_path / "runs" / "seed-1" / "checkpoints")
        (tmp_path / "runs" / "seeds.json").unlink()
        assert cli.main(again) == 0
        assert json.loads((tmp_path / "runs" / "seeds.json").read_text()) == summary
    assert cli.main(["train", "supervised", *SMALL, "--out", f"{out}/seed-0"]) == 2
    assert "unskip resume" in capsys.readouterr().err
    assert cli.main(["resume", str(tmp_path / "nowhere")]) == 2


def test_a_run_that_was_stopped_exits_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Outcome(tmp_path, 3, False, {})
    monkeypatch.setattr(recipes, "train", lambda *_: stopped)
    monkeypatch.setattr(recipes, "resume", lambda *_, **__: stopped)
    assert cli.main(["train", "supervised", "--out", str(tmp_path / "run")]) == 130
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    assert cli.main(["resume", str(tmp_path / "run")]) == 130


def test_recipes_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for recipe in RECIPES.values() for name in (recipe.name, *recipe.presets))


def test_a_launched_process_ends_with_its_code_and_all_it_said() -> None:
    command = [sys.executable, "-m", "unskip", "no-such-command"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LOCAL_RANK": "0"})
    assert done.returncode == 2
    assert "no-such-command" in done.stderr
