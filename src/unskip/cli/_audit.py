"""`unskip audit MODEL`: the residual additions of a model, with the weights of its wiring or of a rule."""

from __future__ import annotations

import contextlib
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

import unskip
from unskip.cli._options import Inputs, Json, Trust, model_help, option
from unskip.cli._say import busy, print_json
from unskip.errors import BadInput, ForwardError

if TYPE_CHECKING:
    from torch import nn

    from unskip.anatomy import Audit
    from unskip.cli._model import Shape
    from unskip.wiring import Shortcut, Wiring

_SHORTCUT = (
    "Show the weights that a rule gives each site: keep, cut, decay:0.6, decay:0.6,cosine, decay:product=5e-3, "
    "scale:0.7,0.7, learn:1.0 or anneal:keep>cut@10000."
)


def audit_command(
    model: Annotated[str, tyro.conf.Positional, model_help("Model to audit; named models get random weights")],
    shortcut: Annotated[str | None, option(_SHORTCUT, "RULE")] = None,
    where: Annotated[
        Literal["attention", "mlp"] | None, option("Sites of the rule (default: all).", "attention|mlp")
    ] = None,
    input: Inputs = (),  # noqa: A002
    trust: Trust = False,
    json: Json = False,
) -> int:
    """List every residual addition of a model, in execution order.

    Example: unskip audit timm:vit_base_patch16_224 --shortcut decay:0.6
    """
    from unskip.cli._model import shapes_of
    from unskip.wiring import parse

    if where is not None and shortcut is None:
        raise BadInput(f"--where {where} selects sites for --shortcut: give it, too")
    rule = parse(shortcut) if shortcut is not None else None
    shapes = shapes_of(input)
    # What the model prints while it is built and run goes to stderr.
    with contextlib.redirect_stdout(sys.stderr), busy(f"auditing {model}"):
        survey, wiring = _audit_model(model, rule, where, shapes, trust)
    last = rule.steps if rule is not None else None
    if json:
        _write_json(model, survey, wiring, last)
        return 0
    if sys.stdout.isatty():
        from unskip.cli._draw import draw

        draw(survey, wiring)
        if wiring is not None:
            print(_decay(wiring))
    else:
        print(survey if wiring is None else f"{survey}\n\n{wiring}")
    if wiring is not None and last is not None:
        wiring.step(last)
        print(f"after step {last}: {_decay(wiring)}")
    return 0


def _audit_model(
    name: str, rule: Shortcut | None, where: str | None, shapes: list[Shape], trust: bool
) -> tuple[Audit, Wiring | None]:
    import torch

    from unskip.cli._model import open_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same random weights each time
        model = open_model(name, light=True, trust=trust)
        if all(parameter.device.type != "meta" for parameter in model.parameters()):
            return _survey(model, rule, where, shapes)
        try:
            result = _survey(model, rule, where, shapes)
        except ForwardError:  # the forward pass needs values
            return _survey(open_model(name, trust=trust), rule, where, shapes)
    print(
        "note: a large model, built without weights: |f|/|x| and what depends on it are not measured", file=sys.stderr
    )
    return result


def _survey(
    model: nn.Module, rule: Shortcut | None, where: str | None, shapes: list[Shape]
) -> tuple[Audit, Wiring | None]:
    from unskip.cli._model import input_hint, inputs
    from unskip.wiring import find_wiring

    example = inputs(model, shapes)
    with input_hint():
        if rule is None:
            return unskip.audit(model, example), find_wiring(model)
        saved = None if find_wiring(model) is None else unskip.audit(model)
        wiring = unskip.rewire(model, rule, example, where, verify=False)  # one trace serves both
        return saved if saved is not None else unskip.Audit(type(model).__name__, wiring.survey), wiring


def _write_json(name: str, survey: Audit, wiring: Wiring | None, last: int | None) -> None:
    data: dict[str, Any] = {"spec": name, **survey.to_dict()}
    if wiring is not None:
        data["shortcut"] = wiring.to_dict() | {"band": _band(wiring)}
        if last is not None:
            wiring.step(last)
            data["shortcut"]["end"] = wiring.to_dict() | {"band": _band(wiring)}
    print_json(data)


def _decay(wiring: Wiring) -> str:
    position = _band(wiring)
    return f"effective decay {wiring.effective_decay:.3g}" + (f", {position}" if position else "")


def _band(wiring: Wiring) -> str | None:
    """The effective decay relative to the paper's band; None if a learned weight has diverged."""
    from unskip.wiring import band

    return band(wiring.effective_decay) if math.isfinite(wiring.effective_decay) else None
