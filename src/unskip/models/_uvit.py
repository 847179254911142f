"""U-ViT: time, class and patches are tokens of one ViT, with long skips from its first half to its second.

    x  <-  W concat(x, x_mirror),   before every block of the second half

Bao et al., "All are Worth Words", arXiv 2209.12152, with discrete times and predicted noise; here with the times and
targets of `Flow`. W replaces the stream before each of these blocks: a decay counts the sites of the blocks, in order,
and does not change W.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from unskip._extras import need
from unskip.errors import BadInput
from unskip.models._conditioned import check_images, check_sizes, conditions, images_of, sized, waves
from unskip.models._vit import checkpointed, narrowed, trunc_normal_

UVIT_SIZES = {  # odd depths: equally many blocks before and after the middle one
    "S": {"width": 512, "depth": 13, "heads": 8},
    "M": {"width": 768, "depth": 17, "heads": 12},
    "L": {"width": 1024, "depth": 21, "heads": 16},
    "H": {"width": 1152, "depth": 29, "heads": 16},
}
_TIMES = 1000.0  # U-ViT's time embedding expects times up to 1000


class UViTBlock(nn.Module):
    """A ViT block; in the second half it first merges the output of its mirror block."""

    def __init__(self, width: int, heads: int, long_skip: bool) -> None:
        super().__init__()
        layers = need("timm.layers")

        self.skip_linear = nn.Linear(2 * width, width) if long_skip else None
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = layers.Attention(width, heads, qkv_bias=False)
        self.mlp = layers.Mlp(width, 4 * width)

    def forward(self, x: Tensor, mirror: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None and mirror is not None:
            x = self.skip_linear(torch.cat([x, mirror], 2))
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class UViT(nn.Module):
    """`model(images, time, labels)`: images (batch, channels, size, size) at times (batch,) from noise, 0, to data, 1.

    The label `classes` means no label. The defaults are time 1 and no label.
    """

    def __init__(
        self,
        *,
        size: int = 32,
        patch: int = 2,
        channels: int = 3,
        width: int = 512,
        depth: int = 13,
        heads: int = 8,
        classes: int = 10,
        narrow: bool = False,
    ) -> None:
        """With `narrow` the stream has autocast's precision instead of float32: faster and less exact."""
        super().__init__()
        check_sizes("UViT", size, patch, width, depth, heads, classes)
        if depth % 2 == 0:
            raise BadInput(
                f"UViT: the depth must be odd, with half of the blocks on each side of the middle; got {depth}"
            )
        self.size, self.patch, self.channels, self.classes, self.narrow = size, patch, channels, classes, narrow
        self.default_cfg = {"input_size": (channels, size, size)}  # the input shape for an audit
        half, self.grad_checkpointing = depth // 2, False
        self.patch_embed = need("timm.layers").PatchEmbed(size, patch, channels, width)
        self.label_emb = nn.Embedding(classes + 1, width)
        self.pos_embed = nn.Parameter(torch.zeros(1, 2 + (size // patch) ** 2, width))
        self.in_blocks: Any = nn.ModuleList(UViTBlock(width, heads, False) for _ in range(half))
        self.mid_block = UViTBlock(width, heads, False)
        self.out_blocks: Any = nn.ModuleList(UViTBlock(width, heads, True) for _ in range(half))
        self.norm = nn.LayerNorm(width)
        self.decoder_pred = nn.Linear(width, patch**2 * channels)
        self.final_layer = nn.Conv2d(channels, channels, 3, padding=1)
        self.start_()

    @classmethod
    def named(cls, name: str, **others: Any) -> Self:
        """Builds a published size (S, M, L, H) and patch size: UViT.named("S/4", size=32, channels=3)."""
        return cls(**{**sized("UViT", name, UVIT_SIZES), **others})

    @torch.no_grad()
    def start_(self) -> None:
        """The published initialisation: linear layers, positions and labels with std 0.02, biases zero."""
        trunc_normal_(self)
        for weight in (self.label_emb.weight, self.pos_embed):
            nn.init.trunc_normal_(weight, std=0.02)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def forward(self, images: Tensor, time: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        check_images("UViT", images, self.channels, self.size)
        time, labels = conditions(images, time, labels, self.classes)
        x = self.patch_embed(images)
        # (batch, 2 + patches, width): the time, the class, the patches
        prefix = [waves(_TIMES * time, x.shape[2]).to(x.dtype)[:, None], self.label_emb(labels)[:, None].to(x.dtype)]
        x = torch.cat([*prefix, x], 1) + self.pos_embed
        x = narrowed(x) if self.narrow else x
        outputs = []
        for block in self.in_blocks:
            x = checkpointed(block, self.grad_checkpointing, x)
            outputs.append(x)
        x = checkpointed(self.mid_block, self.grad_checkpointing, x)
        for block in self.out_blocks:
            x = checkpointed(block, self.grad_checkpointing, x, outputs.pop())
        patches = self.decoder_pred(self.norm(x)[:, 2:])
        pixels: Tensor = self.final_layer(images_of(patches, self.patch, self.channels))
        return pixels
