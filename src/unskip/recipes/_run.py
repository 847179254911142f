"""From a config to a run: build the task, make the folder, train; and the same again from a folder."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import torch
from torch import nn

from unskip._words import count
from unskip.errors import BadInput
from unskip.recipes._config import Config
from unskip.recipes._data import Opener
from unskip.recipes._registry import RECIPES, Recipe, from_dict, recipe_of, to_dict
from unskip.recipes._shared import device_of
from unskip.training import Outcome, RunFolder, why_not
from unskip.training import train as run_loop


def train(config: Config, out: str | Path, quiet: bool = False, opener: Opener | None = None) -> Outcome:
    """Carries out a config in a new run folder. Stopped by Ctrl-C or SIGTERM it leaves a checkpoint to resume from.

    `opener` opens the images; one that keeps them spares the next run of the same data from decoding them again.
    """
    recipe = recipe_of(config)
    _refuse_not_finite(config)
    _refuse_idle(config, recipe)
    _refuse_graph(config, recipe)
    folder = RunFolder(out)
    if is_main():
        folder.check_free()  # now, and not when the images are decoded
    torch.manual_seed(config.seed)
    _tell_data(config, quiet)
    task, schedule = recipe.build(config, opener)
    if is_main():
        device = str(next(task.model.parameters()).device)
        folder = RunFolder.create(out, to_dict(recipe.name, config), device, schedule.steps)
        if not quiet:
            sys.stderr.write(f"{_summary(config, task.model, schedule.steps)} on {device}\n")
    return run_loop(task, schedule, folder, quiet)


def resume(out: str | Path, quiet: bool = False, opener: Opener | None = None) -> Outcome:
    """Goes on with a run from its last whole checkpoint, or from the start where it has none."""
    folder = RunFolder.open(out)
    data = folder.config
    config = from_dict(data)
    torch.manual_seed(config.seed)
    _tell_data(config, quiet)
    task, schedule = RECIPES[data["recipe"]].build(config, opener)
    return run_loop(task, schedule, folder, quiet)


def _tell_data(config: Config, quiet: bool) -> None:
    """Decoding a large set takes a minute, in which nothing else is to be seen."""
    if is_main() and not quiet:
        sys.stderr.write(f"opening {config.data}\n")
        sys.stderr.flush()


def _summary(config: Config, model: nn.Module, steps: int) -> str:
    """What is trained, in a line: a preset's size and arguments hold for any model and any images it is given."""
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    arguments = f" ({config.model_args})" if config.model_args else ""
    images, length = f"images of {config.size} x {config.size} from {config.data}", count(steps, "step")
    return f"{config.model}{arguments}: {millions:.3g} million parameters, {images}, {length}"


def _refuse_not_finite(config: Config) -> None:
    """A run's folder keeps its config as JSON, which has no word for such numbers."""
    for name, value in vars(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"{name} is {value}; give a finite number, or None where there is to be no limit")


def _refuse_idle(config: Config, recipe: Recipe) -> None:
    """A field that was given and has no effect is refused; one that a preset sets is not."""
    preset = recipe.presets.get(config.preset)
    before = recipe.config(**preset.fields) if preset is not None else recipe.config()
    for name, why in config.idle().items():
        value = getattr(config, name)
        if value != getattr(before, name):
            raise BadInput(f"{name} is {value!r}, which changes nothing: {why}, or leave {name} out")


def _refuse_graph(config: Config, recipe: Recipe) -> None:
    """A graph that was asked for and cannot be is refused; one that a preset asks for is left out, and the run says so.

    A run that goes on elsewhere, or is judged there, does without, too.
    """
    preset = recipe.presets.get(config.preset)
    if not config.graph or (preset is not None and preset.fields.get("graph")):
        return
    against = why_not(device_of(config.device).type, int(os.environ.get("WORLD_SIZE", "1")), config.accumulate)
    if against is not None:
        raise BadInput(f"graph is asked for, and there can be none: {against}. Leave graph out")


def is_main() -> bool:
    """Whether this process writes the folder; torchrun and accelerate number their processes so."""
    return int(os.environ.get("RANK", "0")) == 0
