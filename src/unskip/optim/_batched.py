"""The base class of SOAP and Muon: `splits`, checked parameter groups, and gradients checked before a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from unskip._checks import number, whole
from unskip.errors import BadInput


class BatchedOptimizer(torch.optim.Optimizer):
    """An optimizer over stacks of equal shapes. Subclasses check groups and update parameters.

    `splits` maps parameters to the number of row blocks that are separate matrices, 3 for a fused qkv.
    """

    own_field: str  # a group setting that no other optimizer has

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], splits: Mapping[Tensor, int] | None) -> None:
        self._splits = dict(splits or {})
        super().__init__(params, defaults)
        unused = set(self._splits) - set(self._params())
        if unused:
            raise BadInput(f"{self._name}: splits names {len(unused)} tensors that are not among the parameters")

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises BadInput for a group that cannot be optimized."""
        raise NotImplementedError

    def _move(self) -> None:
        """Updates all parameters that have a gradient."""
        raise NotImplementedError

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group, who = self.param_groups[-1], self._name
        try:
            check_rate(who, group["lr"])
            number(who, "weight_decay", group["weight_decay"])
            number(who, "eps", group["eps"])
            if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
                raise BadInput(f"{who}: betas must be two numbers in [0, 1), got {group['betas']!r}")
            for beta in group["betas"]:
                number(who, "each of betas", beta, below=1)
            group["blocks"] = [
                whole(who, "every entry of splits", self._splits.get(p, 1), low=1) for p in group["params"]
            ]
            self._check_group(group)
        except BadInput:
            self.param_groups.pop()
            raise

    def _check_whole(self, params: Iterable[Tensor]) -> None:
        """Raises BadInput for sharded parameters, which have only some rows of a matrix, and for complex or integer."""
        for param in params:
            if type(param.data).__name__ == "DTensor" or hasattr(param, "device_mesh"):
                raise BadInput(
                    f"{self._name}: a sharded (FSDP2, DTensor) parameter of shape {tuple(param.shape)} has no whole "
                    "matrix on any rank; use DistributedDataParallel, or 'adamw' for sharded models"
                )
            if not param.is_floating_point():
                raise BadInput(f"{self._name}: a parameter of dtype {param.dtype} cannot be optimized; exclude it")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for param in self._params():  # before any parameter is updated
            if param.grad is not None and param.grad.layout != torch.strided:
                raise BadInput(
                    f"{self._name}: the gradient of a {tuple(param.shape)} parameter is sparse; use sparse=False"
                )
        self._move()
        return loss

    def _check_state(self, state: dict[str, Any]) -> None:
        """Raises BadInput for the saved state of another optimizer, or of parameters of other sizes."""
        if any(self.own_field not in group for group in state["param_groups"]):
            raise BadInput(
                f"{self._name}: the state to load is from another optimizer; load one that {self._name} saved"
            )
        keys = [key for group in state["param_groups"] for key in group["params"]]
        for key, param in zip(keys, self._params(), strict=False):  # torch compares the number of parameters
            saved = state["state"].get(key, {})
            moment = saved.get("exp_avg", saved.get("momentum_buffer"))
            if moment is not None and moment.numel() != param.numel():
                raise BadInput(
                    f"{self._name}: parameter {key} has the shape {tuple(param.shape)}, its saved state "
                    f"{tuple(moment.shape)}; build the optimizer as the saved one was, with the same groups"
                )


def check_rate(who: str, lr: object) -> None:
    """Checks for a number of at least 0, or a one-element tensor, not read because that would synchronise."""
    if not (isinstance(lr, Tensor) and lr.numel() == 1):
        number(who, "lr", lr)
