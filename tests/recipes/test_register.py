"""What a recipe of one's own is refused for; tests/test_plugins.py trains one from a file out of the tree."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from unskip.errors import BadInput
from unskip.recipes import RECIPES, Config, Objective, Preset, Recipe, register


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
    with pytest.raises(BadInput, match=r"'digits' of 'mine'.*'bach'.*batch"):
        register(Recipe("mine", Mine, {"digits": Preset({"bach": 1}, "", "")}, mae.build_model, Objective))
    assert "mine" not in RECIPES
