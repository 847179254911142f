"""FSDP2 (torch's `fully_shard`): each of several processes holds a shard of every weight.

Rewiring and parameter groups come first, on the plain model. Sharding then puts distributed tensors where the
parameters were, and the groups are pointed at these. Checkpoints hold whole tensors, gathered on the first process, so
the model of a sharded run is loaded like any other.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from unskip.errors import BadInput


class Sharded:
    """The sharded model with its optimizer, and on the first process a plain copy for checkpoints, on the CPU."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, first: bool) -> None:
        from torch.distributed.fsdp import fully_shard

        if not type(optimizer).__module__.startswith("torch."):
            raise BadInput(f"{type(optimizer).__name__} works on whole matrices: take optimizer='adamw' with fsdp")
        single = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
        if single:
            raise BadInput(
                f"{single[0]} is a scalar, which fully_shard cannot split: leave out fsdp, or the shortcut learn:"
            )
        self.model, self.optimizer = model, optimizer
        self.plain = copy.deepcopy(model).cpu() if first else None
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        for block in _blocks(model):
            fully_shard(block)
        fully_shard(model)
        now = dict(model.named_parameters())
        for group, wanted in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [now[name] for name in wanted]

    def gathered(self) -> tuple[nn.Module | None, dict[str, Any]]:
        """The plain model as it stands now, on the first process, and the optimizer's state. All processes call it."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=whole)
        if self.plain is not None:
            self.plain.load_state_dict(weights)
        return self.plain, get_optimizer_state_dict(self.model, self.optimizer, options=whole)

    def restore(self, weights: dict[str, Any], state: dict[str, Any]) -> None:
        """Puts whole tensors back into the shards. Every process has read them."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        whole = StateDictOptions(full_state_dict=True)
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            for key, value in saved.items():  # what a schedule has added, such as initial_lr
                group.setdefault(key, value)
        set_model_state_dict(self.model, weights, options=whole)
        set_optimizer_state_dict(self.model, self.optimizer, state, options=whole)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The units that a model repeats, which are gathered one at a time: the outermost lists of one class."""
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        units = [*module.children()] if isinstance(module, nn.ModuleList | nn.Sequential) else []
        if len(units) > 1 and len({type(unit) for unit in units}) == 1 and module not in inside:
            blocks += units
            inside |= set(module.modules())
    return blocks
