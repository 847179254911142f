"""An initialisation as text, for commands and configs: "skipless", "skipless:vit-small,centre", "zero"."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unskip._words import nearest
from unskip.errors import BadInput
from unskip.init._skipless import PRESETS, skipless_
from unskip.init._zero import zero_branches_
from unskip.wiring import Where

_PAPER = {"alpha": "qk_noise", "beta": "qk_identity", "c": "vo_gain"}  # their names in arXiv 2510.00345


def start_(
    model: nn.Module,
    words: str,
    generator: torch.Generator | None = None,
    example: object = None,
    *,
    where: Where = None,
    preset: str = "vit-base",
) -> None:
    """Initialises a model as the words say.

    default leaves it as it is; zero is `zero_branches_`; skipless is `skipless_`, with the constants of `preset`. After
    a colon skipless takes, separated by commas: another preset, numbers (qk_noise=, qk_identity=, vo_gain=, or the
    paper's names alpha=, beta=, c=), and centre. `where` chooses sites as in `rewire`.
    """
    if not isinstance(words, str):
        raise BadInput(f"init is {words!r}; it is a text such as skipless or skipless:vit-small,centre,qk_noise=1")
    if preset not in PRESETS:
        raise BadInput(f"preset is {preset!r}; it can be {', '.join(PRESETS)}{nearest(preset, PRESETS)}")
    name, _, rest = words.partition(":")
    details = [word.strip() for word in rest.split(",") if word.strip()]
    if name == "skipless":
        presets = [word for word in details if word in PRESETS]
        if len(presets) > 1:
            raise BadInput(f"init {words!r}: one preset, not {' and '.join(presets)}")
        constants: dict[str, Any] = {**PRESETS[presets[0] if presets else preset]}
        for word in details:
            key, equals, value = word.partition("=")
            if equals and _PAPER.get(key, key) in constants:
                constants[_PAPER.get(key, key)] = _number(words, key, value)
            elif word not in (*PRESETS, "centre"):
                known = (*PRESETS, "centre", *(f"{key}=" for key in constants))
                raise BadInput(f"init {words!r}: {word!r} is none of {', '.join(known)}{nearest(word, known)}")
        skipless_(model, example, **constants, generator=generator, centre="centre" in details, where=where)
    elif name in ("zero", "default") and not details:
        if name == "zero":
            zero_branches_(model, example, where=where)
    else:
        raise BadInput(f"init is {words!r}; it can be default, zero, skipless or skipless:vit-small,centre,qk_noise=1")


def _number(words: str, key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise BadInput(f"init {words!r}: {key} is {value!r}; it must be a number") from None
