"""Builds the optimizer of a model, with each parameter assigned by role exactly once.

adamw  every parameter, fused on a GPU
soap   every parameter; at least two axes: in the eigenbasis, vectors: as in Adam
muon   hidden matrices by Muon; embeddings, tokens, input, head and vectors by AdamW, in one optimizer
other  an optimizer that `register` added, or any of timm, by its timm name
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unskip._checks import number
from unskip._words import nearest
from unskip.errors import BadInput
from unskip.optim._batched import check_rate
from unskip.optim._groups import Assigned, Decays, Groups, groups
from unskip.optim._muon import Muon
from unskip.optim._soap import SOAP
from unskip.optim._stacks import matrix_shape

Group = dict[str, Any]
Make = Callable[..., torch.optim.Optimizer]
_Registered = TypeVar("_Registered", bound=Make)
_registered: dict[str, Make] = {}


def register(name: str) -> Callable[[_Registered], _Registered]:
    """Decorator: makes a class or function (params, lr, weight_decay, **options) an optimizer of `build`, by a name."""
    if name != name.lower() or name in _OWN:
        raise BadInput(f"an optimizer cannot be called {name!r}; choose another name, in lower case")

    def add(make: _Registered) -> _Registered:
        _registered[name] = make
        return make

    return add


def build(
    model: nn.Module,
    name: str,
    lr: float | Tensor,
    weight_decay: float = 0.0,
    *,
    layer_decay: float | None = None,
    split_qkv: bool = False,
    decays: Decays = "matrices",
    **options: Any,
) -> torch.optim.Optimizer:
    """An optimizer for a model; `unskip.optim.groups` shows the assignment. `options` go to the optimizer's class.

    Biases, norms, embeddings and tokens do not decay; with decays="blocks" only the weights and biases of the repeated
    blocks do. Tied weights count once; frozen parameters are excluded. Build it before the model is sharded;
    DistributedDataParallel and torch.compile may come before or after.
    """
    check_rate("build", lr)
    number("build", "weight_decay", weight_decay)
    if layer_decay is not None:
        number("build", "layer_decay", layer_decay)
    assigned = groups(model, layer_decay=layer_decay, split_qkv=split_qkv, decays=decays)
    if name.lower() in _registered:
        params = _param_groups(assigned, lr, weight_decay)
        optimizer = _registered[name.lower()](params, lr=lr, weight_decay=weight_decay, **options)
    else:
        maker = _OWN.get(name.lower()) or _from_timm(name, (*_OWN, *_registered))
        optimizer = maker(assigned, lr, weight_decay, options)
    check_assignment(assigned, optimizer)
    return optimizer


def own_group(optimizer: torch.optim.Optimizer, param: Tensor, name: str) -> None:
    """Moves a parameter into a separate group, which `group_of` finds by name, for example for a separate schedule."""
    for group in optimizer.param_groups:
        for index, other in enumerate(group["params"]):
            if other is param:
                settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                moved: Group = {key: [group[key].pop(index)] for key in ("params", "param_names") if key in group}
                optimizer.param_groups.append({**settings, **moved, "name": name})
                return
    raise BadInput(f"{name}: the optimizer does not have this parameter")


def group_of(optimizer: torch.optim.Optimizer, name: str) -> Group:
    """The group of this name. Call again after `load_state_dict`, which replaces the groups."""
    for group in optimizer.param_groups:
        if group.get("name") == name:
            return group
    raise BadInput(f"the optimizer has no group {name!r}")


def check_assignment(assigned: Groups, optimizer: torch.optim.Optimizer) -> None:
    """Asserts that every trainable parameter is in exactly one group."""
    ids = [id(param) for group in optimizer.param_groups for param in group["params"]]
    assert len(ids) == len(set(ids)), "a parameter is in two groups"
    assert set(ids) == {id(row.param) for row in assigned}, "the optimizer does not have the parameters of the model"


def _adamw(assigned: Groups, lr: float | Tensor, weight_decay: float, options: dict[str, Any]) -> torch.optim.Optimizer:
    fused = all(row.param.is_cuda and row.param.is_floating_point() for row in assigned)
    return torch.optim.AdamW(_param_groups(assigned, lr, weight_decay), **{"lr": lr, "fused": fused or None, **options})


def _soap(assigned: Groups, lr: float | Tensor, weight_decay: float, options: dict[str, Any]) -> torch.optim.Optimizer:
    return SOAP(_param_groups(assigned, lr, weight_decay), **{"lr": lr, "splits": _splits(assigned), **options})


def _muon(assigned: Groups, lr: float | Tensor, weight_decay: float, options: dict[str, Any]) -> torch.optim.Optimizer:
    def use(row: Assigned) -> dict[str, Any]:
        matrix = matrix_shape(row.param.shape, row.blocks) is not None  # more than one row and column
        return {"use": "muon" if row.role == "hidden" and matrix else "adamw"}

    chosen = _param_groups(assigned, lr, weight_decay, use)
    hidden = _splits(assigned, lambda row: row.role == "hidden")
    return Muon(chosen, **{"lr": lr, "splits": hidden, **options})


_OWN: dict[str, Make] = {"adamw": _adamw, "soap": _soap, "muon": _muon}


def _from_timm(name: str, ours: tuple[str, ...]) -> Make:
    factory: Any = import_module("timm.optim")
    known = [*map(str, factory.list_optimizers())]
    if name.lower() not in known:
        near = nearest(name, (*ours, *known))
        raise BadInput(f"build: no optimizer is called {name!r}{near}; choose {', '.join(ours)} or one of timm")

    def make(
        assigned: Groups, lr: float | Tensor, weight_decay: float, options: dict[str, Any]
    ) -> torch.optim.Optimizer:
        info = factory.get_optimizer_info(name)
        for option in ("betas", "eps", "momentum"):  # timm would ignore them silently
            if option in options and not getattr(info, f"has_{option}"):
                raise BadInput(f"build: {name} of timm has no {option}; drop it, or use another optimizer")
        chosen = _param_groups(assigned, lr, weight_decay)
        optimizer = factory.create_optimizer_v2(chosen, name, lr=lr, weight_decay=weight_decay, **options)
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer

    return make


def _param_groups(
    assigned: Groups,
    lr: float | Tensor,
    weight_decay: float,
    extra: Callable[[Assigned], dict[str, Any]] = lambda row: {},
) -> list[Group]:
    """One group per combination of settings, in the order of the model."""
    chosen: dict[tuple[Any, ...], Group] = {}
    for row in assigned:
        more = extra(row)
        settings = {"lr": lr * row.lr, "weight_decay": weight_decay if row.decays else 0.0, **more}
        key = (row.lr, settings["weight_decay"], *more.items())  # without lr, because a tensor is hashed by identity
        group = chosen.setdefault(key, {"params": [], "param_names": [], **settings})
        group["params"].append(row.param)
        group["param_names"].append(row.name)
    for group in chosen.values():  # torch expects (name, parameter) pairs
        group["params"] = list(zip(group.pop("param_names"), group["params"], strict=True))
    return list(chosen.values())


def _splits(assigned: Groups, where: Callable[[Assigned], bool] = lambda row: True) -> dict[Tensor, int]:
    return {row.param: row.blocks for row in assigned if row.blocks > 1 and where(row)}
