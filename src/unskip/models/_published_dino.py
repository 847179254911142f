"""Loads DINO checkpoints in the layout of the published code.

    student, teacher: [module.]backbone.*                 ->  backbone.*
                      [module.]head.mlp.*                 ->  head.mlp.*
                      [module.]head.last_layer.weight_v   ->  head.last.weight
    dino_loss: center                                     ->  centre

A checkpoint of only a backbone, names without a prefix, fills both backbones. Rows of the last layer have norm 1 here;
a warning is issued if a checkpoint has other norms (weight_g).
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
    """Fills student and teacher from a published checkpoint: a .pth file or its content.

    Raises LoadError if names or shapes differ, without changing the model.
    """
    data = read(weights)
    towers = {side: _renamed(data[side]) for side in ("student", "teacher") if isinstance(data.get(side), Mapping)}
    if not towers:
        alone = {f"backbone.{name}": value for name, value in data.items() if isinstance(value, Tensor)}
        if not alone:
            raise LoadError("the checkpoint has neither student and teacher nor the tensors of a backbone")
        towers = {"student": alone, "teacher": alone}
    for side in {"student", "teacher"} - set(towers):
        towers[side] = next(iter(towers.values()))
    wanted = dino.state_dict()
    tensors = {f"{side}.{name}": value for side, tower in towers.items() for name, value in tower.items()}
    has_head = any(".head." in name for name in tensors)
    centre = data.get("dino_loss")
    if isinstance(centre, Mapping) and isinstance(centre.get("center"), Tensor):
        tensors["centre"] = centre["center"].flatten()
    needed = {name for name in wanted if name.startswith(("student.", "teacher."))}
    needed = {name for name in needed if has_head or ".head." not in name}
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
                    "the rows of the checkpoint's last layer have learned norms (norm_last_layer=False); here "
                    "norms are 1, so the head differs, but not the backbone"
                )
            continue
        renamed[name.replace("head.last_layer.weight_v", "head.last.weight")] = value
    return renamed
