"""Opens a trained model from its run folder, without data set and optimizer."""

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
    """A trained run: the whole model, its encoder, and the step of its checkpoint."""

    folder: RunFolder
    config: Any
    facts: Facts
    objective: Objective
    model: nn.Module
    encoder: nn.Module
    step: int


def open_run(out: str | Path, device: str | None = None, *, trust: bool = False) -> Trained:
    """The model of a run from its last intact checkpoint, with EMA weights if there are any.

    `device` is the config's by default. A model from a Python file, and plugins that are not loaded, need `trust`:
    these files are executed.
    """
    folder = RunFolder.open(out)
    with with_plugins(folder.plugins, trust):
        config: Any = from_dict(folder.config)
        parse(config.shortcut)
    config = config.resumed(folder)
    if device is not None:
        config = replace(config, device=device)
    if ".py:" in config.model and not trust:
        raise BadInput(
            f"{out}: its model is {config.model}, and opening it runs that file. If you trust it, pass trust=True "
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
        raise LoadError(f"{folder.path / 'config.json'}: damaged, its facts cannot be read ({error})") from error
    objective = recipe.objective(config)
    target = device_of(config.device)
    model = recipe.build_model(config, facts).to(target)
    example = objective.example(facts)
    # Weights are loaded before rewiring, for the description of the sites, and again after it, because a learnable
    # shortcut adds weights.
    _load(model, checkpoint, target, strict=False)
    wirings = wire(objective, model, example.to(target))
    _load(model, checkpoint, target, strict=True)
    for wiring in wirings:
        wiring.step(step - 1)  # the last trained step, counted from 0
    encoder = objective.encoder(model)
    record = {"run": run_facts(folder.config, step, folder.read("evals.jsonl"))}
    if folder.preprocess is not None:
        record["preprocess"] = folder.preprocess
    if facts.vocabulary:
        record["tokens"] = facts.tokens
    for module in (model, encoder):
        about(module).update(record)
    return Trained(folder, config, facts, objective, model, encoder, step)


def _load(model: nn.Module, checkpoint: Path, device: torch.device, strict: bool) -> None:
    """Loads the weights of a checkpoint, or their EMA."""
    from safetensors.torch import load_model

    load_model(model, checkpoint / "model.safetensors", strict=strict, device=str(device))
    ema = ema_weights(checkpoint, device)
    if ema is not None:
        model.load_state_dict(ema, strict=strict)


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is that of a run."""
    path = Path(folder)
    return (path / "config.json").is_file() and (path / "checkpoints").is_dir()
