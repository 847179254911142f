"""Checkpoints of plain MAE in the layout of the published code, put into our model, name by name.

    cls_token, pos_embed, patch_embed.*, blocks.*, norm.*     ->  encoder.*
    mask_token, decoder_embed.*, decoder_blocks.*             ->  decoder.{mask_token, embed.*, blocks.*}
    decoder_norm.*, decoder_pred.*, decoder_pos_embed         ->  decoder.{norm.*, head.*, positions}

The published decoder has positions for the class token too, which are zero and have no place here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from unskip.errors import BadInput, LoadError
from unskip.models._mae import MAE

_DECODER = {
    "decoder_embed.": "decoder.embed.",
    "decoder_blocks.": "decoder.blocks.",
    "decoder_norm.": "decoder.norm.",
    "decoder_pred.": "decoder.head.",
}


def load_published(mae: MAE, weights: str | Path | Mapping[str, Tensor]) -> None:
    """Fills a plain MAE (long_skips=False) from a published checkpoint: a .pth file or its state dict.

    A checkpoint without a decoder fills the encoder alone. Raises LoadError where names or shapes differ, and leaves
    the model as it was.
    """
    if mae.decoder.skips:
        raise BadInput("published MAE checkpoints have no long skips; build MAE(..., long_skips=False)")
    state = _read(weights)
    wanted = mae.state_dict()
    found = {_renamed(name): value for name, value in state.items()}
    place = found.pop("decoder.positions", None)
    if place is not None:
        found["decoder.positions"] = place[0, mae.grid.prefix :]
    whole = any(name.startswith("decoder.") for name in found)
    needed = {name for name in wanted if whole or name.startswith("encoder.")}
    problems = [f"{name} is missing" for name in sorted(needed - set(found))]
    problems += [f"{name} is not known" for name in sorted(set(found) - needed)]
    problems += [
        f"{name} is {tuple(found[name].shape)}, not {tuple(wanted[name].shape)}"
        for name in sorted(needed & set(found))
        if found[name].shape != wanted[name].shape
    ]
    if problems:
        raise LoadError(
            f"the checkpoint does not fit the model: {'; '.join(problems[:3])} ({len(problems)} in all). Build the MAE "
            "with its encoder, patch size, image size and decoder."
        )
    mae.load_state_dict(found, strict=False)


def _read(weights: str | Path | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    data: Any = weights
    if isinstance(weights, str | Path):
        try:
            data = torch.load(weights, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise LoadError(f"{weights}: no checkpoint of plain tensors (weights_only=True): {reason}") from error
    if isinstance(data, Mapping) and isinstance(data.get("model"), Mapping):
        data = data["model"]
    if not isinstance(data, Mapping) or not data or not all(isinstance(value, Tensor) for value in data.values()):
        raise LoadError("the checkpoint holds no tensors by name, neither at its top nor under 'model'")
    return data


def _renamed(name: str) -> str:
    if name == "mask_token":
        return "decoder.mask_token"
    if name == "decoder_pos_embed":
        return "decoder.positions"
    for theirs, ours in _DECODER.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return f"encoder.{name}"
