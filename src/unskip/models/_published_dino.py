"""Checkpoints of DINO in the layout of its published code, put into our model, name by name.

    student, teacher: [module.]backbone.*                 ->  backbone.*
                      [module.]head.mlp.*                 ->  head.mlp.*
                      [module.]head.last_layer.weight_v   ->  head.last.weight
    dino_loss: center                                     ->  centre

A checkpoint of a backbone alone, names without any prefix, fills the backbones of both. The last layer's rows have
length 1 here; where a checkpoint has learned other lengths (weight_g), a warning is issued.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unskip._warn import warn
from unskip.errors import LoadError
from unskip.models._dino import DINO
from unskip.models._published import Weights, check_fit, read


def load_dino(dino: DINO, weights: Weights) -> None:
    """Fills student and teacher from a published checkpoint: a .pth file or what it holds.

    Raises LoadError where names or shapes differ, and leaves the model as it was.
    """
    data = read(weights)
    towers = {side: _renamed(data[side]) for side in ("student", "teacher") if isinstance(data.get(side), Mapping)}
    if not towers:
        alone = {f"backbone.{name}": value for name, value in data.items() if isinstance(value, Tensor)}
        if not alone:
            raise LoadError("the checkpoint holds neither student and teacher nor the tensors of a backbone")
        towers = {"student": alone, "teacher": alone}
    for side in {"student", "teacher"} - set(towers):
        towers[side] = next(iter(towers.values()))
    wanted = dino.state_dict()
    tensors = {f"{side}.{name}": value for side, tower in towers.items() for name, value in tower.items()}
    whole = any(".head." in name for name in tensors)
    centre = data.get("dino_loss")
    if isinstance(centre, Mapping) and isinstance(centre.get("center"), Tensor):
        tensors["centre"] = centre["center"].flatten()
    needed = {name for name in wanted if name.startswith(("student.", "teacher.")) and (whole or ".head." not in name)}
    advice = "Build the backbone with its patch size and image size, and the head with its sizes."
    check_fit(tensors, wanted, needed, ("centre",), advice)
    dino.load_state_dict(tensors, strict=False)


def _renamed(tower: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, value in tower.items():
        name = name.removeprefix("module.")
        if name.endswith("head.last_layer.weight_g"):
            if not bool(torch.isclose(value, torch.ones_like(value), atol=1e-3).all()):
                warn(
                    "the checkpoint has learned lengths of the last layer's rows (it was trained with "
                    "norm_last_layer=False); here they are 1, so the head differs; the backbone does not"
                )
            continue
        renamed[name.replace("head.last_layer.weight_v", "head.last.weight")] = value
    return renamed
