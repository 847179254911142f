"""Warns when a rewired model is saved by a tool whose files drop its wiring, as far as that can be seen.

Such tools ask the model for its state_dict. A hook on the rewired model, which torch calls then, looks for them among
the callers. No class is changed, and undoing the wiring takes the hook off.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

from unskip._warn import warn

# The function that writes the files, in the libraries that have one of this name; and what to use instead.
_TRAINER = "add unskip.integrations.transformers.WiringCallback() to the callbacks of the Trainer"
_LIGHTNING = "add unskip.integrations.lightning.WiringCallback() to the callbacks of the Trainer"
_SAVE = "use unskip.save(model, folder)"
_SAVERS = {
    "_save_checkpoint": (("transformers",), _TRAINER),
    "save_pretrained": (("transformers", "diffusers", "peft", "huggingface_hub"), _SAVE),
    "save_model": (("transformers",), _SAVE),
    "dump_checkpoint": (("lightning", "pytorch_lightning"), _LIGHTNING),
}


def watch(model: nn.Module) -> None:
    """Puts the hook on a rewired model, once."""
    if _look not in model._state_dict_pre_hooks.values():
        model.register_state_dict_pre_hook(_look)


def unwatch(model: nn.Module) -> None:
    """Takes the hook off."""
    for key in [key for key, hook in model._state_dict_pre_hooks.items() if hook is _look]:
        del model._state_dict_pre_hooks[key]


def _look(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    # The outermost one: save_pretrained also writes the checkpoints of a Trainer, which may carry the wiring.
    savers = list(_savers())
    if savers and not _carries(savers[-1]):
        name = savers[-1].f_code.co_name
        warn(
            f"{type(module).__name__} is rewired, and {name} of {_library(savers[-1])} does not save its "
            f"wiring: what is loaded from there computes something else. To keep it, {_SAVERS[name][1]}."
        )


def _savers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        libraries, _ = _SAVERS.get(frame.f_code.co_name, ((), ""))
        if _library(frame) in libraries:
            yield frame
        frame = frame.f_back


def _carries(frame: FrameType) -> bool:
    """Whether a callback of the trainer that saves here writes the wiring."""
    owner: Any = frame.f_locals.get("self")
    if frame.f_locals.get("weights_only"):  # Lightning then asks no callback
        return False
    handler = getattr(owner, "callback_handler", None) or getattr(owner, "trainer", None)
    named = frame.f_code.co_name in ("_save_checkpoint", "dump_checkpoint")
    return named and any(getattr(each, "carries_wiring", False) for each in getattr(handler, "callbacks", ()))


def _library(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
