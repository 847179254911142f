"""Crops and backbone of the recipes that train on several crops of an image: DINO and SimCLR."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from unskip import spec
from unskip.data import CropFeed, Crops, DrawnFeed, Feed, ImageSet, subset
from unskip.errors import BadInput
from unskip.recipes._models import built, check_patch, check_ranges, timm_arguments
from unskip.recipes._objective import Facts, Objective
from unskip.recipes._online import online_features
from unskip.training import Evaluation


class CropsObjective(Objective):
    """Batches of crops, a timm backbone for images of several sizes, and kNN during training."""

    crops: CropFeed  # set by `feed`; the loss makes the crops, so that this is part of a CUDA graph

    def check(self) -> None:
        check_ranges(self.config, {"patch": (1, math.inf), "jitter": (0, math.inf), "source": (1, math.inf)})
        check_patch(self.config, *(name for name in ("size", "local_size") if hasattr(self.config, name)))

    def feed(self, images: ImageSet, device: torch.device) -> DrawnFeed:
        config = self.config
        strength, count = config.jitter, getattr(config, "local_crops", 0)
        crops = Crops(
            local_crops=count,
            size=config.size,
            local_size=getattr(config, "local_size", config.size),
            scale=(config.scale, 1.0),
            local_scale=(getattr(config, "local_scale", config.scale) if count else config.scale, config.scale),
            jitter=0.8 if strength else 0.0,
            brightness=0.4 * strength,
            contrast=0.4 * strength,
            saturation=0.2 * strength,
            hue=0.1 * strength,
            gray=0.2 if strength else 0.0,
            blur=(1.0, 0.1, 0.5) if strength else (0.0, 0.0, 0.0),
            solarize=0.2 if strength else 0.0,
            interpolation=config.interpolation,
        )
        options: dict[str, Any] = {"seed": config.seed, "device": device, "workers": config.workers}
        self.crops = CropFeed(images, config.batch, crops, **options)
        return DrawnFeed(self.crops)

    def evaluation_feed(self, images: ImageSet, device: torch.device) -> Feed:
        batch = max(self.config.batch, 512)  # no activations are kept for a backward pass
        return self._images(subset(images, self.config.online_images), device, batch)

    def builder(self, facts: Facts) -> dict[str, Any]:
        return {"spec": self.config.model, "kwargs": backbone_arguments(self.config, facts)}

    def evaluations(self, model: nn.Module, train: Feed, test: Feed, split: str) -> dict[str, Evaluation]:
        evaluation = online_features(self.encoder, model, train, test, split, self.config.precision)
        return {"features": evaluation}


def backbone_arguments(config: Any, facts: Facts) -> dict[str, Any]:
    """The arguments of a backbone that takes images of several sizes and returns one vector per image."""
    return timm_arguments(config, facts.channels, dynamic_img_size=True)


def backbone(config: Any, facts: Facts) -> nn.Module:
    """The backbone of a config. Raises BadInput unless it is a ViT that takes images of several sizes."""
    try:
        model = built(config, backbone_arguments(config, facts))
    except BadInput:
        _refuse_one_size(config, spec.build(config.model, light=True))
        raise
    _refuse_one_size(config, model)
    return model


def _refuse_one_size(config: Any, model: nn.Module) -> None:
    name = type(model).__name__
    if not hasattr(model, "dynamic_img_size") and name != "NaFlexVit":  # NaFlexVit always takes any size
        raise BadInput(
            f"{config.model}: {name} has no dynamic_img_size; use a ViT of timm that takes images of any size, such as "
            "timm:vit_small_patch16_224"
        )
