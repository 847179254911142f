"""What recipes share: the device of a process, the model of a config, its schedule, and how a checkpoint is kept."""

from __future__ import annotations

import inspect
import os
from dataclasses import fields
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unskip import spec
from unskip.errors import BadInput
from unskip.models import SiT, UViT
from unskip.recipes._config import Config
from unskip.training import Schedule
from unskip.wiring import Wiring, rewire, save

_Named = TypeVar("_Named", SiT, UViT)


def steps_of(config: Config, steps_per_epoch: int) -> int:
    """The length of a run: its steps, where given, or its epochs."""
    steps: int = round(config.epochs * steps_per_epoch) if config.steps is None else config.steps
    if steps < 1:
        raise BadInput(f"{steps} steps: give steps or epochs for one at least")
    return steps


def schedule_of(config: Config, steps: int) -> Schedule:
    """The schedule of a run: the fields of a config that a schedule has, too."""
    names = {field.name for field in fields(Schedule)} - {"steps", "warmup"}
    mine = {name: getattr(config, name) for name in names if hasattr(config, name)}
    if config.accumulate > 0 and config.batch % config.accumulate:
        raise BadInput(
            f"a batch of {config.batch} cannot be divided into {config.accumulate} equal parts: take another accumulate"
        )
    if not 0 <= config.warmup <= 1:
        raise BadInput(f"warmup is {config.warmup!r}; it is a share of the steps, from 0 to 1")
    return Schedule(steps=steps, warmup=round(config.warmup * steps), **mine)


def wired(model: nn.Module, config: Config, sample: Tensor) -> Wiring | None:
    """Puts the shortcut of a config into a model; one that keeps its skips is left as it is."""
    return rewire(model, config.shortcut, sample[:2], config.where) if config.shortcut != "keep" else None


def save_with_encoder(
    network: nn.Module, encoder: nn.Module, folder: Path, model: str, arguments: dict[str, Any]
) -> None:
    """A checkpoint of the whole network, and its encoder once more on its own, which unskip.load builds and rewires."""
    from safetensors.torch import save_model

    save_model(network, str(folder / "model.safetensors"))
    save(encoder, folder / "encoder", {"spec": model, "kwargs": arguments})


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


def built(config: Config, arguments: dict[str, Any]) -> nn.Module:
    """The model that a config names, with these arguments; a wrong one is told with those there are."""
    try:
        return spec.build(config.model, **arguments)
    except BadInput as error:
        plain: Any = spec.build(config.model, light=True)  # the name may be what is wrong, and then it says so
        _check_arguments(config, plain.__class__, arguments_of(config.model_args))
        # A preset's own are for the preset's model, and another one may take none of that kind.
        given = ", ".join(f"{name}={value}" for name, value in arguments.items())
        raise BadInput(f"{error}; it was given {given}. Other model_args, or none of them, change that") from error


def named(kind: type[_Named], config: Config, given: dict[str, Any]) -> _Named:
    """A model of this library: of the size that a config names, with its own arguments before those that are given."""
    arguments = arguments_of(config.model_args)
    _check_arguments(config, kind, arguments)
    try:
        return kind.named(config.model, **{**given, **arguments})
    except (TypeError, RuntimeError) as error:  # a word where a number belongs, or a number that makes no tensor
        raise BadInput(f"model_args {config.model_args!r}: {config.model}: {error}") from error


def _check_arguments(config: Config, kind: type[nn.Module], arguments: dict[str, Any]) -> None:
    accepted = inspect.signature(kind).parameters
    if any(each.kind is each.VAR_KEYWORD for each in accepted.values()):
        return
    for name in arguments:
        if name not in accepted:
            near = sorted(accepted, key=lambda known: -SequenceMatcher(None, name, known).ratio())
            raise BadInput(
                f"model_args {config.model_args!r}: {kind.__name__} ({config.model}) has no argument {name!r}; it has "
                f"{', '.join(near)}"
            )


def device_of(name: str) -> torch.device:
    """The device of a name, or of "auto". Raises BadInput where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    launched = os.environ.get("LOCAL_RANK")  # the number of one of several processes
    if name.startswith("cuda:") and launched is not None:
        raise BadInput(
            f"device is {name!r}, and every process that a launcher starts has a GPU of its own; take cuda, and choose "
            "GPUs by CUDA_VISIBLE_DEVICES"
        )
    if name == "cuda" and launched is not None:
        name = f"cuda:{launched}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"device is {name!r}; it can be auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"device is {name!r}, and torch finds no GPU; take auto or cpu")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise BadInput(f"device is {name!r}, and torch finds {count} GPUs, cuda:0 to cuda:{count - 1}")
    return device
