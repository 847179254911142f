"""What recipes share: the device of a process, arguments given as text, and the schedule of a config."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import torch

from unskip.errors import BadInput
from unskip.training import Schedule


def steps_of(config: Any, steps_per_epoch: int) -> int:
    """The length of a run: its steps, where given, or its epochs."""
    steps: int = round(config.epochs * steps_per_epoch) if config.steps is None else config.steps
    if steps < 1:
        raise BadInput(f"{steps} steps: give steps or epochs for one at least")
    return steps


def schedule_of(config: Any, steps: int) -> Schedule:
    """The schedule of a run: the fields of a config that a schedule has, too."""
    names = {field.name for field in fields(Schedule)} - {"steps", "warmup"}
    mine = {name: getattr(config, name) for name in names if hasattr(config, name)}
    if mine.get("accumulate", 1) > 0 and config.batch % mine.get("accumulate", 1):
        raise BadInput(
            f"a batch of {config.batch} cannot be divided into {config.accumulate} equal parts: take another accumulate"
        )
    return Schedule(steps=steps, warmup=round(config.warmup * steps), **mine)


def arguments_of(text: str) -> dict[str, Any]:
    """ "depth=6,drop_rate=0.1" as keyword arguments."""
    found: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput(f"model_args {text!r}: write name=value, separated by commas")
        for kind in (int, float):
            try:
                found[name] = kind(value)
                break
            except ValueError:
                continue
        else:
            found[name] = {"true": True, "false": False, "none": None}.get(value.lower(), value)
    return found


def device_of(name: str) -> torch.device:
    """The device of a name, or of "auto". Raises BadInput where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:  # one of several processes
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"device is {name!r}; it can be auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"device is {name!r}, and torch finds no GPU; take auto or cpu")
    return device
