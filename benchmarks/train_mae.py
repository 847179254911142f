"""Compares the speed of an MAE pretraining step (ViT-B/16 at 224 px) with the published implementation.

    python benchmarks/train_mae.py                          # on a GPU: batch 512, bytes on the device
    python benchmarks/train_mae.py --small --device cpu     # smoke test at a size for a CPU

    published        normalise, embed all patches, gather visible ones, restore the token order, predict all patches,
                     mask the loss; attention without a fused kernel
    published, sdpa  the same with torch's fused attention
    ours             `unskip.models.MAE`, plain: the same model and loss
    ours, narrow     with residual streams in bf16
    ours, paper's    with long skips and decayed shortcuts, which need more operations

All are compiled, with bf16 autocast and fused AdamW. They alternate, and ratios are of adjacent measurements. First,
the losses for the same weights, images and masks are compared. The JSON is written to docs/results/train-mae-gpu.json.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from _turns import Step, arguments, attention, turns, vit, write
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.models import MAE, load_published
from unskip.models._vit import Grid, positions

ROOT = Path(__file__).resolve().parent.parent
BASE = {"size": 224, "patch": 16, "dim": 768, "depth": 12, "heads": 12, "width": 512, "blocks": 8, "decoder_heads": 16}
SMALL = {"size": 32, "patch": 8, "dim": 48, "depth": 2, "heads": 2, "width": 32, "blocks": 2, "decoder_heads": 2}


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-2, -1) * (dim // self.heads) ** -0.5).softmax(-1) @ v
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, dim))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads, fused)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, 4 * dim), "fc2": nn.Linear(4 * dim, dim)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


class Published(nn.Module):
    """The published implementation, with its parameter names."""

    def __init__(self, sizes: dict[str, int], fused: bool) -> None:
        super().__init__()
        dim, width, patch = sizes["dim"], sizes["width"], sizes["patch"]
        side = sizes["size"] // patch
        self.patch, self.visible = patch, side * side // 4
        grid = Grid(side, side, patch, 3, 1)
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, dim, patch, patch)})
        self.cls_token, self.mask_token = nn.Parameter(torch.randn(1, 1, dim)), nn.Parameter(torch.randn(1, 1, width))
        for name, each in (("pos_embed", dim), ("decoder_pos_embed", width)):
            table = torch.cat([torch.zeros(1, each), positions(grid, each)])[None]
            setattr(self, name, nn.Parameter(table, requires_grad=False))
        self.blocks = nn.ModuleList(Block(dim, sizes["heads"], fused) for _ in range(sizes["depth"]))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.decoder_embed = nn.Linear(dim, width)
        self.decoder_blocks = nn.ModuleList(Block(width, sizes["decoder_heads"], fused) for _ in range(sizes["blocks"]))
        self.decoder_norm = nn.LayerNorm(width, eps=1e-6)
        self.decoder_pred = nn.Linear(width, patch * patch * 3)
        mean, std = (torch.tensor(v)[:, None, None] * 255 for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        images = (images.float() - self.mean) / self.std
        x = self.patch_embed["proj"](images).flatten(2).transpose(1, 2) + self.pos_embed[:, 1:]
        batch, patches, dim = x.shape
        if noise is None:
            noise = torch.rand(batch, patches, device=x.device)
        shuffle = noise.argsort(1)
        restore = shuffle.argsort(1)
        x = x.gather(1, shuffle[:, : self.visible, None].expand(-1, -1, dim))
        mask = torch.ones(batch, patches, device=x.device)
        mask[:, : self.visible] = 0
        mask = mask.gather(1, restore)
        x = torch.cat([(self.cls_token + self.pos_embed[:, :1]).expand(batch, -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_embed(self.norm(x))
        tokens = torch.cat([x[:, 1:], self.mask_token.expand(batch, patches - self.visible, -1)], 1)
        tokens = tokens.gather(1, restore[:, :, None].expand(-1, -1, tokens.shape[2]))
        x = torch.cat([x[:, :1], tokens], 1) + self.decoder_pos_embed
        for block in self.decoder_blocks:
            x = block(x)
        prediction = self.decoder_pred(self.decoder_norm(x))[:, 1:]
        side, patch = images.shape[2] // self.patch, self.patch
        target = (
            images.reshape(batch, 3, side, patch, side, patch).permute(0, 2, 4, 3, 5, 1).reshape(batch, patches, -1)
        )
        target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
        loss = (prediction - target).square().mean(-1)
        return (loss * mask).sum() / mask.sum()


def ours(sizes: dict[str, int], long_skips: bool = False, narrow: bool = False) -> MAE:
    encoder = vit("vit_base_patch16_224", sizes, global_pool="", final_norm=not long_skips)
    model = MAE(
        encoder,
        width=sizes["width"],
        depth=sizes["blocks"],
        heads=sizes["decoder_heads"],
        long_skips=long_skips,
        narrow=narrow,
    )
    if long_skips:
        unskip.rewire(model.encoder, "decay:0.6")
    return model


def loss_difference(sizes: dict[str, int], device: str) -> float:
    """Absolute difference of the two losses for the same weights, images and masks, in float32."""
    torch.manual_seed(0)
    reference, own = Published(sizes, fused=True).to(device), ours(sizes).to(device)
    load_published(own, reference.state_dict())
    images = torch.randint(256, (8, 3, sizes["size"], sizes["size"]), dtype=torch.uint8, device=device)
    noise = torch.rand(8, (sizes["size"] // sizes["patch"]) ** 2, device=device)
    with torch.no_grad():
        return abs(float(reference(images, noise) - own(images, noise).loss))


def stepper(model: nn.Module, images: Tensor, mode: str) -> Callable[[], None]:
    device = images.device.type
    model.train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05, fused=True
    )
    forward = torch.compile(model, mode=None if mode == "default" else mode)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            result = forward(images)
        (result if isinstance(result, Tensor) else result.loss).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    options = arguments(__doc__, 512, 20, ROOT / "docs" / "results" / "train-mae-gpu.json")
    sizes = SMALL if options.small else BASE
    batch, steps = (16, 2) if options.small else (options.batch, options.steps)
    apart = loss_difference(sizes, options.device)
    print(f"losses differ by {apart:.2g}")
    assert apart < 1e-4, "the losses differ"
    makers: dict[str, Callable[[], nn.Module]] = {
        "published": lambda: Published(sizes, fused=False),
        "published, sdpa": lambda: Published(sizes, fused=True),
        "ours": lambda: ours(sizes),
        "ours, narrow": lambda: ours(sizes, narrow=True),
        "ours, paper's": lambda: ours(sizes, long_skips=True),
    }
    images = torch.randint(256, (batch, 3, sizes["size"], sizes["size"]), dtype=torch.uint8, device=options.device)

    def prepared(make: Callable[[], nn.Module]) -> Step:
        return stepper(make().to(options.device), images, options.mode)

    chosen = {name: partial(prepared, make) for name, make in makers.items() if options.only in name}
    with attention(options.attention):
        results = turns(chosen, images, steps, options.rounds)
    settings = {"batch": batch, "steps": steps, **sizes}
    write(__file__, options, settings, **{"losses apart": apart, "results": results})


if __name__ == "__main__":
    main()
