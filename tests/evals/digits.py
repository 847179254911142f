"""A small ViT, and digits as its images."""

from __future__ import annotations

from typing import Any

import timm
from torch import nn

from unskip.data import ImageSet, open_images


def vit(**options: Any) -> nn.Module:
    size = {"img_size": 8, "patch_size": 2, "in_chans": 1, "depth": 3, "embed_dim": 16, "num_heads": 2}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **{**size, "num_classes": 0, **options})
    return model


def digits(split: Any = "train", count: int = 300) -> ImageSet:
    return open_images("digits", split).select(range(count))
