"""The registry of recipes and their presets, and configs from names and fields."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import Any, get_args, get_type_hints

import numpy
from torch import nn

from unskip._words import nearest
from unskip.errors import BadInput
from unskip.recipes._config import Config
from unskip.recipes._objective import Facts, Objective
from unskip.wiring import Shortcut


@dataclass(frozen=True)
class Preset:
    """The fields of a preset, the cost of its run, and the expected result."""

    fields: Mapping[str, Any]
    cost: str
    expected: str


@dataclass(frozen=True)
class Recipe:
    """A kind of run: its config, presets, model and objective."""

    name: str
    config: type[Config]
    presets: Mapping[str, Preset]
    build_model: Callable[[Any, Facts], nn.Module]  # (config, facts of the data); on the CPU, with random weights
    objective: Callable[[Any], Objective]  # (config)

    def __call__(self, preset: str | None = None, **overrides: Any) -> Any:
        """The config of a preset (by default the first) with some fields changed."""
        return resolve(self.name, preset or next(iter(self.presets)), overrides)


RECIPES: dict[str, Recipe] = {}  # by name; `register` adds to them


def register(recipe: Recipe) -> Recipe:
    """Registers a recipe under its name, for `unskip train NAME` and for opening its runs; returns it.

    Call it to make a config: `config = register(Recipe("mine", ...))("digits", lr=1e-3)`.
    """
    _check_parts(recipe)
    known = RECIPES.get(recipe.name)
    if known is not None and known.objective is not recipe.objective:
        raise BadInput(f"a recipe {recipe.name!r} already exists; choose another name")
    owner = next((each.name for each in RECIPES.values() if each.config is recipe.config and each is not known), None)
    if owner is not None or recipe.config is Config:  # the class of a config identifies its recipe
        whose = repr(owner) if owner else "every recipe"
        raise BadInput(
            f"recipe {recipe.name!r}: its config {recipe.config.__name__} is that of {whose}; define another class"
        )
    if not recipe.presets:
        raise BadInput(f"recipe {recipe.name!r} has no preset; give it at least one")
    names = [field.name for field in fields(recipe.config)]
    uses: dict[str, Iterable[str]] = {f"preset {name!r}": preset.fields for name, preset in recipe.presets.items()}
    for where, used in {**uses, "no_use": recipe.config.no_use}.items():
        for name in used:
            if name not in names:
                raise BadInput(
                    f"{where} of {recipe.name!r}: {recipe.config.__name__} has no field {name!r}{nearest(name, names)}"
                )
    RECIPES[recipe.name] = recipe
    return recipe


def _check_parts(recipe: Recipe) -> None:
    """Raises BadInput if training cannot use a part of a recipe."""
    who = f"recipe {recipe.name!r}"
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", recipe.name):
        raise BadInput(f"{who}: its name must be a lower-case word, such as colour")
    if not (isinstance(recipe.config, type) and issubclass(recipe.config, Config)):
        raise BadInput(f"{who}: its config must be a subclass of unskip.recipes.Config, got {recipe.config!r}")
    if "__dataclass_params__" not in vars(recipe.config):
        raise BadInput(f"{who}: decorate its config {recipe.config.__name__} with @dataclass(frozen=True)")
    for name, preset in recipe.presets.items():
        if not isinstance(preset, Preset):
            raise BadInput(f"{who}: its preset {name!r} must be a Preset(fields, cost, expected), got {preset!r}")
    if getattr(recipe.objective, "loss", None) is Objective.loss:
        raise BadInput(f"{who}: its objective has no loss(model, batch)")
    try:
        inspect.signature(recipe.build_model).bind("config", "facts")
    except TypeError as error:
        raise BadInput(f"{who}: build_model is called as build_model(config, facts): {error}") from error


def resolve(recipe: str, preset: str, overrides: Mapping[str, Any]) -> Any:
    """The config of a preset with some fields changed. Raises BadInput with the nearest names."""
    entry = RECIPES.get(recipe)
    if entry is None:
        known = ", ".join(RECIPES)
        raise BadInput(
            f"no recipe {recipe!r}{nearest(recipe, RECIPES)}; there are {known}; add others with --plugin FILE"
        )
    chosen = entry.presets.get(preset)
    if chosen is None:
        known = ", ".join(entry.presets)
        raise BadInput(f"{recipe} has no preset {preset!r}{nearest(preset, entry.presets)}; there are {known}")
    names = [field.name for field in fields(entry.config)]
    for name in overrides:
        if name not in names:
            raise BadInput(f"{recipe} has no field {name!r}{nearest(name, names)}; it has {', '.join(names)}")
    config = entry.config(preset=preset, **chosen.fields)
    hints = get_type_hints(entry.config)
    model = overrides.get("model", config.model)
    if model != config.model and not config.sizes_fit(str(model)):
        config = replace(config, model_args="")  # a preset's are for its own model
    return replace(config, **{name: _plain(name, value, hints[name]) for name, value in overrides.items()})


def _plain(name: str, value: Any, hint: Any) -> Any:
    """A value that fits in JSON: rules, paths and model_args become text."""
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, Shortcut | PurePath):
        value = str(value)
    mapping = isinstance(value, Mapping)
    if mapping and name == "model_args" and all(isinstance(item, str | int | float | None) for item in value.values()):
        return ",".join(f"{key}={item}" for key, item in value.items())
    if mapping and name == "shortcut":
        raise BadInput(f"shortcut is {value!r}; a run has a single rule; select its sites with where=")
    kinds = get_args(hint) or (hint,)
    if isinstance(value, str) and not {int, float, bool}.isdisjoint(kinds):
        raise BadInput(f"{name} is {value!r}, which is text; give {'True or False' if bool in kinds else 'a number'}")
    if str in kinds and not isinstance(value, str | None):
        raise BadInput(f"{name} is {value!r}; give text, as on the command line")
    return value


def from_dict(data: Mapping[str, Any]) -> Config:
    """The config of a run folder."""
    values = dict(data)
    recipe = RECIPES.get(values.pop("recipe", ""))
    if recipe is None:
        raise BadInput(
            f"the run's recipe is {data.get('recipe')!r}, but the recipes are {', '.join(RECIPES)}; if it is from a "
            "plugin, load that first (--plugin FILE)"
        )
    names = {field.name for field in fields(recipe.config)}
    unknown = sorted(set(values) - names)
    if unknown:
        raise BadInput(f"the run's config has fields that this version does not have: {', '.join(unknown)}")
    return recipe.config(**values)


def to_dict(config: Config) -> dict[str, Any]:
    """The config as plain data for a run folder."""
    return {"recipe": recipe_of(config).name, **{field.name: getattr(config, field.name) for field in fields(config)}}


def recipe_of(config: Config) -> Recipe:
    """The recipe of a config."""
    for recipe in RECIPES.values():
        if type(config) is recipe.config:
            return recipe
    raise BadInput(f"{type(config).__name__} is no config of a recipe; make one, such as unskip.recipes.supervised()")
