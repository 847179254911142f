"""Builds the model of a config, and checks the numbers of a config."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any, TypeVar

from torch import nn

from unskip import spec
from unskip.errors import BadInput
from unskip.models import SiT, UViT
from unskip.recipes._config import Config
from unskip.recipes._objective import Facts

_Named = TypeVar("_Named", SiT, UViT)


def timm_arguments(config: Any, channels: int, **fixed: Any) -> dict[str, Any]:
    """Arguments of a timm ViT for the images of a config: `fixed` ones, then those of `model_args`."""
    if not config.model.startswith("timm:"):
        raise BadInput(f"model is {config.model!r}; use a ViT of timm, such as timm:vit_small_patch16_224")
    arguments: dict[str, Any] = {"num_classes": 0, "in_chans": channels, "img_size": config.size, **fixed}
    if config.patch is not None:
        arguments["patch_size"] = config.patch
    return arguments | arguments_of(config.model_args)


def check_ranges(config: Any, ranges: Mapping[str, tuple[float, float]], above_zero: Iterable[str] = ()) -> None:
    """Raises BadInput if a number of a config is out of its range; None is allowed."""
    for name, (low, high) in ranges.items():
        if (value := getattr(config, name)) is not None and not low <= value <= high:
            allowed = f"from {low:g} to {high:g}" if high < math.inf else f"{low:g} or more"
            raise BadInput(f"{name} is {value!r}; it must be {allowed}")
    for name in above_zero:
        if not getattr(config, name) > 0:
            raise BadInput(f"{name} is {getattr(config, name)!r}; it must be above 0")


def check_patch(config: Any, *sizes: str) -> None:
    """Raises BadInput if patches do not divide the images; `sizes` are the names of the fields with their sizes."""
    if config.patch is None:
        return
    if config.patch < 1:
        raise BadInput(f"patch is {config.patch}; give the side of a patch in pixels, 1 or more")
    for name in sizes:
        if getattr(config, name) % config.patch:
            value = getattr(config, name)
            raise BadInput(f"patches of {config.patch} do not divide {name} {value}; change one of them")


def arguments_of(text: str) -> dict[str, Any]:
    """ "depth=6,drop_rate=0.1" as keyword arguments."""
    arguments: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput(f"model_args {text!r}: write name=value, separated by commas")
        for kind in (int, float):
            try:
                arguments[name] = kind(value)
                break
            except ValueError:
                continue
        else:
            arguments[name] = {"true": True, "false": False, "none": None}.get(value.lower(), value)
    return arguments


def built(config: Config, arguments: dict[str, Any]) -> nn.Module:
    """Builds the model of a config with these arguments. Raises BadInput for arguments that it does not have."""
    try:
        return spec.build(config.model, **arguments)
    except BadInput as error:
        plain: Any = spec.build(config.model, light=True)  # raises if the name itself is wrong
        _check_arguments(config, plain.__class__, arguments_of(config.model_args))
        # The model_args of a preset are for its model; another model may not have them.
        given = ", ".join(f"{name}={value}" for name, value in arguments.items())
        raise BadInput(f"{error}; the arguments were {given}. Change model_args, or leave them out") from error


def named(kind: type[_Named], config: Any, facts: Facts, **options: Any) -> _Named:
    """Builds a diffusion transformer of the config's size for the data; model_args override both.

    It may have more classes than the data, as published weights do, but not fewer.
    """
    arguments = arguments_of(config.model_args)
    _check_arguments(config, kind, arguments)
    from_data = {"size": facts.size, "channels": facts.channels, "classes": facts.classes, "narrow": config.narrow}
    try:
        model = kind.named(config.model, **{**from_data, **options, **arguments})
    except (TypeError, RuntimeError) as error:  # text instead of a number, or an impossible size
        raise BadInput(f"model_args {config.model_args!r}: {config.model}: {error}") from error
    if model.classes < facts.classes:
        raise BadInput(f"model_args {config.model_args!r}: {model.classes} classes, and the data has {facts.classes}")
    return model


def _check_arguments(config: Config, kind: type[nn.Module], arguments: dict[str, Any]) -> None:
    accepted = inspect.signature(kind).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        return
    for name in arguments:
        if name not in accepted:
            near = sorted(accepted, key=lambda known: -SequenceMatcher(None, name, known).ratio())
            raise BadInput(
                f"model_args {config.model_args!r}: {kind.__name__} ({config.model}) has no argument {name!r}; it has "
                f"{', '.join(near)}"
            )
