"""Saves and restores a wiring with the checkpoints of transformers.Trainer.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[WiringCallback()])

Every checkpoint gets an unskip.json, so that `unskip.load("out/checkpoint-20")` returns the rewired model. The wiring
is also stored in trainer_state.json, from which `trainer.train(resume_from_checkpoint=True)` restores it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unskip._warn import warn
from unskip.anatomy import unwrapped
from unskip.errors import BadInput
from unskip.integrations import _carry
from unskip.wiring import find_wiring, save_record

try:
    from transformers import PreTrainedModel, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ModuleNotFoundError as error:
    raise BadInput(f"{error.name} is not installed; pip install 'unskip[hf]'") from error


class WiringCallback(TrainerCallback, ExportableState):
    """Writes the wiring into every checkpoint, restores it on resume, and steps `Anneal`.

    At training step n, and in a checkpoint after n steps, the weights are those of `wiring.step(n)`. A model with
    `Learn` must be rewired before the Trainer is created, because the optimizer needs its parameters.
    """

    carries_wiring = True

    def __init__(self) -> None:
        self.model: Any = None

    def state(self) -> dict[str, Any]:
        """The state that the Trainer writes to trainer_state.json."""
        wiring = {} if self.model is None else _carry.record(self.model)
        return {"args": {}, "attributes": {"restored": wiring}}

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        """Stores the unwrapped model."""
        self.model = None if model is None else unwrapped(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        """Restores the wiring of the checkpoint that training resumes from."""
        self.model = unwrapped(model)
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step:
            saved = saved[-1] if isinstance(saved, list) else saved
            _carry.restore(self.model, saved["attributes"]["restored"], f"checkpoint-{state.global_step}")
        _carry.move(self.model, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Sets annealed weights for the next step."""
        _carry.move(self.model, state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Writes unskip.json into the checkpoint."""
        if not state.is_world_process_zero or find_wiring(self.model) is None:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if not save_record(self.model, folder, pretrained=isinstance(self.model, PreTrainedModel)):
            warn(f"{folder}: no model*.safetensors. Training can resume with its wiring, but unskip.load fails.")

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """With load_best_model_at_end, sets annealed weights for the step of that model."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            _carry.move(self.model, state.best_global_step)
