"""Small backbones, and images with masks, for dense evaluations."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn


def vit(**options: Any) -> nn.Module:
    size = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 24, "num_heads": 3}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **{**size, "num_classes": 0, **options})
    return model.eval()


def windows() -> nn.Module:
    model: nn.Module = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1, 1, 1), embed_dim=24, num_heads=(3, 3, 3, 3)
    )
    return model.eval()


def colours(count: int = 12, size: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Bytes with a bright square of whole patches on a dark background, and their masks."""
    draw = torch.Generator().manual_seed(seed)
    masks = torch.zeros(count, size, size, dtype=torch.uint8)
    for mask in masks:
        top, left = (8 * torch.randint(0, size // 8 - 1, (2,), generator=draw)).tolist()
        mask[top : top + 16, left : left + 16] = 1
    noise = torch.randint(0, 40, (count, 3, size, size), generator=draw)
    return (noise + 150 * masks[:, None]).byte(), masks
