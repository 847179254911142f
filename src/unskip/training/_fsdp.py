"""FSDP2 (torch's `fully_shard`): each process holds a shard of every weight.

Rewiring and parameter groups come first, on the plain model. Sharding then replaces the parameters by distributed
tensors. Elementwise optimizers such as AdamW get the shards. Other optimizers (SOAP, Muon) work on whole matrices: one
process holds the whole of a parameter and its optimizer state, updates it, and sends the result to all shards.

Checkpoints hold whole tensors, so the model of a sharded run is loaded like any other, and the run can be resumed on
any number of processes, sharded or not. torch's functions are used directly, because accelerate's plugin shards on GPUs
only and gives every optimizer the shards.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from unskip.errors import BadInput

_ELEMENTWISE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)

State = dict[str, Any]


class Sharded:
    """The sharded model and its optimizer, and on the first process a plain copy on the CPU for checkpoints."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
        if scalars:
            raise BadInput(
                f"{scalars[0]} is a scalar, which fully_shard cannot split; leave out fsdp, or the shortcut learn:"
            )
        self.model, self.optimizer, self.rank = model, optimizer, dist.get_rank()
        self.plain = copy.deepcopy(model).cpu() if self.rank == 0 else None
        self.by_shard = isinstance(optimizer, _ELEMENTWISE)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.owners = _owners(params, dist.get_world_size())
        whole = [] if self.by_shard else [self._whole(index, param) for index, param in enumerate(params)]
        mesh = init_device_mesh(params[0].device.type, (dist.get_world_size(),))
        for block in _blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        now: dict[str, Any] = dict(model.named_parameters())
        self.shards = [now[names[id(parameter)]] for parameter in params]
        replacements = iter(self.shards if self.by_shard else whole)
        for group in optimizer.param_groups:
            group["params"] = [next(replacements) for _ in group["params"]]

    def _whole(self, index: int, param: Tensor) -> nn.Parameter:
        """The whole parameter on the process that updates it; elsewhere one of the same shape without memory."""
        mine = self.owners[index] == self.rank
        return nn.Parameter(param.detach().clone() if mine else param.new_empty(()).expand(param.shape))

    @property
    def params(self) -> list[Any]:
        """The parameters of the optimizer."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self) -> None:
        """The optimizer's step."""
        if self.by_shard:
            self.optimizer.step()
            return
        moved = []
        for whole, shard, owner in zip(self.params, self.shards, self.owners, strict=True):
            if shard.grad is not None:
                gradient = shard.grad.full_tensor()
                whole.grad = gradient if owner == self.rank else None
                moved.append((whole, shard, owner))
        self.optimizer.step()
        for whole, shard, owner in moved:
            whole.grad = None
            shard.copy_(part_of(whole.detach(), shard, owner))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)

    def gathered(self) -> tuple[nn.Module | None, State]:
        """The plain model, on the first process, and the state of the optimizer. All processes call it."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        weights = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.plain is not None:
            self.plain.load_state_dict(weights)
        state = self.optimizer.state_dict()
        mine = {key: whole_of(entry) for key, entry in state["state"].items()}
        if self.by_shard:
            return self.plain, {**state, "state": mine}
        parts: list[Any] | None = [None] * dist.get_world_size() if self.rank == 0 else None
        dist.gather_object(mine, parts)
        merged = {key: entry for part in parts or [] for key, entry in part.items()}
        return self.plain, {**state, "state": dict(sorted(merged.items()))}

    def restore(self, weights: dict[str, Any], state: State) -> None:
        """Copies whole tensors, which every process has read, into the shards."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        mine: dict[int, State] = {}
        for key, entry in state["state"].items():
            if self.by_shard:
                shard = self.shards[key]
                same = {name: getattr(value, "shape", None) == shard.shape for name, value in entry.items()}
                mine[key] = {name: part_of(value, shard) if same[name] else value for name, value in entry.items()}
            elif self.owners[key] == self.rank:
                mine[key] = entry
        self.optimizer.load_state_dict({**state, "state": mine})
        set_model_state_dict(self.model, weights, options=StateDictOptions(full_state_dict=True))
        for whole, shard, owner in () if self.by_shard else zip(self.params, self.shards, self.owners, strict=True):
            gathered = shard.detach().full_tensor()  # not from `weights`, which has only one name of a tied weight
            if owner == self.rank:
                whole.data.copy_(gathered)


def whole_of(state: State) -> State:
    """A flat state with whole tensors for sharded ones, copied to the CPU. All processes call it."""
    gathered = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for name, value in gathered.items()
    }


def part_of(value: Tensor, like: Any, source: int | None = None) -> Tensor:
    """Shards a tensor as `like`, if that is sharded; from the process `source`, or from all if all have the same."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=source)


def local(value: Any) -> Tensor:
    """The part of a tensor that this process holds."""
    part: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return part


def _owners(params: list[Tensor], world: int) -> list[int]:
    """The process that updates each parameter: from large to small, each goes to the least loaded process."""
    load, owners = [0] * world, [0] * len(params)
    for index in sorted(range(len(params)), key=lambda index: -params[index].numel()):
        owners[index] = load.index(min(load))
        load[owners[index]] += params[index].numel()
    return owners


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, which are gathered one at a time: outermost lists of modules of one class."""
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        units = [*module.children()] if isinstance(module, nn.ModuleList | nn.Sequential) else []
        if len(units) > 1 and len({type(unit) for unit in units}) == 1 and module not in inside:
            blocks += units
            inside |= set(module.modules())
    return blocks
