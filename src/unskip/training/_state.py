"""State as plain files: tensors in safetensors, everything else in JSON, with checksums and no pickle.

A state is a tree of dicts, lists, tuples, numbers, strings and tensors, such as an optimizer's `state_dict()`. It is
read back with the same structure and bitwise equal tensors.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unskip._provenance import sha256
from unskip.errors import LoadError

_TENSOR, _TUPLE, _PAIRS, _FLOAT = "tensor:", "tuple:", "pairs:", "float:"


def write_state(folder: Path, name: str, state: object) -> None:
    """Writes `name`.safetensors and `name`.json into a folder."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    tree = _pack(state, tensors)
    save_file(tensors, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(tree, allow_nan=False))


def read_state(folder: Path, name: str, device: str | torch.device = "cpu") -> Any:
    """Reads a state written by `write_state`."""
    from safetensors.torch import load_file

    tensors = load_file(folder / f"{name}.safetensors", device=str(device))
    return _unpack(json.loads((folder / f"{name}.json").read_text()), tensors)


def _pack(value: object, tensors: dict[str, Tensor]) -> object:
    if isinstance(value, Tensor):
        key = str(len(tensors))
        # A copy: safetensors refuses tensors that share memory.
        tensors[key] = value.detach().clone(memory_format=torch.contiguous_format)
        return {_TENSOR: key}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _pack(item, tensors) for key, item in value.items()}
        return {_PAIRS: [[key, _pack(item, tensors)] for key, item in value.items()]}  # JSON keys are strings
    if isinstance(value, tuple):
        return {_TUPLE: [_pack(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_pack(item, tensors) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}  # JSON has no nan and inf
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be saved without pickle")


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_unpack(item, tensors) for item in value[_TUPLE])
    if _FLOAT in value:
        return float(value[_FLOAT])
    if _PAIRS in value:
        return {key: _unpack(item, tensors) for key, item in value[_PAIRS]}
    return {key: _unpack(item, tensors) for key, item in value.items()}


def seal(folder: Path) -> None:
    """Writes checksums of all files in a folder, and flushes everything to the disk."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    sums = {file.relative_to(folder).as_posix(): sha256(file) for file in files}
    (folder / "checksums.json").write_text(json.dumps(sums, indent=1))
    for file in (*files, folder / "checksums.json"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def check(folder: Path) -> None:
    """Raises LoadError if a file is missing or does not match its checksum."""
    try:
        sums = dict(json.loads((folder / "checksums.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise LoadError(f"{folder}: no checksums, so it was not written completely") from error
    for name, expected in sums.items():
        file = folder / name
        if not file.is_file():
            raise LoadError(f"{file}: missing")
        if sha256(file) != expected:
            raise LoadError(f"{file}: damaged, its checksum does not match")
