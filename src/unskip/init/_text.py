"""An initialisation as text, for commands and configs: "skipless", "skipless:shaped,position_code=sincos", "zero"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import nn

from unskip._words import nearest
from unskip.errors import BadInput
from unskip.init._position import PositionCode, position_code_
from unskip.init._skipless import PRESETS, skipless_
from unskip.init._zero import zero_branches_
from unskip.wiring import Where

_PAPER = {"alpha": "qk_noise", "beta": "qk_identity", "c": "vo_gain"}  # their names in arXiv 2510.00345
_NUMBERS = ("qk_noise", "qk_identity", "vo_gain", "mlp_gain", "mlp_bias", "mix", "self_attention")
_OPTIONS: dict[str, Callable[[str], object]] = {**dict.fromkeys((*_NUMBERS, *_PAPER), float), "carry": int}
_OPTIONS["position_code"] = str
_SWITCHES = ("centre", "pairs")
_FORMS = "default, zero, skipless or skipless:shaped,qk_noise=1; position_code=orthogonal may follow each"


def start_(
    model: nn.Module,
    words: str,
    generator: torch.Generator | None = None,
    example: object = None,
    *,
    where: Where = None,
    preset: str = "vit-base",
) -> None:
    """Initialises a model from a text.

    default changes nothing; zero is `zero_branches_`; skipless is `skipless_` with the constants of `preset`. After a
    colon skipless accepts, separated by commas: another preset (the paper's vit-base and vit-small; shaped; paired),
    centre, pairs, and its options by name: qk_noise=, qk_identity=, vo_gain= (or the paper's alpha=, beta=, c=),
    mlp_gain=, mlp_bias=, carry=, mix=, self_attention=. All three accept position_code=orthogonal or sincos. `where`
    selects sites as in `rewire`.
    """
    if not isinstance(words, str):
        raise BadInput(f"init is {words!r}; it must be a text such as skipless or skipless:vit-small,centre,qk_noise=1")
    if preset not in PRESETS:
        raise BadInput(f"preset is {preset!r}; it can be {', '.join(PRESETS)}{nearest(preset, PRESETS)}")
    name, _, rest = words.partition(":")
    details = [word.strip() for word in rest.split(",") if word.strip()]
    if name not in ("skipless", "zero", "default"):
        raise BadInput(f"init is {words!r}; it can be {_FORMS}")
    presets = [word for word in details if word in PRESETS]
    if len(presets) > 1:
        raise BadInput(f"init {words!r}: use one preset, not {' and '.join(presets)}")
    options: dict[str, Any] = {}
    for option, value in (_option(words, word) for word in details if word not in PRESETS):
        if option in options:
            raise BadInput(f"init {words!r}: {option} is set twice")
        options[option] = value
    if name == "skipless":
        constants: dict[str, Any] = {**PRESETS[presets[0] if presets else preset], **options}
        skipless_(model, example, **constants, generator=generator, where=where)
        return
    if presets or options.keys() - {"position_code"}:
        raise BadInput(f"init is {words!r}; it can be {_FORMS}")
    if options:
        position_code_(model, example, kind=options["position_code"], generator=generator)
    if name == "zero":
        zero_branches_(model, example, where=where)


def has_pairs(words: str) -> bool:
    """Whether the text of an initialisation asks for mirrored pairs of units."""
    details = [word.strip() for word in words.partition(":")[2].split(",")]
    return any(word == "pairs" or PRESETS.get(word, {}).get("pairs", False) for word in details)


def _option(words: str, word: str) -> tuple[str, Any]:
    """An option of `skipless_` and its value."""
    key, equals, text = word.partition("=")
    if word in _SWITCHES:
        return word, True
    if not equals or key not in _OPTIONS:
        known = (*PRESETS, *_SWITCHES, *(f"{key}=" for key in _OPTIONS))
        raise BadInput(f"init {words!r}: {word!r} is not one of {', '.join(known)}{nearest(word, known)}")
    try:
        value = _OPTIONS[key](text)
    except ValueError:
        raise BadInput(f"init {words!r}: {key} is {text!r}; it must be a number") from None
    if key == "position_code" and value not in get_args(PositionCode):
        raise BadInput(f"init {words!r}: {key} is {text!r}; it can be {', '.join(get_args(PositionCode))}")
    return _PAPER.get(key, key), value
