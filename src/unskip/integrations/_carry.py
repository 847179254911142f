"""Records, restores and steps all wirings inside a model, by module path."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from unskip.errors import BadInput
from unskip.wiring import Wiring, find_wiring, restore_wiring, wiring_record


def wirings(model: nn.Module) -> Iterator[tuple[str, Wiring]]:
    """The path and wiring of every rewired module in a model, the root included."""
    for path, module in model.named_modules():
        wiring = find_wiring(module)
        if wiring is not None:
            yield _plain(path), wiring


def record(model: nn.Module) -> dict[str, Any]:
    """All wirings of a model as plain data."""
    return {path: wiring_record(wiring) for path, wiring in wirings(model)}


def restore(model: nn.Module, records: dict[str, Any], source: object) -> None:
    """Restores recorded wirings; `source` names their origin in errors."""
    modules = {_plain(path): module for path, module in model.named_modules()}
    for path, data in records.items():
        if path not in modules:
            raise BadInput(f"{source}: it has a wiring for {path!r}, but {type(model).__name__} has no such module")
        restore_wiring(modules[path], copy.deepcopy(data), source)


def move(model: nn.Module, step: int) -> None:
    """Sets annealed weights to their values at a training step."""
    for _, wiring in wirings(model):
        wiring.step(step)


def _plain(path: str) -> str:
    """A path without the parts that torch.compile adds."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")
