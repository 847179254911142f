"""The MODEL of a command: built from its name, or opened where a run or `unskip.save` left it; and samples for it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unskip
from unskip import spec
from unskip._warn import warn
from unskip.anatomy import Example, example_for
from unskip.cli._say import one_line
from unskip.data import Preprocess, preprocess_of
from unskip.data import batch as data_batch
from unskip.errors import BadInput, ForwardError
from unskip.recipes import is_run, open_run
from unskip.training import find_runs

Shape = tuple[str, tuple[int, ...]]  # "" or "int", and the sizes


def open_model(name: str, pretrained: bool = False, light: bool = False, trust: bool = False) -> nn.Module:
    """The model of a name as `spec.build` makes it, or one in a folder, with its weights and its wiring.

    Of a run it is the part that makes features, such as the encoder of an MAE.
    """
    folder = Path(name).expanduser()
    if (folder / "unskip.json").is_file():
        return unskip.load(folder, trust=trust).eval()
    if is_run(folder):
        return open_run(folder, device="cpu", trust=trust).encoder.eval()
    if any(is_run(each) for each in folder.glob("*/")):
        names = ", ".join(str(run) for run in find_runs(folder))
        raise BadInput(f"{name} holds several runs; name one of them: {names}")
    return spec.build(name, pretrained=pretrained, light=light)


def builder_of(name: str) -> Any:
    """How the model of a name is built again: by a function of a file, or as a folder of unskip.save says.

    None for those that say it themselves.
    """
    record = Path(name).expanduser() / "unskip.json"
    if record.is_file():
        builder = json.loads(record.read_text(encoding="utf-8"))["builder"] or {}
        return builder if "spec" in builder else None
    return name if name.rpartition(":")[0].endswith(".py") else None


def weighted(model: str, random: bool, trust: bool) -> nn.Module:
    """The model of a name with pretrained weights, or with random ones where these are asked for."""
    if random and Path(model).is_dir():
        raise BadInput(f"--random is for a model that is named, and {model} is a folder with weights of its own")
    try:
        return open_model(model, pretrained=not random, trust=trust)
    except BadInput as error:
        if random or "internet" not in str(error):
            raise
        raise BadInput(f"{one_line(error)}; --random goes on with random ones") from error


def shape_of(text: str) -> Shape:
    """ "2,3,32,32" or "int:2,16"."""
    kind, _, sizes = text.rpartition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        shape = ()
    if kind not in ("", "int") or not shape or min(shape) < 1:
        raise BadInput(f"--input {text!r} is not a shape; write 2,3,32,32, or int:2,16 for token ids")
    return kind, shape


def shapes_of(given: Iterable[Iterable[str]]) -> list[Shape]:
    """Of every --input, with one shape or several."""
    return [shape_of(text) for texts in given for text in texts]


def inputs(model: nn.Module, shapes: list[Shape]) -> tuple[Tensor, ...] | None:
    """Noise and token ids of these shapes, the same ones every time; None for no shapes."""
    weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(()))
    # Ids that every table of the model has; without a table nothing is known but that there are two.
    known = min((table.num_embeddings for table in model.modules() if isinstance(table, nn.Embedding)), default=2)
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randint(known, shape, generator=generator).to(weight.device)
        if kind == "int"
        else torch.randn(shape, generator=generator).to(weight.device, weight.dtype)
        for kind, shape in shapes
    ]
    return tuple(made) or None


def samples_for(
    model: nn.Module, source: str, n: int, shapes: list[Shape], numbers: dict[str, Any] | None = None
) -> tuple[object, Preprocess | None]:
    """A batch that fits the model, and how its images were made, where it reads some.

    It is images of the model's size, or the inputs that it says it takes, or that `shapes` do. `numbers` are a mean and
    a standard deviation in place of the model's own.
    """
    example = example_for(model, inputs(model, shapes))
    images = [value for value in example.values if isinstance(value, Tensor) and value.ndim == 4]
    if len(example.values) > 1 or not images:
        if source.startswith("random:"):
            return _noise(example, source, len(data_batch(source, size=1)), bool(shapes)), None
        ids = data_batch(source, n)
        return dict.fromkeys(list(example.kwargs)[:1], ids) or (ids,), None
    channels, *size = images[0].shape[1:]
    made = preprocess_for(model, channels, numbers or {})
    sides = (int(size[0]), int(size[1]))
    options: Any = {"mean": made.mean, "std": made.std, "crop": made.crop, "interpolation": made.interpolation}
    values = data_batch(source, n, sides, **options).to(images[0])
    samples = dict.fromkeys(example.kwargs, values) or (values,)
    return samples, None if source.startswith("random:") else made


def preprocess_for(model: nn.Module, channels: int, numbers: dict[str, Any]) -> Preprocess:
    """The model's own preprocessing, with the size, mean and standard deviation that the caller gives."""
    given = {name: value for name, value in numbers.items() if value is not None}
    for name in ("mean", "std"):
        if name in given and len(given[name]) not in (1, channels):
            raise BadInput(f"--{name}: the model takes {channels} channels; give a number for each, or one for all")
        if name in given:
            given[name] *= channels // len(given[name])
    own = preprocess_of(model, channels)
    return own.given(**given) if given else own


def channel_numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """The numbers of --mean or --std."""
    try:
        return None if text is None else tuple(float(item) for item in text.split(","))
    except ValueError:
        raise BadInput(f"--{option} {text}: write a number for each channel, such as 0.5,0.5,0.5") from None


def _noise(example: Example, source: str, count: int, asked_for: bool) -> object:
    """Random token ids or numbers where the model takes one input, or else the example: one asked for, or its own."""
    (first, *more) = example.values
    if not more and isinstance(first, Tensor) and first.ndim == 2 and not first.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        low, high = int(first.min()), int(first.max())  # ids that the model knows
        ids = torch.randint(low, high + 1, (count, first.shape[1]), generator=generator).to(first)
        return dict.fromkeys(example.kwargs, ids) or (ids,)
    if not more and isinstance(first, Tensor) and first.is_floating_point() and first.ndim > 1:
        noise = torch.randn(count, *first.shape[1:], generator=torch.Generator().manual_seed(0)).to(first)
        return dict.fromkeys(example.kwargs, noise) or (noise,)
    if not more and isinstance(first, Tensor) and first.ndim == 1:
        raise BadInput(f"--data {source}: --input {len(first)} leaves no dimension for samples; write 2,{len(first)}")
    if asked_for:
        return example
    warn(
        f"{source}: a model of several inputs, or of other ones than images and token ids, is measured on an example "
        "of its own, of whatever size that has"
    )
    return example


@contextlib.contextmanager
def by_input() -> Iterator[None]:
    """Where an error asks for an example, it also says how a command line gives one."""
    try:
        yield
    except (BadInput, ForwardError) as error:
        if "example=" not in str(error):
            raise
        raise type(error)(f"{one_line(error)} On the command line: --input 2,3,224,224 or --input int:2,16") from error
