"""The MODEL of a command: built from its name, or opened where a run or `unskip.save` left it; and inputs for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import unskip
from unskip import spec
from unskip.cli._say import one_line
from unskip.errors import BadInput, ForwardError
from unskip.recipes._judge import open_run

FORMS = f"{spec.FORMS}, or the folder of a run or of unskip.save"
INPUT = (
    "The shape of what the model takes, for one that does not say: 2,3,32,32 of numbers or int:2,16 of token ids. "
    "Several for several arguments."
)

Shape = tuple[str, tuple[int, ...]]  # "" or "int", and the sizes


def opened(name: str, pretrained: bool = False, light: bool = False) -> nn.Module:
    """The model of a name as `spec.build` makes it, or one in a folder, with its weights and its wiring.

    Of a run it is the part that makes features, such as the encoder of an MAE.
    """
    folder = Path(name).expanduser()
    if (folder / "unskip.json").is_file():
        return unskip.load(folder).eval()
    if (folder / "config.json").is_file() and (folder / "checkpoints").is_dir():
        return open_run(folder, device="cpu").encoder.eval()
    return spec.build(name, pretrained=pretrained, light=light)


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


@contextlib.contextmanager
def by_input() -> Iterator[None]:
    """Where an error asks for an example, it also says how a command line gives one."""
    try:
        yield
    except (BadInput, ForwardError) as error:
        if "example=" not in str(error):
            raise
        raise type(error)(f"{one_line(error)} On the command line: --input 2,3,224,224 or --input int:2,16") from error
