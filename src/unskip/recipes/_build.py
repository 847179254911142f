"""Builds the task of a config: data, model, initialisation, rewiring, optimizer and evaluations, for all recipes.

The order matters: weights and initialisation come before rewiring, and rewiring and parameter groups before the loop
wraps the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from torch import Tensor, nn

from unskip.data import set_preprocess
from unskip.errors import BadInput
from unskip.init import freeze_heads, has_pairs
from unskip.optim import build as build_optimizer
from unskip.recipes._config import Config
from unskip.recipes._data import Opener, data_record, evaluated_split
from unskip.recipes._objective import Objective, Progress
from unskip.recipes._registry import recipe_of
from unskip.training import Schedule, Task, device_of
from unskip.wiring import Keep, Wiring, parse, rewire

_SAMPLE = 64  # evaluation images for initialisation, rewiring and health checks


def build_task(config: Config, opener: Opener | None = None) -> tuple[Task, Schedule]:
    """The task and schedule of a config."""
    recipe = recipe_of(config)
    objective = recipe.objective(config)
    device = device_of(config.device)
    train, test = objective.open_splits(opener)
    feed = objective.feed(train, device)
    progress = Progress(steps_of(config, feed.steps_per_epoch), feed.steps_per_epoch)
    schedule = schedule_of(config, progress.steps)
    train_feed, test_feed = (objective.evaluation_feed(images, device) for images in (train, test))
    sample = next(iter(test_feed.evaluate()))[0][:_SAMPLE]
    facts = objective.facts(train)
    model = recipe.build_model(config, facts)
    if not isinstance(model, nn.Module):
        raise BadInput(f"recipe {recipe.name!r}: build_model returns {type(model).__name__}, not a module")
    model = model.to(device)
    notes = [*train.report, *test.report, *objective.start(model, sample)]
    preprocess = objective.preprocess(facts.channels)
    if preprocess is not None:  # replaces that of loaded weights
        set_preprocess(model, preprocess)
        set_preprocess(objective.encoder(model), preprocess)
    wirings = wire(objective, model, sample[:2])
    if wirings and _unfinished(wirings[0], progress.steps):
        notes.append(
            f"the run ends at step {progress.steps}, before {config.shortcut} does; train longer, or give an earlier @"
        )
    if config.grad_checkpointing:
        _checkpoint_gradients(config, objective.trained(model))
    options = {"decays": config.decays, **objective.optimizer_options()}
    optimizer = build_optimizer(objective.trained(model), config.optimizer, config.lr, config.weight_decay, **options)
    if config.freeze_heads is not None:
        if config.fsdp:
            raise BadInput("freeze_heads does not work with fsdp, which splits heads; leave one of them out")
        pairs = has_pairs(config.init)
        for part in objective.rewired(model):
            freeze_heads(part, optimizer, config.freeze_heads, sample[:2], pairs=pairs, rate=config.carry_rate)
        carried = re.search(r"\bcarry=(\d+)", config.init)
        if config.weights is None and config.freeze_heads > int(carried[1] if carried else 0):  # weights may have them
            given = carried[0] if carried else "no carry="
            notes.append(
                f"freeze_heads is {config.freeze_heads}, but init {config.init} has {given}: heads that do not pass "
                f"tokens on stay as they are; give as many, as in skipless:shaped,carry={config.freeze_heads}"
            )
    elif config.carry_rate:
        raise BadInput("carry_rate applies to frozen heads; give freeze_heads, too")
    objective.begin(model, optimizer, progress)
    evaluations = objective.evaluations(model, train_feed, test_feed, evaluated_split(config))
    if not isinstance(evaluations, Mapping) or not all(callable(value) for value in evaluations.values()):
        raise BadInput(
            f"recipe {recipe.name!r}: evaluations returns {evaluations!r}; return a mapping of names to functions"
        )
    task = Task(
        model=model,
        feed=feed,
        loss=objective.loss,
        optimizer=optimizer,
        wirings=wirings,
        baseline_loss=objective.baseline_loss(model, train, test_feed),
        evaluations={**evaluations},
        notes=tuple(notes),
        sample=sample[:8] if config.health else None,
        encoder=objective.encoder(model),
        before_step=objective.before_step,
        after_step=objective.after_step,
        warnings=objective.warnings,
        save=lambda model, folder: objective.save(model, facts, folder),
        keep=lambda run: objective.keep(facts, run),
        record={
            "facts": asdict(facts),
            "preprocess": preprocess and preprocess.to_dict(),
            "data": {"train": data_record(train), "test": data_record(test)},
        },
    )
    return task, schedule


def wire(objective: Objective, model: nn.Module, sample: Tensor) -> tuple[Wiring, ...]:
    """Rewires the model by the config's shortcut. With `keep` the model is unchanged."""
    config, parts = objective.config, objective.rewired(model)
    if parse(config.shortcut) == Keep():
        return ()
    return tuple(rewire(part, config.shortcut, sample, config.where) for part in parts)


def _checkpoint_gradients(config: Config, model: nn.Module) -> None:
    """Turns on gradient checkpointing by the method of timm, transformers or this package."""
    if config.graph:
        raise BadInput("graph does not work with grad_checkpointing; leave one of them out")
    enabled = False
    module: Any
    for module in model.modules():
        if callable(getattr(module, "set_grad_checkpointing", None)):
            module.set_grad_checkpointing()
        elif getattr(module, "supports_gradient_checkpointing", False):
            module.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            continue
        enabled = True
    if not enabled:
        raise BadInput(
            f"grad_checkpointing: {type(model).__name__} has neither set_grad_checkpointing (timm) nor "
            "gradient_checkpointing_enable (transformers); leave grad_checkpointing out, or add one to the model"
        )


def _unfinished(wiring: Wiring, steps: int) -> bool:
    """Whether an annealed shortcut ends after the run."""
    alphas = []
    for step in (steps - 1, 2**62, 0):  # last of the run, end of the shortcut, and back to the first
        wiring.step(step)
        alphas.append([*wiring.alphas])
    return alphas[0] != alphas[1]


def steps_of(config: Config, steps_per_epoch: int) -> int:
    """The length of a run, from its steps, or else its epochs."""
    steps: int = round(config.epochs * steps_per_epoch) if config.steps is None else config.steps
    if steps < 1:
        raise BadInput(f"{steps} steps; give steps or epochs for at least one")
    return steps


def schedule_of(config: Config, steps: int) -> Schedule:
    """The schedule of a run: the fields that `Schedule` and the config share."""
    names = {field.name for field in fields(Schedule)} - {"steps", "warmup"}
    shared = {name: getattr(config, name) for name in names if hasattr(config, name)}
    if config.accumulate > 0 and config.batch % config.accumulate:
        raise BadInput(f"a batch of {config.batch} cannot be split into {config.accumulate} equal parts (accumulate)")
    if not 0 <= config.warmup <= 1:
        raise BadInput(f"warmup is {config.warmup!r}; give a fraction of the steps, from 0 to 1")
    return Schedule(steps=steps, warmup=round(config.warmup * steps), **shared)
