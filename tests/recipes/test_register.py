"""Invalid custom recipes are refused; tests/test_plugins.py trains a valid one from a plugin file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import unskip
from unskip.errors import BadInput
from unskip.recipes import RECIPES, Config, Objective, Preset, Recipe, register


def test_names_and_presets_are_checked() -> None:
    @dataclass(frozen=True)
    class Mine(Config):
        pass

    made = {"digits": Preset({}, "", "")}
    mae = RECIPES["mae"]
    with pytest.raises(BadInput, match="mae"):
        register(Recipe("mae", Mine, made, mae.build_model, Nothing))
    with pytest.raises(BadInput, match="mae"):
        register(Recipe("mae", mae.config, made, mae.build_model, Nothing))
    for config in (mae.config, Config):  # a config class belongs to one recipe
        with pytest.raises(BadInput, match=config.__name__):
            register(Recipe("mine", config, made, mae.build_model, Nothing))
    with pytest.raises(BadInput, match="preset"):
        register(Recipe("mine", Mine, {}, RECIPES["mae"].build_model, Nothing))
    with pytest.raises(BadInput, match=r"'digits' of 'mine'.*'bach'.*batch"):
        register(Recipe("mine", Mine, {"digits": Preset({"bach": 1}, "", "")}, mae.build_model, Nothing))

    @dataclass(frozen=True)
    class Idle(Config):
        no_use: ClassVar[dict[str, str]] = {"bach": "it has no batches"}

    with pytest.raises(BadInput, match=r"no_use of 'mine'.*'bach'.*batch"):
        register(Recipe("mine", Idle, made, mae.build_model, Nothing))
    assert "mine" not in RECIPES


class Nothing(Objective):
    def loss(self, model: object, batch: object) -> object:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Bad Name"}, "lower-case"),
        ({"config": type("Plain", (Config,), {})}, "@dataclass"),
        ({"presets": {"digits": {"lr": 1.0}}}, "'digits' must be a Preset"),
        ({"objective": Objective}, "no loss"),
        ({"build_model": lambda config: None}, r"build_model\(config, facts\)"),
    ],
)
def test_invalid_parts_of_a_recipe_are_named(changes: dict[str, Any], message: str) -> None:
    @dataclass(frozen=True)
    class Mine(Config):
        pass

    parts = {"name": "mine", "config": Mine, "presets": {"digits": Preset({}, "", "")}}
    parts |= {"build_model": lambda config, facts: None, "objective": Nothing}
    with pytest.raises(BadInput, match=message):
        register(Recipe(**(parts | changes)))
    recipe = register(Recipe(**parts))
    try:
        with pytest.raises(BadInput, match="build_model returns NoneType"):
            unskip.train(recipe("digits", device="cpu", steps=1), "nowhere", quiet=True)
    finally:
        del RECIPES["mine"]
