"""A trained model from its run folder alone: no data set, no optimizer."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unskip._plugins import with_plugins
from unskip.errors import BadInput, LoadError
from unskip.recipes._build import wire
from unskip.recipes._card import run_facts
from unskip.recipes._objective import Facts, Objective
from unskip.recipes._registry import RECIPES, from_dict
from unskip.training import RunFolder, device_of, ema_weights
from unskip.wiring import about, parse


@dataclass(frozen=True)
class Trained:
    """A trained run: the whole model, the part of it that makes features, and the step of its checkpoint."""

    folder: RunFolder
    config: Any
    facts: Facts
    objective: Objective
    model: nn.Module
    encoder: nn.Module
    step: int


def open_run(out: str | Path, device: str | None = None, *, trust: bool = False) -> Trained:
    """The model of a run as its last whole checkpoint holds it, with its EMA weights where there are any.

    `device` is the config's by default. A run whose model is a function of a file, or that was made with
    plugins which are not loaded, is opened with `trust` only: those files are executed.
    """
    folder = RunFolder.open(out)
    with with_plugins(folder.plugins, trust):
        config: Any = from_dict(folder.config)
        parse(config.shortcut)
    if device is not None:
        config = replace(config, device=device)
    if ".py:" in config.model and not trust:
        raise BadInput(
            f"{out}: its model is {config.model}, and opening it runs that file. Where you trust it, pass trust=True "
            "(--trust)"
        )
    last = folder.last_checkpoint()
    if last is None:
        raise BadInput(f"{out}: no checkpoint yet; continue with `{folder.resume_command}`")
    step, checkpoint = last
    recipe = RECIPES[folder.config["recipe"]]
    try:
        facts = Facts(**folder.facts)
    except TypeError as error:
        raise LoadError(f"{folder.path / 'config.json'}: damaged, its facts do not read ({error})") from error
    objective = recipe.objective(config)
    where = device_of(config.device)
    model = recipe.build_model(config, facts).to(where)
    example = objective.example(facts)
    # Before the model is rewired, so that its sites are described with their trained weights; and again after, because
    # a learnable shortcut brings weights of its own.
    _load(model, checkpoint, where, strict=False)
    wirings = wire(objective, model, example.to(where))
    _load(model, checkpoint, where, strict=True)
    for wiring in wirings:
        wiring.step(step - 1)  # steps count from 0, and annealed shortcuts stay where the last one left them
    encoder = objective.encoder(model)
    kept = {"run": run_facts(folder.config, step, folder.read("evals.jsonl"))}
    if folder.preprocess is not None:
        kept["preprocess"] = folder.preprocess
    for each in (model, encoder):
        about(each).update(kept)
    return Trained(folder, config, facts, objective, model, encoder, step)


def _load(model: nn.Module, checkpoint: Path, device: torch.device, strict: bool) -> None:
    """The weights of a checkpoint, or their EMA."""
    from safetensors.torch import load_model

    load_model(model, checkpoint / "model.safetensors", strict=strict, device=str(device))
    ema = ema_weights(checkpoint, device)
    if ema is not None:
        model.load_state_dict(ema, strict=strict)


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is a run's."""
    path = Path(folder)
    return (path / "config.json").is_file() and (path / "checkpoints").is_dir()
