"""The wirings inside a model: recorded as plain data by their paths, restored, and moved to a training step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from unskip.errors import BadInput
from unskip.wiring import Wiring, find_wiring, restore_wiring, wiring_record


def wirings(model: nn.Module) -> Iterator[tuple[str, Wiring]]:
    """Every wiring in a model, its root's or those of rewired modules in it, by path."""
    for path, module in model.named_modules():
        wiring = find_wiring(module)
        if wiring is not None:
            yield _plain(path), wiring


def record(model: nn.Module) -> dict[str, Any]:
    """All wirings of a model as plain data."""
    return {path: wiring_record(wiring) for path, wiring in wirings(model)}


def restore(model: nn.Module, records: dict[str, Any], source: object) -> None:
    """Puts recorded wirings back; `source` is where they stand, for errors."""
    modules = {_plain(path): module for path, module in model.named_modules()}
    for path, data in records.items():
        if path not in modules:
            raise BadInput(f"{source}: it has the wiring of {path!r}, and {type(model).__name__} has no such module")
        restore_wiring(modules[path], copy.deepcopy(data), source)


def move(model: nn.Module, step: int) -> None:
    """Moves annealed weights to where they are at a training step."""
    for _, wiring in wirings(model):
        wiring.step(step)


def _plain(path: str) -> str:
    """A path without what torch.compile puts into it."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")
