"""Saves and restores a wiring with the checkpoints of Lightning, under checkpoint["unskip"].

    trainer = Trainer(callbacks=[WiringCallback()])

The rewired model may be the LightningModule or any module in it. `trainer.fit(module, ckpt_path=...)` restores the
wiring. For `load_from_checkpoint`, restore it in a hook of the module:

    def on_load_checkpoint(self, checkpoint):
        unskip.integrations.lightning.restore(self, checkpoint)
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from torch import nn

from unskip.errors import BadInput
from unskip.integrations import _carry

# The key of the wiring in a checkpoint.
KEY = "unskip"
_NAMES = ("lightning.pytorch", "pytorch_lightning")  # two packages of the same code with separate classes


def _callback_classes() -> tuple[Any, ...]:
    """The Callback classes of the imported packages, otherwise of the first installed one."""
    loaded = [name for name in _NAMES if name in sys.modules]
    installed = [name for name in _NAMES if importlib.util.find_spec(name.partition(".")[0])]
    if not installed:
        raise BadInput("Lightning is not installed; pip install lightning (or pytorch-lightning)")
    return tuple(importlib.import_module(name).Callback for name in loaded or installed[:1])


def restore(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Restores the wiring of a checkpoint in a LightningModule, before its weights are loaded."""
    _carry.restore(module, checkpoint.get(KEY, {}), f'checkpoint["{KEY}"]')


class WiringCallback(*_callback_classes()):  # type: ignore[misc]  # the bases are computed at import
    """Writes the wiring into every checkpoint, restores it on resume, and steps `Anneal`.

    At `trainer.global_step` n, and in a checkpoint after n steps, the weights are those of `wiring.step(n)`. A module
    with `Learn` must be rewired in its __init__, or call `restore` in its on_load_checkpoint, because its parameters
    must exist before the weights are loaded.
    """

    carries_wiring = True

    def on_save_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Records the wiring."""
        checkpoint[KEY] = _carry.record(pl_module)

    def on_load_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Restores the wiring, before the optimizers are created."""
        restore(pl_module, checkpoint)

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Sets annealed weights for the first step."""
        _carry.move(pl_module, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *rest: Any) -> None:
        """Sets annealed weights for the next step."""
        _carry.move(pl_module, trainer.global_step)
