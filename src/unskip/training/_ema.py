"""An exponential moving average (EMA) of the weights, for evaluation and sampling: ema <- d * ema + (1 - d) * w.

torch's AveragedModel keeps a copy of the model, whose shortcuts would not follow annealing, and synchronises with the
device at each step. Here the averages are plain tensors that are swapped in. Under FSDP each process averages its
shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from unskip.training._fsdp import local, part_of, whole_of
from unskip.training._state import read_state

_PREFIX = "module."  # of names, as in torch's AveragedModel


class EMA:
    """The EMA of a model's weights and floating-point buffers; other buffers are copied at each step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.share, self.steps = 1 - decay, 0
        self.weights: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        self.values = {name: value.detach().clone() for name, value in self.weights.items()}
        floats = [name for name, value in self.weights.items() if value.is_floating_point()]
        averages = [local(self.values[name]) for name in floats]
        self.pairs = averages, [local(self.weights[name].detach()) for name in floats]
        self.counters = [(self.values[name], self.weights[name]) for name in self.weights.keys() - floats]

    @torch.no_grad()
    def update(self) -> None:
        """Call after each step. The first call copies the weights."""
        torch._foreach_lerp_(*self.pairs, self.share if self.steps else 1.0)
        for average, value in self.counters:
            average.copy_(value)
        self.steps += 1

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """A context in which the model has its EMA weights."""
        saved = [value.detach().clone() for value in self.weights.values()]
        with torch.no_grad():
            for name, value in self.weights.items():
                value.copy_(self.values[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for value, before in zip(self.weights.values(), saved, strict=True):
                    value.copy_(before)

    def state_dict(self) -> dict[str, Tensor]:
        """In the layout of torch's AveragedModel. Under FSDP all processes call it, and tensors are gathered whole."""
        return {"n_averaged": torch.tensor(self.steps)} | {
            f"{_PREFIX}{name}": average for name, average in whole_of(self.values).items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.steps = int(state["n_averaged"])
        for name, average in self.values.items():
            average.copy_(part_of(state[f"{_PREFIX}{name}"], average))


def ema_weights(checkpoint: Path, device: str | torch.device = "cpu") -> dict[str, Tensor] | None:
    """The EMA weights of a checkpoint, by parameter name; None if it has none."""
    if not (checkpoint / "ema.json").is_file():
        return None
    state = read_state(checkpoint, "ema", device)
    return {name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)}
