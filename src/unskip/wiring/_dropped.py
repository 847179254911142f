"""Warns when another tool saves a rewired model without its wiring.

Such tools call state_dict. A pre-hook on the rewired model searches the call stack for them. No class is changed, and
undoing the wiring removes the hook.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

from unskip._warn import warn

_TRAINER = "add unskip.integrations.transformers.WiringCallback() to the callbacks of the Trainer"
_LIGHTNING = "add unskip.integrations.lightning.WiringCallback() to the callbacks of the Trainer"
_SAVE = "use unskip.save(model, folder)"
_SAVERS = {  # function that writes the files -> (libraries with such a function, what to use instead)
    "_save_checkpoint": (("transformers",), _TRAINER),
    "save_pretrained": (("transformers", "diffusers", "peft", "huggingface_hub"), _SAVE),
    "save_model": (("transformers",), _SAVE),
    "dump_checkpoint": (("lightning", "pytorch_lightning"), _LIGHTNING),
}


def watch(model: nn.Module) -> None:
    """Registers the hook on a rewired model, once."""
    if _look not in model._state_dict_pre_hooks.values():
        model.register_state_dict_pre_hook(_look)


def unwatch(model: nn.Module) -> None:
    """Removes the hook."""
    for key in [key for key, hook in model._state_dict_pre_hooks.items() if hook is _look]:
        del model._state_dict_pre_hooks[key]


def _look(module: nn.Module, prefix: str, keep_vars: bool) -> None:  # pickled with the model by this name
    # The outermost saver decides: a Trainer calls save_pretrained for checkpoints that may contain the wiring.
    savers = list(_savers())
    if savers and not _carries(savers[-1]):
        name = savers[-1].f_code.co_name
        warn(
            f"{type(module).__name__} is rewired, and {name} of {_library(savers[-1])} does not save its "
            f"wiring: the loaded model will compute something else. To keep the wiring, {_SAVERS[name][1]}."
        )


def _savers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        libraries, _ = _SAVERS.get(frame.f_code.co_name, ((), ""))
        if _library(frame) in libraries:
            yield frame
        frame = frame.f_back


def _carries(frame: FrameType) -> bool:
    """Whether a callback of the trainer that is saving writes the wiring."""
    owner: Any = frame.f_locals.get("self")
    if frame.f_locals.get("weights_only"):  # Lightning then calls no callback
        return False
    handler = getattr(owner, "callback_handler", None) or getattr(owner, "trainer", None)
    by_trainer = frame.f_code.co_name in ("_save_checkpoint", "dump_checkpoint")
    return by_trainer and any(getattr(c, "carries_wiring", False) for c in getattr(handler, "callbacks", ()))


def _library(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
