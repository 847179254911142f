"""`unskip measure MODEL`: rank, conditioning, attention, echo and quantisation on a few samples."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any, Literal

import tyro

import unskip
from unskip._table import table
from unskip.cli._options import (
    Blocks,
    Count,
    Device,
    Inputs,
    Json,
    Mean,
    Random,
    Std,
    Trust,
    blocks_of,
    model_help,
    option,
)
from unskip.cli._say import print_json, progress

_DATA = "Samples: a folder of images, an .npy file, a set such as digits, or random:N (default: random:8)."
_JACOBIANS = "auto, exact (as matrices, however large) or off."


def measure_command(
    model: Annotated[str, tyro.conf.Positional, model_help("What to measure, with pretrained weights unless --random")],
    data: Annotated[str, option(_DATA, "SOURCE")] = "random:8",
    n: Count = 8,
    shortcut: Annotated[str | None, option("Rewire first: cut, decay:0.6, ...", "RULE")] = None,
    init: Annotated[
        str | None, option("Initialise first: skipless, skipless:shaped, skipless:paired or zero.", "NAME")
    ] = None,
    blocks: Blocks = "all",
    jacobians: Annotated[Literal["auto", "exact", "off"], tyro.conf.arg(help=_JACOBIANS)] = "auto",
    mean: Mean = None,
    std: Std = None,
    input: Inputs = (),  # noqa: A002
    device: Device = "cpu",
    random: Random = False,
    trust: Trust = False,
    json: Json = False,
) -> int:
    """Measure rank, conditioning, attention, echo and quantisation of a model on a few samples.

    Example: unskip measure timm:vit_small_patch16_224 --data photos --shortcut decay:0.6
    """
    import torch

    from unskip.cli._model import by_input, channel_numbers, samples_for, shapes_of, weighted
    from unskip.training import RunFolder, device_of
    from unskip.wiring import parse

    rule = parse(shortcut) if shortcut is not None else None
    where, shapes = device_of(device), shapes_of(input)
    with contextlib.redirect_stdout(sys.stderr), progress(f"measuring {model}") as tick, by_input():
        torch.manual_seed(0)  # random weights, but the same ones each time
        built = weighted(model, random, trust).to(where)
        numbers = {"mean": channel_numbers("mean", mean), "std": channel_numbers("std", std)}
        samples, made = samples_for(built, data, n, shapes, numbers)
        if rule is not None:
            unskip.rewire(built, rule, samples)
        if init is not None:  # calibrated in the model as it is wired
            unskip.init.start_(built, init, torch.Generator().manual_seed(0), samples)
        measurement = unskip.measure(built, samples, blocks=blocks_of(blocks), jacobians=jacobians, progress=tick)
    looks = RunFolder(model).read("health.jsonl")  # of a run; empty for any other model
    if json:
        print_json({"spec": model, "preprocess": made and made.to_dict(), **measurement.to_dict(), "training": looks})
    else:
        print(f"images: {made}\n{measurement}" if made is not None else measurement)
        if looks:
            print(f"\n{_over_training(looks)}")
    return 0


def _over_training(looks: list[dict[str, Any]]) -> str:
    """A table of what was kept in training: three blocks of each kind, and the size of a step by role."""
    rows: dict[int, dict[str, object]] = {}
    for look in sorted(looks, key=lambda look: look["step"]):
        row = rows.setdefault(look["step"], {"step": look["step"]})
        for name, short in (("token_cosine", "tok cos"), ("self_attention", "self-att")):
            values = look.get(name) or []
            row |= {f"{short} {at}": values[at] for at in sorted({0, len(values) // 2, len(values) - 1}) if values}
        row |= {f"step {role}": size for role, size in look.get("relative_step", {}).items()}
    names = [*dict.fromkeys(name for row in rows.values() for name in row)]
    names.sort(key=lambda name: (name.startswith("step "), name.startswith("self"), name.startswith("tok")))
    cells = [[row.get(name) for name in names] for row in rows.values()]
    return f"in training: token cosine and self-attention by block, and the relative step size\n\n{table(names, cells)}"
