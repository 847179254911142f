"""Checks of what an optimizer is given; each raises a BadInput that says what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from unskip._checks import number
from unskip.errors import BadInput


def number_or_tensor(who: str, name: str, value: object) -> None:
    """A number, 0 or more; a learning rate may also be a tensor of one element, which is not read: that would wait."""
    if not (isinstance(value, Tensor) and value.numel() == 1):
        number(who, name, value)


def betas_of(who: str, betas: object) -> None:
    """Two decay rates in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise BadInput(f"{who}: betas must be two numbers in [0, 1), got {betas!r}")
    for beta in betas:
        number(who, "each of betas", beta, below=1)


def plain(who: str, params: Iterable[Tensor]) -> None:
    """Whole real tensors: a sharded one holds only some rows of its matrix."""
    for param in params:
        if type(param.data).__name__ == "DTensor" or hasattr(param, "device_mesh"):
            raise BadInput(
                f"{who}: a sharded (FSDP2, DTensor) parameter of shape {tuple(param.shape)} has no whole matrix on any "
                "rank; use DistributedDataParallel, or 'adamw' for sharded models"
            )
        if not param.is_floating_point():
            raise BadInput(f"{who}: a parameter of dtype {param.dtype} cannot be optimized; leave it out")


def dense(who: str, params: Iterable[Tensor]) -> None:
    """Gradients that are not sparse."""
    for param in params:
        if param.grad is not None and param.grad.layout != torch.strided:
            raise BadInput(f"{who}: the gradient of a {tuple(param.shape)} parameter is sparse; use sparse=False")


def loadable(who: str, state: dict[str, Any], params: Iterable[Tensor], *, group: str, entry: str) -> None:
    """A saved state of this optimizer, whose groups have the field `group`, with entries of the parameters' sizes."""
    if any(group not in each for each in state["param_groups"]):
        raise BadInput(f"{who}: the state to load is that of another optimizer; load one that {who} saved, or none")
    keys = [key for each in state["param_groups"] for key in each["params"]]
    for key, param in zip(keys, params, strict=False):  # torch compares the number of parameters
        found = state["state"].get(key, {}).get(entry)
        if found is not None and found.numel() != param.numel():
            raise BadInput(
                f"{who}: parameter {key} has the shape {tuple(param.shape)}, its state to load {tuple(found.shape)}; "
                "build the optimizer as the saved one was, the same groups in the same order"
            )
