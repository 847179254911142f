"""A small MAE, and random checkpoints in the published layout."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn

from unskip.models import MAE


def vit(**options: Any) -> nn.Module:
    made: nn.Module = timm.create_model(
        options.pop("name", "vit_tiny_patch16_224"),
        **{"img_size": 12, "patch_size": 3, "depth": 4, "embed_dim": 16, "num_heads": 2, "num_classes": 0}
        | {"global_pool": "", "final_norm": False, **options},
    )
    return made


def mae(long_skips: bool = True, encoder: nn.Module | None = None, **options: Any) -> MAE:
    encoder = encoder if encoder is not None else vit(final_norm=not long_skips)
    return MAE(encoder, **{"width": 12, "depth": 2, "heads": 2, "long_skips": long_skips, **options})


def images(count: int = 5, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def draw(count: int = 5, seed: int = 1) -> Tensor:
    return torch.rand(count, 16, generator=torch.Generator().manual_seed(seed))


def unshuffled(tokens: Tensor, mask_token: Tensor, order: Tensor) -> Tensor:
    """Visible tokens and mask tokens in their original order."""
    n, visible, dim = tokens.shape
    full = torch.cat([tokens, mask_token.expand(n, order.shape[1] - visible, dim)], 1)
    return torch.stack([row[where.argsort()] for row, where in zip(full, order, strict=True)])


def made_up(depth: int = 4, decoder: int = 2, width: int = 16, narrow: int = 12) -> dict[str, Tensor]:
    """A random state dict in the published layout."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 17, width),
        "mask_token": (1, 1, narrow),
        "decoder_pos_embed": (1, 17, narrow),
        "patch_embed.proj.weight": (width, 3, 3, 3),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
        "decoder_embed.weight": (narrow, width),
        "decoder_embed.bias": (narrow,),
        "decoder_norm.weight": (narrow,),
        "decoder_norm.bias": (narrow,),
        "decoder_pred.weight": (27, narrow),
        "decoder_pred.bias": (27,),
    }
    for prefix, count, dim in (("blocks", depth, width), ("decoder_blocks", decoder, narrow)):
        for index in range(count):
            at = f"{prefix}.{index}"
            layers = {"attn.qkv": (3 * dim, dim), "attn.proj": (dim, dim), "mlp.fc1": (4 * dim, dim)}
            for name, shape in (layers | {"mlp.fc2": (dim, 4 * dim)}).items():
                shapes[f"{at}.{name}.weight"], shapes[f"{at}.{name}.bias"] = shape, shape[:1]
            for name in ("norm1", "norm2"):
                shapes[f"{at}.{name}.weight"] = shapes[f"{at}.{name}.bias"] = (dim,)
    generator = torch.Generator().manual_seed(3)
    state = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    state["decoder_pos_embed"][:, 0] = 0  # as published: the class token has no position
    return state
