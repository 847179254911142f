"""From a config to a run: build the task, make the folder, train; and the same again from a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from unskip.recipes._registry import RECIPES, from_dict, recipe_of, to_dict
from unskip.training import Outcome, RunFolder
from unskip.training import train as run_loop


def train(config: Any, out: str | Path, quiet: bool = False) -> Outcome:
    """Carries out a config in a new run folder. Stopped by Ctrl-C or SIGTERM it leaves a checkpoint to resume from."""
    recipe = recipe_of(config)
    torch.manual_seed(config.seed)
    task, schedule = recipe.build(config)
    folder = RunFolder(out)
    if is_main():
        device = str(next(task.model.parameters()).device)
        folder = RunFolder.create(out, to_dict(recipe.name, config), device, schedule.steps)
    return run_loop(task, schedule, folder, quiet)


def resume(out: str | Path, quiet: bool = False) -> Outcome:
    """Goes on with a run from its last whole checkpoint, or from the start where it has none."""
    folder = RunFolder.open(out)
    data = folder.config
    config = from_dict(data)
    torch.manual_seed(config.seed)
    task, schedule = RECIPES[data["recipe"]].build(config)
    return run_loop(task, schedule, folder, quiet)


def is_main() -> bool:
    """Whether this process writes the folder; torchrun and accelerate number their processes so."""
    return int(os.environ.get("RANK", "0")) == 0
