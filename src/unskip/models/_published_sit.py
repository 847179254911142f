"""Checkpoints of SiT in the published layout, put into our model.

Names are the same. Where the published model has room for a variance too (learn_sigma), its last layer is twice as
wide, and the half that predicts the velocity is taken:

    final_layer.linear  (patch * patch * 2 channels, width)  ->  the first `channels` of every pixel

A training checkpoint holds weights under "ema" and "model"; the averaged ones are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from unskip.errors import LoadError
from unskip.models._sit import SiT

_HEAD = "final_layer.linear."


def load_published_sit(model: SiT, weights: str | Path | Mapping[str, Any]) -> None:
    """Fills a SiT from a published checkpoint: a .pt file or its state dict. Long skips stay as they are, at zero.

    Raises LoadError where names or shapes differ, and leaves the model as it was.
    """
    state = dict(_read(weights))
    wanted = model.state_dict()
    for name in (f"{_HEAD}weight", f"{_HEAD}bias"):
        if name in state and len(state[name]) == 2 * len(wanted[name]):
            by_pixel = state[name].reshape(model.patch**2, 2, model.channels, *state[name].shape[1:])
            state[name] = by_pixel[:, 0].reshape(wanted[name].shape) if _fits(by_pixel, wanted[name]) else state[name]
    own = {name for name in wanted if ".skip." in name}
    problems = [f"{name} is missing" for name in sorted(set(wanted) - own - set(state))]
    problems += [f"{name} is not known" for name in sorted(set(state) - set(wanted))]
    problems += [
        f"{name} is {tuple(state[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in sorted(set(wanted) & set(state))
        if state[name].shape != wanted[name].shape
    ]
    if problems:
        raise LoadError(
            f"the checkpoint does not fit the model: {'; '.join(problems[:3])} ({len(problems)} in all). Build the SiT "
            "with its width, depth, patch, size of latents and number of classes."
        )
    model.load_state_dict(state, strict=False)


def _fits(by_pixel: Tensor, wanted: Tensor) -> bool:
    return by_pixel[:, 0].numel() == wanted.numel()


def _read(weights: str | Path | Mapping[str, Any]) -> Mapping[str, Tensor]:
    data: Any = weights
    if isinstance(weights, str | Path):
        try:
            data = torch.load(weights, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise LoadError(f"{weights}: no checkpoint of plain tensors (weights_only=True): {reason}") from error
    for name in ("ema", "model"):
        if isinstance(data, Mapping) and isinstance(data.get(name), Mapping):
            data = data[name]
            break
    if not isinstance(data, Mapping) or not data or not all(isinstance(value, Tensor) for value in data.values()):
        raise LoadError("the checkpoint holds no tensors by name, neither at its top nor under 'ema' or 'model'")
    return data
