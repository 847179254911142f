"""`unskip absorb MODEL`: decide which MLPs can absorb their skip, and rewrite the model."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

import unskip
from unskip.cli._options import Device, Inputs, Json, Random, Trust, model_help, option
from unskip.cli._say import print_json, progress
from unskip.errors import BadInput, RewireError

if TYPE_CHECKING:
    from torch import nn

_DATA = (
    "Samples to fit approximations to: a folder of images, an .npy file, a named set such as digits, or random:N; for "
    "the run of a language model text, as for train lm."
)
_MAX_ERROR = "Largest relative error of an approximate replacement; worse ones are refused (default: 0.1)."
_APPLY = "Rewrite all sites where it is possible: exact, widen, or approximate (needs --data)."


def absorb_command(
    model: Annotated[
        str, tyro.conf.Positional, model_help("Model to decide on, with pretrained weights unless --random is given")
    ],
    data: Annotated[str | None, option(_DATA, "SOURCE")] = None,
    n: Annotated[int | None, option("Number of samples of --data (default: 64).", "N")] = None,
    apply: Annotated[Literal["exact", "widen", "approximate"] | None, option(_APPLY, "MODE")] = None,
    max_error: Annotated[float | None, option(_MAX_ERROR, "E")] = None,
    distil: Annotated[int | None, option("Training steps for each approximate replacement.", "N")] = None,
    out: Annotated[str | None, option("Folder for the rewritten model.", "FOLDER")] = None,
    input: Inputs = (),  # noqa: A002
    device: Device = "cpu",
    random: Random = False,
    trust: Trust = False,
    json: Json = False,
) -> int:
    """Decide for every MLP of a model whether it can absorb its skip, with a certificate.

    Example: unskip absorb timm:vit_base_patch16_224 --data photos
    """
    import torch

    from unskip.cli._model import builder_of, input_hint, inputs, open_weighted, samples_for, shapes_of, text_for
    from unskip.training import device_of
    from unskip.wiring import find_wiring

    if apply == "approximate" and data is None:
        raise BadInput("--apply approximate needs samples: give --data")
    if out is not None and apply is None:
        raise BadInput("--out saves a rewritten model: give --apply, too")
    if apply != "approximate" and (max_error is not None or distil is not None):
        raise BadInput("--max-error and --distil apply to --apply approximate: give it, too")
    if n is not None and data is None:
        raise BadInput("--n is the number of samples of --data: give --data, too")
    if n is not None and data is not None and data.startswith("random:") and data != f"random:{n}":
        raise BadInput(f"--data {data} already gives the number of samples: write --data random:{n}, without --n")
    where, shapes = device_of(device), shapes_of(input)
    applied = refused = None
    with contextlib.redirect_stdout(sys.stderr), progress(f"deciding {model}") as tick, input_hint():
        torch.manual_seed(0)  # the same random weights each time
        built = open_weighted(model, random, trust).to(where).eval()
        if apply is not None and find_wiring(built) is not None:
            raise BadInput(
                f"--apply {apply} is for models with plain skips, and {model} has a shortcut rule: train one without "
                "--shortcut, or leave --apply out for the verdicts alone"
            )
        samples: Any = None
        if data is not None:
            count = 64 if n is None else n
            text = text_for(model, data, count, "train")  # images of a data set are training images, too
            samples = samples_for(built, data, count, shapes)[0] if text is None else text.to(where)
        example = inputs(built, shapes) if samples is None else None
        scan = unskip.absorption.scan(built, example, data=samples, progress=tick)
        sound = scan.verify()
        if apply is not None:
            try:
                applied = unskip.absorption.apply(
                    built, apply, example, data=samples, max_error=max_error, distil=distil or 0
                )
            except RewireError as error:
                refused = str(error)
        if applied is not None and not applied.done:
            refused = f"--apply {apply}: no site could be rewritten, so nothing is saved"
        elif applied is not None and not sound:
            refused = "a certificate failed verification, so nothing is saved"
        if applied is not None and refused is None and out is not None:
            try:
                _save(built, out, builder_of(model))
            except OSError as error:
                raise BadInput(f"--out {out}: {error}") from None
    if json:
        record = {"spec": model, **scan.to_dict(), "verified": sound, "refused": refused}
        if applied is not None:
            record["applied"] = applied.to_dict()
        print_json(record)
    else:
        print(scan)
        if any(row.verdicts for row in scan):
            print("\nall certificates verified from the weights" if sound else "\na certificate failed verification")
        if applied is not None:
            print(f"\n{applied}")
        if out is not None and refused is None:
            print(f"saved to {out}")
    if refused is not None:
        print(refused, file=sys.stderr)
    return 0 if sound and refused is None else 1


def _save(model: nn.Module, out: str, builder: Any) -> None:
    from unskip._warn import warn

    try:
        unskip.save(model, out, builder)
    except BadInput as error:
        unskip.save(model, out)  # raises again if the builder is not the cause
        warn(f"{out}: saved without a builder: {error}")
