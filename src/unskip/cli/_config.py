"""Turns the arguments of `unskip train` into a config.

The options are the fields of the recipe's config. Their defaults come from a preset, from the run of --config, or from
the run of --weights if it is of the same recipe.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from unskip._plugins import with_plugins
from unskip.cli import PLUGIN
from unskip.cli._options import Quiet, option
from unskip.errors import BadInput
from unskip.recipes import RECIPES, Recipe, field_groups, from_dict, is_run, recipe_of, resolve
from unskip.training import RunFolder
from unskip.wiring import Anneal, parse

_CONFIG = "The config.json of a run: its values replace the defaults of a preset."
_SEEDS = "One run for each seed, such as 0,1,2, in folders under --out, and a summary."


class Job(NamedTuple):
    """A parsed command line."""

    config: Any
    out: Path
    seeds: list[int] | None
    quiet: bool


def read(args: Sequence[str]) -> Job:
    """Parses the arguments of `train`: a recipe, then its options."""
    name, rest = (None, args) if args[0].startswith("-") else (args[0], args[1:])
    first = argparse.ArgumentParser(prog="unskip train", add_help=False, allow_abbrev=False)
    # The defaults of the other options depend on these.
    for flag in ("config", "preset", "data", "size", "model", "weights", "shortcut", "epochs", "steps"):
        first.add_argument(f"--{flag}")
    first.add_argument("-h", "--help", action="store_true")
    given = first.parse_known_args(rest)[0]
    base = (
        _from_config(name, given)
        if given.config is not None
        else _from_weights(name, given) or _from_preset(name, given)
    )
    if given.epochs is not None and given.steps is None:
        base = replace(base, steps=None)  # steps of a preset or of another run would replace the epochs
    recipe = recipe_of(base)
    groups = _groups(recipe, base)
    options = make_dataclass("Options", [(name, kind, field(default_factory=kind)) for name, kind in groups.items()])
    presets = ", ".join(recipe.presets)
    parsed: Any = tyro.cli(
        options,
        args=rest,
        prog=f"unskip train {recipe.name}",
        description=f"Presets: {presets}. Defaults shown are those of {given.config or base.preset}.\n\n{PLUGIN}",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    values = {name: value for group in groups for name, value in vars(getattr(parsed, group)).items()}
    config = replace(base, **{field.name: values[field.name] for field in fields(base) if field.name in values})
    # Reset fields that have no effect and come from the defaults: they may be those of another run.
    preset = resolve(recipe.name, base.preset, {})
    unused = [name for name in config.unused() if getattr(config, name) == getattr(base, name)]
    config = replace(config, **{name: getattr(preset, name) for name in unused})
    seeds = None if values["seeds"] is None else _seeds(values["seeds"])
    return Job(config, Path(values["out"]), seeds, values["quiet"])


def _groups(recipe: Recipe, base: Any) -> dict[str, type[Any]]:
    """A dataclass for each group of options; tyro prints each group in its own frame."""
    own: list[tuple[str, Any, Any]] = [
        ("config", Annotated[str | None, option(_CONFIG, "FILE")], None),
        ("out", Annotated[str, tyro.conf.arg(help="Folder of the run.")], f"runs/{recipe.name}-{base.preset}"),
        ("seeds", Annotated[str | None, option(_SEEDS, "SEEDS")], None),
        ("quiet", Quiet, False),
    ]
    kinds = {}
    for group, members in field_groups(recipe.config).items():
        options = [
            (each.name, Annotated[each.type, tyro.conf.arg(help=each.about)], getattr(base, each.name))
            for each in members
        ]
        if group == "run":
            options += own
        title = recipe.name if group == "recipe" else group.replace(" ", "_")
        kinds[title] = make_dataclass(title, [(name, kind, field(default=value)) for name, kind, value in options])
    return kinds


# --- Defaults ---------------------------------------------------------------------------------------------------------


def _from_preset(name: str | None, given: argparse.Namespace) -> Any:
    if name is None:
        raise BadInput("name a recipe first, as in `unskip train mae`, or give --config; unskip recipes lists them")
    if name not in RECIPES:
        resolve(name, "", {})  # raises, with the nearest name
    preset = given.preset or _preset_of_data(RECIPES[name], given)
    return resolve(name, preset, {} if given.model is None else {"model": given.model})


def _preset_of_data(recipe: Recipe, given: argparse.Namespace) -> str:
    """The preset made for --data, or the one nearest to --size. Without --data, the first preset."""
    sizes = {name: resolve(recipe.name, name, {}).size for name in recipe.presets}
    first = next(iter(sizes))
    if given.data is None or given.help:
        return first
    made_for = [name for name in sizes if resolve(recipe.name, name, {}).data == given.data]
    if made_for:
        if made_for[0] != first:
            _say(f"--data {given.data}: using preset {made_for[0]}")
        return made_for[0]
    if len({*sizes.values()}) == 1:  # such as the presets of text
        return first
    if given.size is not None:
        asked = int(given.size) if given.size.isdigit() else 1  # tyro refuses a size that is no number
        nearest = min(sizes, key=lambda name: abs(math.log(sizes[name] / max(asked, 1))))
        _say(f"--size {given.size}: using the other defaults of preset {nearest}")
        return nearest
    listed = ", ".join(f"{name} ({size})" for name, size in sizes.items())
    raise BadInput(
        f"--data {given.data}: an image size is needed. Give --preset, with image sizes in brackets: {listed}; or give "
        "--size, which uses the preset nearest in size"
    )


def _say(text: str) -> None:
    """Prints a line to stderr, in the main process only."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)


