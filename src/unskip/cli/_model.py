"""The MODEL of a command, built from a name or loaded from a folder, and samples for it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

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
from unskip.recipes import is_run, open_run, text_batch
from unskip.training import RunFolder, find_runs

Shape = tuple[str, tuple[int, ...]]  # "" or "int", and the sizes


def open_model(name: str, pretrained: bool = False, light: bool = False, trust: bool = False) -> nn.Module:
    """Builds a named model, or loads the model of a folder with its weights and wiring.

    Of a run it returns the feature extractor, such as the encoder of an MAE.
    """
    folder = Path(name).expanduser()
    if (folder / "unskip.json").is_file():
        return unskip.load(folder, trust=trust).eval()
    if is_run(folder):
        return open_run(folder, device="cpu", trust=trust).encoder.eval()
    if any(is_run(path) for path in folder.glob("*/")):
        names = ", ".join(str(run) for run in find_runs(folder))
        raise BadInput(f"{name} contains several runs; give one of them: {names}")
    return spec.build(name, pretrained=pretrained, light=light)


def builder_of(name: str) -> Any:
    """The builder to save with a model: its file and function, or the builder of a saved folder.

    None for models whose builder `unskip.save` finds itself.
    """
    record = Path(name).expanduser() / "unskip.json"
    if record.is_file():
        builder = json.loads(record.read_text(encoding="utf-8"))["builder"] or {}
        return builder if "spec" in builder else None
    return name if name.rpartition(":")[0].endswith(".py") else None


def open_weighted(model: str, random: bool, trust: bool) -> nn.Module:
    """Opens a model with pretrained weights, or with random ones if `random`."""
    if random and Path(model).is_dir():
        raise BadInput(f"--random is for named models, and {model} is a folder with its own weights")
    try:
        return open_model(model, pretrained=not random, trust=trust)
    except BadInput as error:
        if random or "internet" not in str(error):
            raise
        raise BadInput(f"{one_line(error)}; --random uses random ones") from error


def shape_of(text: str) -> Shape:
    """Parses "2,3,32,32" or "int:2,16"."""
    kind, _, sizes = text.rpartition(":")
    try:
        shape = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        shape = ()
    if kind not in ("", "int") or not shape or min(shape) < 1:
        raise BadInput(f"--input {text!r} is not a shape; write 2,3,32,32, or int:2,16 for token ids")
    return kind, shape


def shapes_of(given: Iterable[Iterable[str]]) -> list[Shape]:
    """The shapes of all --input options; each gives one or several."""
    return [shape_of(text) for texts in given for text in texts]


def inputs(model: nn.Module, shapes: list[Shape]) -> tuple[Tensor, ...] | None:
    """Random numbers and token ids of these shapes, the same each time; None without shapes."""
    weight = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(()))
    # Ids that are valid for every embedding of the model; without an embedding, 0 and 1.
    size = min((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=2)
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.randint(size, shape, generator=generator).to(weight.device)
        if kind == "int"
        else torch.randn(shape, generator=generator).to(weight.device, weight.dtype)
        for kind, shape in shapes
    ]
    return tuple(values) or None


def text_for(model: str, source: str | None, n: int, split: Literal["train", "test"] | None = None) -> Tensor | None:
    """n sequences of a text for the run of a language model, by default of its own text.

    None for other models, and for noise and arrays of ids, which `samples_for` reads.
    """
    folder = Path(model).expanduser()
    if not is_run(folder) or RunFolder.open(folder).config.get("recipe") != "lm":
        return None
    if source is not None and (source.startswith("random:") or source.endswith(".npy")):
        return None
    try:
        return text_batch(folder, n, source, split)
    except BadInput as error:
        if source is not None:
            raise
        raise BadInput(
            f"{model}: its own text: {one_line(error)}. Give another, --data TEXT, or --data random:{n}"
        ) from error


def samples_for(
    model: nn.Module, source: str, n: int, shapes: list[Shape], numbers: dict[str, Any] | None = None
) -> tuple[object, Preprocess | None]:
    """A batch that fits the model, and the preprocessing of its images, or None.

    The batch has images of the model's size, or inputs as in `shapes` or the model's own description. `numbers` are a
    mean and a standard deviation that replace those of the model.
    """
    example = example_for(model, inputs(model, shapes))
    images = [value for value in example.values if isinstance(value, Tensor) and value.ndim == 4]
    if len(example.values) > 1 or not images:
        if source.startswith("random:"):
            return _noise(example, source, len(data_batch(source, size=1)), bool(shapes)), None
        if not source.endswith(".npy"):
            if images:
                raise BadInput(f"--data {source}: the model takes {len(example.values)} inputs; give random:{n}")
            raise BadInput(
                f"--data {source}: the model takes no images; give an .npy file of its inputs, or random:{n}. Text is "
                "read for the run of a language model"
            )
        ids = data_batch(source, n)
        return dict.fromkeys(list(example.kwargs)[:1], ids) or (ids,), None
    channels, *size = images[0].shape[1:]
    preprocess = preprocess_for(model, channels, numbers or {})
    sides = (int(size[0]), int(size[1]))
    options: Any = {name: getattr(preprocess, name) for name in ("mean", "std", "crop", "interpolation")}
    values = data_batch(source, n, sides, **options).to(images[0])
    samples = dict.fromkeys(example.kwargs, values) or (values,)
    return samples, None if source.startswith("random:") else preprocess


def preprocess_for(model: nn.Module, channels: int, numbers: dict[str, Any]) -> Preprocess:
    """The model's own preprocessing, with the given size, mean and standard deviation."""
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


def _noise(example: Example, source: str, count: int, given: bool) -> object:
    """Random token ids or numbers for a model of one input, else the example, which is `given` or the model's own."""
    (first, *more) = example.values
    if not more and isinstance(first, Tensor) and first.ndim == 2 and not first.is_floating_point():
        generator = torch.Generator().manual_seed(0)
        low, high = int(first.min()), int(first.max())  # ids that are valid for the model
        ids = torch.randint(low, high + 1, (count, first.shape[1]), generator=generator).to(first)
        return dict.fromkeys(example.kwargs, ids) or (ids,)
    if not more and isinstance(first, Tensor) and first.is_floating_point() and first.ndim > 1:
        noise = torch.randn(count, *first.shape[1:], generator=torch.Generator().manual_seed(0)).to(first)
        return dict.fromkeys(example.kwargs, noise) or (noise,)
    if not more and isinstance(first, Tensor) and first.ndim == 1:
        raise BadInput(f"--data {source}: --input {len(first)} leaves no dimension for samples; write 2,{len(first)}")
    if given:
        return example
    warn(
        f"{source}: the model takes several inputs, or others than images and token ids; it is measured on its example "
        "input, whose number of samples may differ"
    )
    return example


@contextlib.contextmanager
def input_hint() -> Iterator[None]:
    """Adds to an error that asks for an example how to give one on the command line."""
    try:
        yield
    except (BadInput, ForwardError) as error:
        if "example=" not in str(error):
            raise
        raise type(error)(f"{one_line(error)} On the command line: --input 2,3,224,224 or --input int:2,16") from error
