"""Trains a config in a new run folder, and resumes a run."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unskip._plugins import loaded_plugins, plugin_of, with_plugins
from unskip._words import count
from unskip.data import absolute_source
from unskip.errors import BadInput
from unskip.recipes._build import build_task
from unskip.recipes._config import Config
from unskip.recipes._data import Opener, data_changes
from unskip.recipes._registry import Recipe, from_dict, recipe_of, to_dict
from unskip.training import Outcome, RunFolder, device_of, is_main, run_task, tracker_names, why_not
from unskip.wiring import Shortcut, parse


def train(config: Config, out: str | Path, quiet: bool = False, opener: Opener | None = None) -> Outcome:
    """Trains a config in a new run folder. If stopped by Ctrl-C or SIGTERM, it writes a checkpoint to resume from.

    `opener` opens the images; with a cached one, the next run on the same data does not decode them again.
    """
    recipe = recipe_of(config)
    config = absolute_paths(config)
    _refuse_not_finite(config)
    _refuse_unused(config, recipe)
    _refuse_graph(config, recipe)
    if config.tracker is not None:
        tracker_names(config.tracker)
    folder = RunFolder(out)
    if is_main():
        folder.check_free()  # before the images are decoded
    torch.manual_seed(config.seed)
    _announce_data(config, quiet)
    task, schedule = build_task(config, opener)
    if is_main():
        device = str(next(task.model.parameters()).device)
        modules = [recipe.objective.__module__, *_modules(parse(config.shortcut))]
        plugins = [*dict.fromkeys([*loaded_plugins(), *(name for module in modules for name in plugin_of(module))])]
        folder = RunFolder.create(out, to_dict(config), device, steps=schedule.steps, plugins=plugins, **task.record)
        if not quiet:
            sys.stderr.write(f"{_summary(config, task.model, schedule.steps)} on {device}\n")
    try:
        if task.keep is not None and is_main():
            task.keep(folder.path)
        return run_task(task, schedule, folder, quiet)
    except Exception:
        if is_main():
            folder.discard_unbegun()  # so that the same command works after a fix
        raise


def resume(
    out: str | Path,
    quiet: bool = False,
    opener: Opener | None = None,
    *,
    changed_data: bool = False,
    data: str | None = None,
    trust: bool = False,
) -> Outcome:
    """Continues a run from its last intact checkpoint, or from the start if it has none.

    Changed data is refused, unless `changed_data` is set; the run then records the change. `data` is the new path of
    data that was moved. With `trust` the plugins of the run are imported.
    """
    folder = RunFolder.open(out)
    with with_plugins(folder.plugins, trust):
        config = from_dict(folder.config)
        parse(config.shortcut)
    if data is not None:
        config = replace(config, data=absolute_source(data))
    torch.manual_seed(config.seed)
    _announce_data(config, quiet)
    try:
        task, schedule = build_task(config.resumed(folder), opener)
    except BadInput as error:
        path = Path(config.data)
        if path.is_absolute() and not (path.exists() or (path.parent.exists() and set("*{") & set(config.data))):
            raise BadInput(f"{folder.path}: {error}. If the data was moved, give its path: --data (data=)") from error
        raise
    changed = data_changes(folder.data, task.record["data"])
    if changed is not None:
        if not changed_data:
            raise BadInput(
                f"{folder.path}: {changed}. Restore the data, or continue on the new data with: unskip resume "
                f"{folder.path} --changed-data"
            )
        last = folder.last_checkpoint()
        task.notes = (*task.notes, changed)
        if is_main():
            folder.update(data=task.record["data"])
            if last is not None:
                folder.append("warnings.jsonl", {"step": last[0], "warning": "changed-data", "text": changed})
    if data is not None and is_main():
        folder.update(config=to_dict(config))
    return run_task(task, schedule, folder, quiet)


def absolute_paths(config: Config) -> Config:
    """The config with absolute paths, so that its run resumes from any working directory."""
    paths: dict[str, Any] = {"data": absolute_source(config.data)}
    for name in ("data_root", "weights", "latents"):
        value = getattr(config, name, None)
        if value is not None:
            paths[name] = str(Path(value).expanduser().absolute())
    tokenizer = getattr(config, "tokenizer", None)
    if tokenizer is not None and Path(tokenizer).expanduser().exists():  # otherwise a name
        paths["tokenizer"] = str(Path(tokenizer).expanduser().absolute())
    file, _, function = config.model.rpartition(":")
    if file.endswith(".py"):
        paths["model"] = f"{Path(file).expanduser().absolute()}:{function}"
    return replace(config, **paths)


def _modules(rule: Shortcut) -> Iterator[str]:
    """The modules that define a rule and the rules inside it."""
    yield type(rule).__module__
    for value in vars(rule).values():
        if isinstance(value, Shortcut):
            yield from _modules(value)


def _announce_data(config: Config, quiet: bool) -> None:
    """Prints the data set: decoding a large one takes a minute without other output."""
    if is_main() and not quiet:
        sys.stderr.write(f"opening {config.data}\n")
        sys.stderr.flush()


def _summary(config: Config, model: nn.Module, steps: int) -> str:
    """Model, parameters, data and steps in one line: a preset's sizes also apply to other models and data."""
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    arguments = f" ({config.model_args})" if config.model_args else ""
    length = count(steps, "step")
    built_in = type(config).__module__.startswith("unskip.")  # other recipes need not build `config.model`
    name = f"{config.model}{arguments}" if built_in else type(model).__name__
    return f"{name}: {millions:.3g} million parameters, {config.inputs}, {length}"


def _refuse_not_finite(config: Config) -> None:
    """Refuses NaN and infinity, which JSON cannot store."""
    for name, value in vars(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"{name} is {value}; give a finite number, or None for no limit")


def _refuse_unused(config: Config, recipe: Recipe) -> None:
    """Refuses fields without effect, unless the preset sets them."""
    preset = recipe.presets.get(config.preset)
    defaults = recipe.config(**preset.fields) if preset is not None else recipe.config()
    for name, reason in config.unused().items():
        value = getattr(config, name)
        if value != getattr(defaults, name):
            raise BadInput(f"{name} is {value!r}, which has no effect: {reason}, or leave {name} out")


def _refuse_graph(config: Config, recipe: Recipe) -> None:
    """Refuses an impossible CUDA graph, unless the preset sets it: training then goes on without it, with a note.

    So do runs that are resumed or evaluated on another device.
    """
    preset = recipe.presets.get(config.preset)
    if not config.graph or (preset is not None and preset.fields.get("graph")):
        return
    world = int(os.environ.get("WORLD_SIZE", "1"))
    reason = why_not(device_of(config.device).type, world, config.accumulate, config.precision)
    if reason is not None:
        raise BadInput(f"graph is not possible: {reason}. Leave graph out")