def _from_config(name: str | None, given: argparse.Namespace) -> Any:
    """The config of another run."""
    if given.preset is not None:
        raise BadInput("--config and --preset both set the defaults: leave one out")
    try:
        file = Path(given.config)
        data = json.loads((file / "config.json" if file.is_dir() else file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"--config {given.config}: cannot be read ({error}); give the config.json of a run") from error
    saved = data.get("config", data) if isinstance(data, Mapping) else None
    if not isinstance(saved, Mapping) or "recipe" not in saved:
        raise BadInput(f"--config {given.config}: it holds no config; give the config.json of a run")
    with with_plugins(data.get("plugins", [])):
        config = from_dict(saved)
        parse(config.shortcut)
    recipe = recipe_of(config).name
    if name not in (None, recipe):
        raise BadInput(f"--config {given.config}: it is a config of {recipe}, not of {name}")
    if given.model not in (None, config.model):
        config = replace(config, model_args="")  # the other run's are for its model
    return config


def _from_weights(name: str | None, given: argparse.Namespace) -> Any:
    """The config of the run or checkpoint that --weights names, without its own starting weights.

    None if the run is of another recipe, or if --preset is given.
    """
    if given.weights is None or given.preset is not None:
        return None
    path = Path(given.weights)
    run = next((folder for folder in (path, path.parent.parent) if is_run(folder)), None)
    if run is None or RunFolder.open(run).config.get("recipe") != name:
        return None
    given.config = run
    config = _from_config(name, given)
    print(f"--weights {given.weights}: using the other defaults of that run", file=sys.stderr)
    if given.shortcut is None:
        config = replace(config, shortcut=_where_it_ends(config.shortcut, path, run))
    start = ("init", "weights", "pretrained", "teacher")
    return replace(config, **{field.name: field.default for field in fields(config) if field.name in start})


def _where_it_ends(shortcut: str, weights: Path, run: Path) -> str:
    """The last rule of an annealed shortcut: annealing again would put back the skips that the weights do without."""
    rule = parse(shortcut)
    if not isinstance(rule, Anneal):
        return shortcut
    last = RunFolder.open(run).last_checkpoint() if weights == run else None
    number = (weights if last is None else last[1]).name.removeprefix("step-")
    step = int(number) if number.isdigit() else 0  # without a checkpoint the run is refused later
    if rule.steps < step:  # steps count from 0, so the last one was step - 1
        _say(f"--weights {weights}: {shortcut} has ended there, so this run has --shortcut {rule.last} from the start")
    else:
        _say(
            f"--weights {weights}: {shortcut} has not ended at step {step}; this run has --shortcut {rule.last} from "
            f'the start. To anneal again from its beginning, give --shortcut "{shortcut}"'
        )
    return str(rule.last)


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(item) for item in text.split(",")]
    except ValueError:
        raise BadInput(f"--seeds {text}: write whole numbers, as in 0,1,2") from None
    if len({*seeds}) < len(seeds):
        raise BadInput(f"--seeds {text}: the same seed twice; give each seed once")
    return seeds
