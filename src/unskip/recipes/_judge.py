"""A run judged by protocols: its model as the last checkpoint holds it, its data, and results beside its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from unskip.errors import BadInput
from unskip.evals import Result, evaluate
from unskip.recipes._data import Opener, both, judged_split, opening_once
from unskip.recipes._registry import RECIPES, from_dict
from unskip.training import RunFolder, averaged_weights


@dataclass(frozen=True)
class Trained:
    """What a run has come to: the model, the part of it that makes features, and the step of its checkpoint."""

    folder: RunFolder
    config: Any
    model: nn.Module
    encoder: nn.Module
    step: int
    classes: int | None = None  # of its data, where its feed holds labelled images


def open_run(out: str | Path, device: str | None = None, opener: Opener | None = None) -> Trained:
    """Builds the model of a run and fills it from the last whole checkpoint; averaged weights where there are any."""
    from safetensors.torch import load_model

    folder = RunFolder.open(out)
    data = folder.config
    config = from_dict(data)
    if device is not None:
        config = replace(config, device=device)
    found = folder.last_checkpoint()
    if found is None:
        raise BadInput(f"{out}: no checkpoint yet; go on with `unskip resume {out}`")
    step, checkpoint = found
    task, _ = RECIPES[data["recipe"]].build(config, opener)
    where = next(task.model.parameters()).device
    load_model(task.model, checkpoint / "model.safetensors", device=str(where))
    average = averaged_weights(checkpoint, where)
    if average is not None:
        task.model.load_state_dict(average)
    last = step - 1  # steps count from 0, and shortcuts stay where the last one left them
    if task.wiring is not None:
        task.wiring.step(last)
    if task.before is not None:  # such as the wiring of a teacher, which is what is judged
        task.before(last)
    images = getattr(task.feed, "images", None)
    classes = None if images is None else len(images.classes)
    return Trained(folder, config, task.model, task.watched or task.model, step, classes)


def judge_run(
    out: str | Path,
    protocols: Sequence[str],
    *,
    blocks: int | Iterable[int] | Literal["all"] = "all",
    pool: Literal["mean", "cls"] | None = None,
    split: Literal["val", "test"] | None = None,
    seed: int = 0,
    precision: Any = "float32",
    device: str | None = None,
    batch: int | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    opener: Opener | None = None,
) -> tuple[Trained, list[Result]]:
    """Judges a run on its own data and adds a row for each result to its evals.jsonl.

    Without a `split` it is the one the run itself was judged on: "val" where that held one out, otherwise "test".
    `batch` images at a time give their features, as many as in training by default; fine-tuning has its own batch.
    """
    opener = opener or opening_once()
    run = open_run(out, device, opener)
    config = run.config
    if getattr(config, "latents", None) is not None:
        raise BadInput(f"{out}: it was trained on latents; call unskip.evals.noised_features with batches of those")
    split = split or judged_split(config)
    train, test = both(config, opener, split)
    results = evaluate(
        run.encoder,
        train,
        test,
        protocols,
        size=config.size,
        blocks=blocks,
        pool=pool,
        batch=batch or config.batch,
        seed=seed,
        precision=precision,
        workers=config.workers,
        graph=getattr(config, "graph", False),
        changes=changes,
    )
    for each in results:
        row = {"step": run.step, **each.to_dict(), "split": split, "seed": seed, "precision": precision}
        run.folder.append("evals.jsonl", row)
    return run, results
