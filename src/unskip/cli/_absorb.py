"""`unskip absorb MODEL`: which MLPs could do without their skip, and a model rewritten that way."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated, Any, get_args

import torch
import tyro
from torch import nn

import unskip
from unskip import absorption
from unskip._warn import warn
from unskip.absorption import Mode
from unskip.cli._model import FORMS, builder_of, by_input, device_of, inputs, samples_for, shapes_of, weighted
from unskip.cli._options import Device, Inputs, Json, Random, told
from unskip.cli._say import print_json, progress
from unskip.errors import BadInput

_ASKED = f"What to ask about: {FORMS}. Pretrained weights are loaded, unless --random."
_DATA = "Samples to approximate on: a folder of images, an .npy file, a set such as digits, or random:N."
_APPLY = "Rewrite the sites that may be: exact, widen or approximate (needs --data)."


def absorb(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=_ASKED, metavar="MODEL")],
    data: Annotated[str | None, told(_DATA, "SOURCE")] = None,
    n: Annotated[int, tyro.conf.arg(help="How many samples of the source.", metavar="N")] = 64,
    apply: Annotated[str | None, told(_APPLY, "MODE")] = None,
    out: Annotated[str | None, told("Folder for the rewritten model.", "FOLDER")] = None,
    input: Inputs = (),  # noqa: A002
    device: Device = "cpu",
    random: Random = False,
    json: Json = False,
) -> int:
    """Decide for every MLP of a model whether it can swallow its skip, with a certificate.

    Example: unskip absorb timm:vit_base_patch16_224 --data photos
    """
    if apply is not None and apply not in get_args(Mode):
        raise BadInput(f"--apply {apply}: it can be {', '.join(get_args(Mode))}")
    if apply == "approximate" and data is None:
        raise BadInput("--apply approximate fits to samples: give --data")
    if out is not None and apply is None:
        raise BadInput("--out is for a rewritten model: give --apply too")
    where, shapes = device_of(device), shapes_of(input)
    with contextlib.redirect_stdout(sys.stderr), progress(f"asking about {model}") as tick, by_input():
        torch.manual_seed(0)  # random weights, but the same ones each time
        built = weighted(model, random).to(where).eval()
        samples = None if data is None else samples_for(built, data, n, shapes)
        example = inputs(built, shapes)
        found = absorption.scan(built, example, data=samples, progress=tick)
        sound = found.verify()
        applied = None
        if apply is not None:
            applied = absorption.apply(built, apply, example, data=samples)  # type: ignore[arg-type]
            if out is not None:
                _save(built, out, builder_of(model))
    if json:
        record = {"spec": model, **found.to_dict(), "verified": sound}
        if applied is not None:
            record["applied"] = applied.to_dict()
        print_json(record)
        return 0 if sound else 1
    print(found)
    print("\nevery verdict was checked again from the weights" if sound else "\na verdict did not stand its check")
    if applied is not None:
        print(f"\n{applied}")
        if out is not None:
            print(f"saved to {out}")
    return 0 if sound else 1


def _save(model: nn.Module, out: str, builder: Any) -> None:
    try:
        unskip.save(model, out, builder)
    except BadInput as error:
        unskip.save(model, out)  # raises again where that is not it
        warn(f"{out}: saved without a word on how to build it: {error}")
