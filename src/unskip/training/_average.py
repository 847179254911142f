"""Weights averaged over the steps, for evaluating and sampling: w_mean <- decay * w_mean + (1 - decay) * w.

torch's AveragedModel averages a copy of the model, whose shortcuts would stay as they were while those of the model are
annealed, and it waits for the device at each step. Here the averages are tensors, put into the model to look at it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from unskip.training._state import read_state

_PREFIX = "module."  # of names, as in torch's AveragedModel


class Average:
    """The means of a model's weights and persistent buffers; what is no float is that of the last step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.share, self.steps = 1 - decay, 0
        self.held: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        self.means = {name: value.detach().clone() for name, value in self.held.items()}
        floats = [name for name, value in self.held.items() if value.is_floating_point()]
        self.pairs = [self.means[name] for name in floats], [self.held[name].detach() for name in floats]
        self.counters = [
            (self.means[name], value) for name, value in self.held.items() if not value.is_floating_point()
        ]

    @torch.no_grad()
    def update(self) -> None:
        """After a step. The first is a copy."""
        torch._foreach_lerp_(*self.pairs, self.share if self.steps else 1.0)
        for mean, value in self.counters:
            mean.copy_(value)
        self.steps += 1

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """The model with its averaged weights while it lasts."""
        own = [value.detach().clone() for value in self.held.values()]
        with torch.no_grad():
            for name, value in self.held.items():
                value.copy_(self.means[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for value, before in zip(self.held.values(), own, strict=True):
                    value.copy_(before)

    def state_dict(self) -> dict[str, Tensor]:
        """In the layout of torch's AveragedModel."""
        return {"n_averaged": torch.tensor(self.steps)} | {
            f"{_PREFIX}{name}": mean for name, mean in self.means.items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.steps = int(state["n_averaged"])
        for name, mean in self.means.items():
            mean.copy_(state[f"{_PREFIX}{name}"])


def averaged_weights(checkpoint: Path, device: str | torch.device = "cpu") -> dict[str, Tensor] | None:
    """The averaged weights that a checkpoint holds, by the model's own names; None where it holds none."""
    if not (checkpoint / "average.json").is_file():
        return None
    state = read_state(checkpoint, "average", device)
    return {name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)}
