"""Published checkpoints: files read without running code from them, and their tensors checked against a model."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unskip.errors import LoadError

Weights = str | Path | Mapping[str, Any]  # a file or its content


def read(weights: Weights) -> Mapping[str, Any]:
    """The content of a checkpoint. Raises LoadError for a file with more than tensors and settings."""
    data: Any = weights
    if isinstance(weights, str | Path):
        try:
            with torch.serialization.safe_globals([argparse.Namespace]):  # settings saved with the tensors
                data = torch.load(weights, map_location="cpu", weights_only=True)
        except Exception as error:  # the reader may raise anything for invalid bytes
            reason = str(error).partition("\n")[0]
            raise LoadError(f"{weights}: not a checkpoint of plain tensors (weights_only=True): {reason}") from error
    if not isinstance(data, Mapping) or not data:
        raise LoadError("the checkpoint has no tensors by name")
    return data


def read_tensors(weights: Weights, *names: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint: under the first of the names that it has, or at its top level."""
    data = read(weights)
    data = next((data[name] for name in names if isinstance(data.get(name), Mapping)), data)
    if not data or not all(isinstance(value, Tensor) for value in data.values()):
        places = " or ".join(map(repr, names))
        raise LoadError(f"the checkpoint has no tensors by name, neither at its top level nor under {places}")
    return dict(data)


def check_fit(
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    needed: Collection[str],
    allowed: Collection[str],
    advice: str,
) -> None:
    """Raises LoadError if a needed name is missing, a name is neither needed nor allowed, or a shape differs."""
    known = {*needed, *allowed}
    problems = [f"{name} is missing" for name in sorted({*needed} - {*tensors})]
    problems += [f"{name} is not known" for name in sorted({*tensors} - known)]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in sorted(known & {*tensors})
        if tensors[name].shape != wanted[name].shape
    ]
    if problems:
        raise LoadError(
            f"the checkpoint does not fit the model: {'; '.join(problems[:3])} ({len(problems)} problems). {advice}"
        )
