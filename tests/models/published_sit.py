"""A handwritten SiT with the parameter names of the published checkpoints, and explicit attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.models._vit import Grid, positions


class Published(nn.Module):
    def __init__(self, size: int, patch: int, channels: int, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.heads, self.patch, self.out = heads, patch, 2 * channels  # with learn_sigma
        side = size // patch
        self.x_embedder = nn.ModuleDict({"proj": nn.Conv2d(channels, width, patch, patch)})
        time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.t_embedder = nn.ModuleDict({"mlp": time})
        self.y_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(classes + 1, width)})
        table = positions(Grid(side, side, patch, channels, 0), width)[None]
        self.pos_embed = nn.Parameter(table, requires_grad=False)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "attn": nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}),
                    "mlp": nn.ModuleDict({"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)}),
                    "adaLN_modulation": nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width)),
                }
            )
            for _ in range(depth)
        )
        final = {"linear": nn.Linear(width, patch * patch * self.out)}
        final["adaLN_modulation"] = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.final_layer = nn.ModuleDict(final)

    def forward(self, images: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(128) / 128)
        angles = time[:, None] * rates[None]
        c = self.t_embedder["mlp"](torch.cat([torch.cos(angles), torch.sin(angles)], -1))
        c = c + self.y_embedder["embedding_table"](labels)
        x = self.x_embedder["proj"](images).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            b1, s1, g1, b2, s2, g2 = block["adaLN_modulation"](c).chunk(6, 1)
            x = x + g1.unsqueeze(1) * self.attention(block["attn"], modulate(norm(x), b1, s1))
            hidden = F.gelu(block["mlp"]["fc1"](modulate(norm(x), b2, s2)), approximate="tanh")
            x = x + g2.unsqueeze(1) * block["mlp"]["fc2"](hidden)
        shift, scale = self.final_layer["adaLN_modulation"](c).chunk(2, 1)
        x = self.final_layer["linear"](modulate(norm(x), shift, scale))
        side = math.isqrt(x.shape[1])
        x = x.reshape(len(x), side, side, self.patch, self.patch, self.out)
        x = torch.einsum("nhwpqc->nchpwq", x).reshape(len(x), self.out, side * self.patch, side * self.patch)
        return x.chunk(2, 1)[0]

    def attention(self, part: nn.Module, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = part["qkv"](x).reshape(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / math.sqrt(dim // self.heads)).softmax(-1)
        return part["proj"]((weights @ v).transpose(1, 2).reshape(batch, tokens, dim))


def norm(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
