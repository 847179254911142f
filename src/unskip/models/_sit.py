"""SiT: a transformer that predicts the velocity of a noisy image, with time and class as conditions of its norms.

    x  <-  x + g * f((1 + s) norm(x) + b),      b, s, g linear in silu(time + class), zero at the start (adaLN-zero)

Ma et al., "SiT", arXiv 2401.08740; the layout is that of DiT (Peebles & Xie, arXiv 2212.09748). With long skips, as
in "Residual Connections Harm Generative Representation Learning" (arXiv 2404.10947), a block of the second half first
gets the output of its mirror block in the first,

    x  <-  x + W x_mirror,      W zero at the start

so that the end still gets what decayed shortcuts lose. The shortcuts themselves are set by `unskip.rewire`, not here.
Names of parameters are those of the published code.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from unskip._extras import need
from unskip.models._conditioned import (
    WAVES,
    check_images,
    check_sizes,
    conditions,
    images_of,
    mirrored,
    sized,
    waves,
    xavier_,
)
from unskip.models._vit import Grid, checkpointed, narrowed, positions

SIT_SIZES = {
    "S": {"width": 384, "depth": 12, "heads": 6},
    "B": {"width": 768, "depth": 12, "heads": 12},
    "L": {"width": 1024, "depth": 24, "heads": 16},
    "XL": {"width": 1152, "depth": 28, "heads": 16},
}


class SiTBlock(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the condition, after an optional long skip."""

    def __init__(self, width: int, heads: int, long_skip: bool) -> None:
        super().__init__()
        layers = need("timm.layers")

        norm = partial(nn.LayerNorm, elementwise_affine=False, eps=1e-6)
        self.skip = nn.Linear(width, width) if long_skip else None
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attn = layers.Attention(width, heads, qkv_bias=True)
        gelu: Any = partial(nn.GELU, approximate="tanh")
        self.mlp = layers.Mlp(width, 4 * width, act_layer=gelu)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor, mirror: Tensor | None = None) -> Tensor:
        if self.skip is not None:
            x = x + self.skip(mirror)
        modulation = self.adaLN_modulation(condition)[:, None].chunk(6, 2)  # each (batch, 1, width)
        x = x + modulation[2] * self.attn(_modulated(self.norm1(x), modulation[0], modulation[1]))
        return x + modulation[5] * self.mlp(_modulated(self.norm2(x), modulation[3], modulation[4]))  # type: ignore[no-any-return]


class Time(nn.Module):
    """Time embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WAVES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time: Tensor) -> Tensor:
        embedded: Tensor = self.mlp(waves(time, WAVES))
        return embedded


class Label(nn.Module):
    """Label embedding; the last row means no label."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(classes + 1, width)

    def forward(self, labels: Tensor) -> Tensor:
        embedded: Tensor = self.embedding_table(labels)
        return embedded


class Final(nn.Module):
    """Output layer: tokens to the pixels of their patches."""

    def __init__(self, width: int, pixels: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, pixels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(condition)[:, None].chunk(2, 2)
        pixels: Tensor = self.linear(_modulated(self.norm_final(x), shift, scale))
        return pixels


class SiT(nn.Module):
    """`model(images, time, labels)`: images (batch, channels, size, size) at times (batch,) from noise, 0, to data, 1.

    The label `classes` means no label. The defaults are time 1 and no label.
    """

    pos_embed: Tensor

    def __init__(
        self,
        *,
        size: int = 32,
        patch: int = 2,
        channels: int = 4,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        classes: int = 1000,
        long_skips: bool = False,
        narrow: bool = False,
    ) -> None:
        """With `narrow` the stream has autocast's precision instead of float32: faster and less exact."""
        super().__init__()
        check_sizes("SiT", size, patch, width, depth, heads, classes)
        self.size, self.patch, self.channels, self.classes, self.narrow = size, patch, channels, classes, narrow
        self.default_cfg = {"input_size": (channels, size, size)}  # the input shape for an audit
        self.mirrors, self.grad_checkpointing = mirrored(depth) if long_skips else {}, False
        self.x_embedder = need("timm.layers").PatchEmbed(size, patch, channels, width)
        self.t_embedder = Time(width)
        self.y_embedder = Label(classes, width)
        side = size // patch
        self.register_buffer("pos_embed", positions(Grid(side, side, patch, channels, 0), width)[None])
        self.blocks: Any = nn.ModuleList(SiTBlock(width, heads, index in self.mirrors) for index in range(depth))
        self.final_layer = Final(width, patch**2 * channels)
        self.start_()

    @classmethod
    def named(cls, name: str, **others: Any) -> Self:
        """Builds a published size (S, B, L, XL) and patch size: SiT.named("B/2", size=32, channels=4)."""
        return cls(**{**sized("SiT", name, SIT_SIZES), **others})

    @torch.no_grad()
    def start_(self) -> None:
        """The published initialisation: Xavier, embeddings with std 0.02; gates, long skips and the output zero."""
        xavier_(self)
        embeddings: list[Any] = [self.y_embedder.embedding_table, self.t_embedder.mlp[0], self.t_embedder.mlp[2]]
        for layer in embeddings:
            nn.init.normal_(layer.weight, std=0.02)
        zero: list[Any] = [self.final_layer.linear, self.final_layer.adaLN_modulation[1]]
        zero += [block.adaLN_modulation[1] for block in self.blocks]
        zero += [block.skip for block in self.blocks if block.skip is not None]
        for layer in zero:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def forward(self, images: Tensor, time: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        check_images("SiT", images, self.channels, self.size)
        time, labels = conditions(images, time, labels, self.classes)
        condition = self.t_embedder(time) + self.y_embedder(labels)
        x = self.x_embedder(images) + self.pos_embed
        x = narrowed(x) if self.narrow else x
        outputs: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            skip = [outputs.pop(self.mirrors[index])] if index in self.mirrors else []
            x = checkpointed(block, self.grad_checkpointing, x, condition, *skip)
            if index in self.mirrors.values():
                outputs[index] = x
        return images_of(self.final_layer(x, condition), self.patch, self.channels)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift
