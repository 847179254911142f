"""A recipe of one's own, in a file out of the tree and a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from unskip.errors import BadInput
from unskip.recipes import RECIPES, Config, Objective, Preset, Recipe, register

PLUGIN = """
from dataclasses import dataclass
import timm
from unskip.recipes import Config, Objective, Preset, Recipe, register

@dataclass(frozen=True)
class Colour(Config):
    power: float = 2.0  # of the error

class ColourObjective(Objective):
    def loss(self, model, batch):
        error = (model(batch[0]) - batch[0].mean((2, 3))).abs() ** self.config.power
        return error.mean(), {}

def build_model(config, facts):
    options = {"img_size": facts.size, "patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", in_chans=facts.channels, num_classes=facts.channels, **options)

presets = {"digits": Preset({"data": "digits", "size": 8, "batch": 32, "steps": 4, "device": "cpu"}, "seconds", "none")}
register(Recipe("colour", Colour, presets, build_model, ColourObjective))
"""


def unskip_in(folder: Path, *args: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "unskip", *args]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_it_trains_resumes_and_opens(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    plugin = ["--plugin", "mine.py"]
    words = ["train", "colour", "--out", "run", "--power", "1", "--shortcut", "cut", "--init", "skipless", "--quiet"]
    code, _, err = unskip_in(tmp_path, *words, *plugin)
    assert code == 0, err
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["config"]["power"] == 1
    assert record["plugins"] == [str(tmp_path / "mine.py")]
    code, out, err = unskip_in(tmp_path, "audit", "run", "--json", *plugin)
    assert code == 0, err
    assert len(json.loads(out)["sites"]) == 4
    code, _, err = unskip_in(tmp_path, "audit", "run")
    assert code == 2
    assert "mine.py" in err
    assert unskip_in(tmp_path, "resume", "run", "--quiet", *plugin)[0] == 0


def test_names_and_presets_are_checked() -> None:
    @dataclass(frozen=True)
    class Mine(Config):
        pass

    made = {"digits": Preset({}, "", "")}
    mae = RECIPES["mae"]
    with pytest.raises(BadInput, match="mae"):
        register(Recipe("mae", Mine, made, mae.build_model, Objective))
    with pytest.raises(BadInput, match="mae"):
        register(Recipe("mae", mae.config, made, mae.build_model, Objective))
    for config in (mae.config, Config):  # a run is found by the class of its config
        with pytest.raises(BadInput, match=config.__name__):
            register(Recipe("mine", config, made, mae.build_model, Objective))
    with pytest.raises(BadInput, match="preset"):
        register(Recipe("mine", Mine, {}, RECIPES["mae"].build_model, Objective))
    assert "mine" not in RECIPES
