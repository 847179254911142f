"""`unskip measure MODEL`: rank, conditioning, attention, echo and quantisation on a few samples."""

from __future__ import annotations

import contextlib
import json as json_format
import sys
import warnings
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import Tensor, nn

import unskip
from unskip.anatomy._example import Example, example_for
from unskip.cli._model import FORMS, INPUT, Shape, by_input, inputs, opened, shape_of
from unskip.cli._options import Device, Json, Random
from unskip.cli._say import finite, one_line, progress
from unskip.data import batch as data_batch
from unskip.errors import BadInput, UnskipWarning
from unskip.wiring.shortcuts import parse

_MEASURED = f"What to measure: {FORMS}. Pretrained weights are loaded, unless --random."
_DATA = "Samples: a folder of images, an .npy file, a set such as digits, or random:N (default: random:8)."


def measure(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=_MEASURED, metavar="MODEL")],
    data: Annotated[str, tyro.conf.arg(help=_DATA, metavar="SOURCE", help_behavior_hint="")] = "random:8",
    n: Annotated[int, tyro.conf.arg(help="How many samples of the source.", metavar="N")] = 8,
    shortcut: Annotated[
        str | None, tyro.conf.arg(help="Rewire first: cut, decay:0.6, ...", metavar="RULE", help_behavior_hint="")
    ] = None,
    init: Annotated[
        str | None,
        tyro.conf.arg(
            help="Initialise first: skipless, skipless:vit-small,centre or zero.", metavar="NAME", help_behavior_hint=""
        ),
    ] = None,
    jacobians: Annotated[
        str, tyro.conf.arg(help="auto, exact (as matrices, however large) or off.", metavar="WAY")
    ] = "auto",
    input: Annotated[tuple[str, ...], tyro.conf.arg(help=INPUT, metavar="SHAPE", help_behavior_hint="")] = (),  # noqa: A002
    device: Device = "cpu",
    random: Random = False,
    json: Json = False,
) -> int:
    """Measure rank, conditioning, attention, echo and quantisation of a model on a few samples.

    Example: unskip measure timm:vit_small_patch16_224 --data photos --shortcut decay:0.6
    """
    rule = parse(shortcut) if shortcut is not None else None
    if jacobians not in ("auto", "exact", "off"):
        raise BadInput(f"--jacobians {jacobians}: it can be auto, exact or off")
    where, shapes = _device(device), [shape_of(text) for text in input]
    with contextlib.redirect_stdout(sys.stderr), progress(f"measuring {model}") as tick, by_input():
        torch.manual_seed(0)  # random weights, but the same ones each time
        built = _build(model, random).to(where)
        samples = _samples(built, data, n, shapes)
        if init is not None:
            unskip.init.start_(built, init, torch.Generator().manual_seed(0), samples)
        if rule is not None:
            unskip.rewire(built, rule, samples)
        found = unskip.measure(built, samples, jacobians=jacobians, progress=tick)  # type: ignore[arg-type]
    if json:
        print(json_format.dumps(finite({"spec": model, **found.to_dict()}), indent=2, allow_nan=False))
    else:
        print(found)
    return 0


def _build(model: str, random: bool) -> nn.Module:
    if random and Path(model).is_dir():
        raise BadInput(f"--random is for a model that is named, and {model} is a folder with weights of its own")
    try:
        return opened(model, pretrained=not random)
    except BadInput as error:
        if random or "internet" not in str(error):
            raise
        raise BadInput(f"{one_line(error)}; --random measures it with random weights") from error


def _device(name: str) -> torch.device:
    try:
        torch.empty((), device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as error:
        raise BadInput(f"--device {name}: {str(error).splitlines()[0]}") from error


def _samples(model: nn.Module, source: str, n: int, shapes: list[Shape]) -> object:
    """A batch that fits the model: images of its size, or the inputs that it says it takes, or that `shapes` do."""
    example = example_for(model, inputs(model, shapes))
    images = [value for value in example.values if isinstance(value, Tensor) and value.ndim == 4]
    if len(example.values) > 1 or not images:
        if source.startswith("random:"):
            return _noise(example, source, len(data_batch(source, size=1)), bool(shapes))
        ids = data_batch(source, n)
        return dict.fromkeys(list(example.kwargs)[:1], ids) or (ids,)
    channels, *size = images[0].shape[1:]
    config = getattr(model, "pretrained_cfg", None) or {}
    known = isinstance(config, dict) and len(config.get("mean", ())) == channels
    mean, std = (config["mean"], config["std"]) if known else ((0.5,) * channels, (0.5,) * channels)
    values = data_batch(source, n, (int(size[0]), int(size[1])), mean=mean, std=std).to(images[0])
    return dict.fromkeys(example.kwargs, values) or (values,)


def _noise(example: Example, source: str, count: int, asked_for: bool) -> object:
    """Random token ids where the model takes nothing else, or else the example: one asked for, or the model's own."""
    (first, *more) = example.values
    if not more and isinstance(first, Tensor) and first.ndim == 2 and not first.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        low, high = int(first.min()), int(first.max())  # ids that the model knows
        ids = torch.randint(low, high + 1, (count, first.shape[1]), generator=generator).to(first)
        return dict.fromkeys(example.kwargs, ids) or (ids,)
    if asked_for:
        return example
    warnings.warn(
        f"{source}: a model of several inputs, or of other ones than images and token ids, is measured on an example "
        "of its own, of whatever size that has",
        UnskipWarning,
        stacklevel=2,
    )
    return example
