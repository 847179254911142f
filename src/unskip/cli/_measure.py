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
from unskip.errors import BadInput

_DATA = (
    "Samples: a folder of images, an .npy file, a named set such as digits, or random:N (default: random:8); for the "
    "run of a language model text, as for train lm (default: its own)."
)
_JACOBIANS = "Jacobians: auto, exact (full matrices of any size) or off."


def measure_command(
    model: Annotated[
        str, tyro.conf.Positional, model_help("Model to measure, with pretrained weights unless --random is given")
    ],
    data: Annotated[str | None, option(_DATA, "SOURCE")] = None,
    n: Count = 8,
    shortcut: Annotated[str | None, option("Rewire the model first: cut, decay:0.6, ...", "RULE")] = None,
    init: Annotated[
        str | None, option("Initialise the model first: skipless, skipless:shaped, skipless:paired or zero.", "NAME")
    ] = None,
    where: Annotated[
        Literal["attention", "mlp"] | None, option("Sites for --shortcut and --init (default: all).", "attention|mlp")
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

    from unskip.cli._model import channel_numbers, input_hint, open_weighted, samples_for, shapes_of, text_for
    from unskip.training import RunFolder, device_of
    from unskip.wiring import parse

    rule = parse(shortcut) if shortcut is not None else None
    if where is not None and shortcut is None and init is None:
        raise BadInput(f"--where {where} selects sites for --shortcut and --init: give one of them, too")
    target, shapes = device_of(device), shapes_of(input)
    with contextlib.redirect_stdout(sys.stderr), progress(f"measuring {model}") as tick, input_hint():
        torch.manual_seed(0)  # the same random weights each time
        built = open_weighted(model, random, trust).to(target)
        numbers = {"mean": channel_numbers("mean", mean), "std": channel_numbers("std", std)}
        text = text_for(model, data, n)
        samples, preprocess = (
            samples_for(built, data or "random:8", n, shapes, numbers) if text is None else (text.to(target), None)
        )
        if rule is not None:
            unskip.rewire(built, rule, samples, where)
        if init is not None:  # after rewiring, which calibration depends on
            unskip.init.start_(built, init, torch.Generator().manual_seed(0), samples, where=where)
        measurement = unskip.measure(built, samples, blocks=blocks_of(blocks), jacobians=jacobians, progress=tick)
    health = RunFolder(model).read("health.jsonl")  # empty for a model that is not a run
    if json:
        record = {"spec": model, "preprocess": preprocess and preprocess.to_dict(), **measurement.to_dict()}
        print_json(record | {"training": health})
    else:
        if text is not None:
            print(f"text: {data or 'that of the run'}")
        print(f"images: {preprocess}\n{measurement}" if preprocess is not None else measurement)
        if health:
            print(f"\n{_health_table(health)}")
    return 0


def _health_table(records: list[dict[str, Any]]) -> str:
    """Token cosine and self-attention of the first, middle and last block, and relative step sizes, over training."""
    rows: dict[int, dict[str, object]] = {}
    for record in sorted(records, key=lambda record: record["step"]):
        row = rows.setdefault(record["step"], {"step": record["step"]})
        for name, short in (("token_cosine", "tok cos"), ("self_attention", "self-att")):
            values = record.get(name) or []
            row |= {f"{short} {at}": values[at] for at in sorted({0, len(values) // 2, len(values) - 1}) if values}
        row |= {f"step {role}": size for role, size in record.get("relative_step", {}).items()}
    names = [*dict.fromkeys(name for row in rows.values() for name in row)]
    names.sort(key=lambda name: (name.startswith("step "), name.startswith("self"), name.startswith("tok")))
    cells = [[row.get(name) for name in names] for row in rows.values()]
    return f"in training: token cosine and self-attention by block, and the relative step size\n\n{table(names, cells)}"
