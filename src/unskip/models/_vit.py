"""Shared by models with ViT blocks: the patch grid, positions, long skips, initialisation, precision of streams."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unskip._extras import need
from unskip.errors import BadInput
from unskip.init import sine_cosine


class Grid(NamedTuple):
    """The patch grid of an image, and the number of tokens before it."""

    rows: int
    columns: int
    patch: int
    channels: int
    prefix: int

    @property
    def patches(self) -> int:
        return self.rows * self.columns


def grid_of(encoder: nn.Module) -> Grid:
    """The grid of a ViT with non-overlapping patches. Raises BadInput for any other model."""
    name = type(encoder).__name__
    if not isinstance(encoder, need("timm.models.vision_transformer").VisionTransformer):
        raise BadInput(f"{name} has no patch tokens that can be dropped; use a VisionTransformer of timm")
    embed: Any = encoder.patch_embed
    proj = getattr(embed, "proj", None)
    hybrid = hasattr(embed, "backbone")  # projects feature maps of a backbone
    if hybrid or not isinstance(proj, nn.Conv2d) or proj.kernel_size != proj.stride or any(map(int, proj.padding)):
        raise BadInput(f"{name}: its patch embedding ({type(embed).__name__}) is not limited to its patch")
    (tall, wide), (height, width) = proj.kernel_size, embed.img_size
    if tall != wide:
        raise BadInput(f"{name}: patches are {tall} x {wide}; they must be square")
    if height % tall or width % tall:
        raise BadInput(f"{name}: patches of {tall} do not divide an image of {height} x {width}")
    return Grid(height // tall, width // tall, tall, proj.in_channels, int(encoder.num_prefix_tokens))


def checkpointed(block: nn.Module, on: bool, *inputs: Tensor) -> Tensor:
    """The output of a block; `on` recomputes its activations in the backward pass instead of storing them."""
    output: Tensor = checkpoint(block, *inputs, use_reentrant=False) if on else block(*inputs)
    return output


def sources(encoder: int, decoder: int) -> tuple[int, ...]:
    """The encoder blocks whose outputs go into decoder blocks 0, 1, 2, ...: evenly spaced, deepest first.

    Every second block, as in the paper (12 and 8 blocks: 11, 9, 7, 5, 3, 1), or fewer if the decoder is shallower.
    """
    count = max(1, min(decoder, encoder // 2))
    return tuple(encoder * (index + 1) // count - 1 for index in reversed(range(count)))


def positions(grid: Grid, dim: int) -> Tensor:
    """(patches, dim): 2-D sine-cosine positions."""
    return sine_cosine(grid.rows, grid.columns, dim)


@torch.no_grad()
def trunc_normal_(model: nn.Module) -> None:
    """Fills every linear layer: truncated normal with std 0.02, biases zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def narrowed(x: Tensor) -> Tensor:
    """Casts to the precision of autocast if it is enabled."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
