"""Plugins from files, modules and entry points; runs and saved models record the plugins that they need."""

import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.commands import unskip_in

from unskip import _plugins, cli
from unskip._plugins import load_installed, load_plugins, loaded_plugins, plugin_of, with_plugins
from unskip.errors import BadInput, LoadError, UnskipWarning
from unskip.training import RunFolder
from unskip.wiring._record import wiring_of


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_plugins, "_LOADED", {})
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if "plugin" in name:
            del sys.modules[name]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_plugin.py").write_text("print('imported')\n")
    return tmp_path / "my_plugin.py"


def test_a_plugin_file_is_imported_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_plugins(["my_plugin.py", str(file)])
    load_plugins(["my_plugin.py"])
    assert capsys.readouterr().out == "imported\n"
    assert loaded_plugins() == [str(file)]


def test_a_plugin_module(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_plugins(["my_plugin"])
    assert capsys.readouterr().out == "imported\n"
    assert loaded_plugins() == ["my_plugin"]


@pytest.mark.parametrize("name", ["no_plugin.py", "no_plugin", "broken_plugin.py"])
def test_a_plugin_that_cannot_be_imported_is_refused(name: str, file: Path) -> None:
    (file.parent / "broken_plugin.py").write_text("1 / 0\n")
    with pytest.raises(BadInput, match=name):
        load_plugins([name])
    assert loaded_plugins() == []


def test_plugins_of_installed_packages(file: Path) -> None:
    info = file.parent / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[unskip]\ngood = my_plugin\nbad = no_plugin\n")
    with pytest.warns(UnskipWarning, match=r"no_plugin.*bad of mine"):
        load_installed()
    assert loaded_plugins() == ["my_plugin"]


def test_every_command_takes_plugins(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--plugin", "my_plugin.py", "recipes", "--plugin=my_plugin"]) == 0
    assert loaded_plugins() == [str(file), "my_plugin"]
    assert cli.main(["audit", "timm:test_vit", "--plugin", "no_plugin.py"]) == 2
    assert "no_plugin.py" in capsys.readouterr().err
    assert cli.main(["recipes", "--plugin"]) == 2


def test_errors_name_the_recorded_plugin_and_import_it_only_with_trust(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadInput, match=r"no rule halve.*--plugin .*my_plugin\.py"), with_plugins([str(file)]):
        raise BadInput("no rule halve")
    assert capsys.readouterr().out == ""
    with pytest.raises(BadInput) as raised, with_plugins([str(file)], trust=True):
        raise BadInput("another reason")
    assert capsys.readouterr().out == "imported\n"
    assert str(raised.value) == "another reason"


def test_a_recorded_plugin_whose_file_is_missing(file: Path) -> None:
    gone = str(file.with_name("old_plugin.py"))
    with with_plugins([gone], trust=True):
        pass  # no error, because another file may register the same names
    with (
        pytest.raises(BadInput, match=r"halve.*old_plugin\.py: no such file"),
        with_plugins([gone], trust=True),
    ):
        raise BadInput("no rule halve")


def test_a_plugin_imported_by_the_user_is_not_imported_again(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_module("my_plugin")
    assert plugin_of("my_plugin") == [str(file)]
    with with_plugins([str(file)], trust=True):
        assert capsys.readouterr().out == "imported\n"  # once
    assert plugin_of("__main__") == plugin_of("unskip.recipes._mae") == []


# --- Plugins outside of the repository, in a separate process ---

HALVE = """
from dataclasses import dataclass
import unskip

@unskip.wiring.register
@dataclass(frozen=True)
class Halve(unskip.Shortcut):
    factor: float = 0.5
    name = "halved"
    form = "halved:0.5"
    numbers = ("factor",)

    def __post_init__(self):
        if self.factor > 1:
            raise ValueError("the factor is above 1")

    def weights_at(self, count, runs, step):
        return [(self.factor**site, 1.0) for site in range(count)]
"""


def test_a_custom_shortcut_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(HALVE)
    audit = ["audit", "timm:test_vit", "--shortcut", "halved:0.25", "--json"]
    code, out, _ = unskip_in(tmp_path, *audit, "--plugin", "rules.py")
    data: Any = json.loads(out)
    assert code == 0
    assert [site["alpha"] for site in data["shortcut"]["sites"]] == [0.25**site for site in range(len(data["sites"]))]
    code, out, err = unskip_in(tmp_path, *audit)
    assert (code, out) == (2, "")
    assert "halve" in err
    code, out, err = unskip_in(tmp_path, "audit", "timm:test_vit", "--shortcut", "halved:2", "--plugin", "rules.py")
    assert (code, out) == (2, "")
    assert "above 1" in err
    assert "Traceback" not in err


def test_a_saved_rule_whose_module_is_missing() -> None:
    with pytest.raises(LoadError, match="no_such_module"):
        wiring_of({"plan": [{"defined_in": {"elsewhere": "no_such_module"}}]}, "unskip.json", trust=True)


RECIPE = """
from dataclasses import dataclass
import torch
from torch import nn
import unskip
from unskip.recipes import Config, Objective, Preset, Recipe, register

@dataclass(frozen=True)
class Denoise(Config):
    noise: float = 0.5  # standard deviation of the noise
    width: int = 16

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.f(x)

class Denoiser(Objective):
    def loss(self, model, batch):
        images, _ = batch
        noisy = images + self.config.noise * torch.randn_like(images)
        return (model(noisy) - images.flatten(1)).square().mean(), {}

def build_model(config, facts):
    pixels = facts.channels * facts.size**2
    blocks = [Block(config.width) for _ in range(2)]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, config.width), *blocks, nn.Linear(config.width, pixels))

fields = {"size": 8, "batch": 64, "steps": 3, "device": "cpu", "health": False}
register(Recipe("denoise", Denoise, {"digits": Preset(fields, "seconds", "nothing")}, build_model, Denoiser))
"""


def test_a_run_records_its_custom_recipe_and_shortcut(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(HALVE)
    (tmp_path / "recipe.py").write_text(RECIPE)
    plugins = ["--plugin", "rules.py", "--plugin", "recipe.py"]
    options = ["--shortcut", "halved:0.5", "--noise", "0.1", "--out", "run", "--quiet"]
    code, _, err = unskip_in(tmp_path, "train", "denoise", *options, *plugins)
    assert code == 0, err
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert [Path(name).name for name in record["plugins"]] == ["rules.py", "recipe.py"]
    assert record["config"]["noise"] == 0.1
    assert re.search(r"run --plugin \S*rules.py --plugin \S*recipe.py", RunFolder(tmp_path / "run").resume_command)
    code, _, err = unskip_in(tmp_path, "resume", "run")
    assert code == 2
    assert re.search(r"--plugin \S*rules.py --plugin \S*recipe.py", err)
    code, _, err = unskip_in(tmp_path, "report", "run")
    assert code == 0
    assert re.search(r"warning: run: not measured: .*--plugin \S*recipe.py", err)
    for allowed in (plugins, ["--trust"]):
        code, out, err = unskip_in(tmp_path, "audit", "run", "--json", *allowed)
        assert code == 0, err
        assert [site["alpha"] for site in json.loads(out)["shortcut"]["sites"]] == [1.0, 0.5]


EVALUATOR = """
import unskip

@unskip.evals.register("apart-v1", needs="features", about="Mean distance of features to their mean.")
def spread(train, test):
    return {"spread": float((test.features - test.features.mean(0)).norm(dim=1).mean())}
"""


def test_a_custom_evaluator_on_a_folder_of_seeds(tmp_path: Path) -> None:
    (tmp_path / "spread.py").write_text(EVALUATOR)
    options = "--model-args depth=1,embed_dim=16,num_heads=2 --steps 2 --batch 32 --device cpu --quiet".split()
    code, _, err = unskip_in(tmp_path, "train", "supervised", *options, "--seeds", "0,1", "--out", "runs")
    assert code == 0, err
    evaluate = ["eval", "runs", "--protocol", "apart-v1", "--plugin", "spread.py", "--json"]
    code, out, err = unskip_in(tmp_path, *evaluate)
    assert code == 0, err
    values = [run["results"][0]["spread"] for run in json.loads(out)["runs"]]
    assert len(values) == 2
    for seed, value in enumerate(values):
        row = json.loads((tmp_path / "runs" / f"seed-{seed}" / "evals.jsonl").read_text().splitlines()[-1])
        assert (row["evaluation"], row["spread"]) == ("apart-v1", value)
        assert row["n"] > 0
