"""Compares the speed of a SiT-B/2 training step on latents of 4 x 32 x 32 with the published implementation.

    python benchmarks/train_sit.py                          # on a GPU: batch 128
    python benchmarks/train_sit.py --small --device cpu     # smoke test at a size for a CPU

    published        the published model and loss, with torch's fused attention
    ours             `unskip.models.SiT` and `Flow`: the same model and loss
    ours, narrow     with the residual stream in bf16
    ours, paper's    with long skips and decayed shortcuts, which need more operations

All are compiled, with bf16 autocast, fused AdamW and no EMA. They alternate, and ratios are of adjacent measurements.
First, the losses for the same weights, latents, noise and times are compared. At the end, sampling is timed: images per
second with 50 steps of Heun's method, 100 network evaluations each. The JSON is written to
docs/results/train-sit-gpu.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _turns import Step, arguments, attention, pace, turns, write
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip.models import Flow, Sampling, SiT, draw, load_published_sit
from unskip.models._vit import Grid, positions

ROOT = Path(__file__).resolve().parent.parent
BASE = {"size": 32, "patch": 2, "channels": 4, "width": 768, "depth": 12, "heads": 12, "classes": 1000}
SMALL = {"size": 8, "patch": 2, "channels": 4, "width": 32, "depth": 3, "heads": 2, "classes": 10}
BAR = 2450  # target for the published implementation on an H200, in images per second


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, dim))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.attn = Attention(dim, heads)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, 4 * dim), "fc2": nn.Linear(4 * dim, dim)})
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        b1, s1, g1, b2, s2, g2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + g1.unsqueeze(1) * self.attn(modulate(self.norm1(x), b1, s1))
        hidden = F.gelu(self.mlp["fc1"](modulate(self.norm2(x), b2, s2)), approximate="tanh")
        return x + g2.unsqueeze(1) * self.mlp["fc2"](hidden)


class Published(nn.Module):
    """The published implementation, with its parameter names and the unused half of its output."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        dim, patch, channels = sizes["width"], sizes["patch"], sizes["channels"]
        side = sizes["size"] // patch
        self.patch, self.out = patch, 2 * channels
        self.x_embedder = nn.ModuleDict({"proj": nn.Conv2d(channels, dim, patch, patch)})
        self.t_embedder = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))})
        self.y_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(sizes["classes"] + 1, dim)})
        table = positions(Grid(side, side, patch, channels, 0), dim)[None]
        self.pos_embed = nn.Parameter(table, requires_grad=False)
        self.blocks = nn.ModuleList(Block(dim, sizes["heads"]) for _ in range(sizes["depth"]))
        self.norm_final = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        final = {"linear": nn.Linear(dim, patch * patch * self.out)}
        self.final_layer = nn.ModuleDict(
            {**final, "adaLN_modulation": nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))}
        )

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32, device=x.device) / 128)
        angles = t[:, None].float() * rates[None]
        c = self.t_embedder["mlp"](torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1))
        c = c + self.y_embedder["embedding_table"](y)
        x = self.x_embedder["proj"](x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.final_layer["adaLN_modulation"](c).chunk(2, dim=1)
        x = self.final_layer["linear"](modulate(self.norm_final(x), shift, scale))
        side = math.isqrt(x.shape[1])
        x = x.reshape(len(x), side, side, self.patch, self.patch, self.out)
        x = torch.einsum("nhwpqc->nchpwq", x).reshape(len(x), self.out, side * self.patch, side * self.patch)
        return x.chunk(2, dim=1)[0]


def published_loss(model: Any, latents: Tensor, labels: Tensor, classes: int, t: Tensor, noise: Tensor) -> Tensor:
    """The published loss: mean squared error of the velocity of a straight path from noise to data."""
    wide = t[:, None, None, None]
    return (model(wide * latents + (1 - wide) * noise, t, labels) - (latents - noise)).square().mean((1, 2, 3)).mean()


def ours(sizes: dict[str, int], long_skips: bool = False, narrow: bool = False) -> SiT:
    model = SiT(**sizes, long_skips=long_skips, narrow=narrow)
    if long_skips:
        unskip.rewire(model, "decay:0.8")
    return model


def data(sizes: dict[str, int], batch: int, device: str) -> tuple[Tensor, Tensor]:
    shape = (batch, sizes["channels"], sizes["size"], sizes["size"])
    return torch.randn(shape, device=device), torch.randint(sizes["classes"], (batch,), device=device)


def loss_difference(sizes: dict[str, int], device: str) -> float:
    """Absolute difference of the two losses for the same weights, latents, noise and times, in float32."""
    torch.manual_seed(0)
    reference, own = Published(sizes).to(device), ours(sizes).to(device)
    load_published_sit(own, reference.state_dict())
    latents, labels = data(sizes, 8, device)
    noise, t = torch.randn_like(latents), torch.rand(8, device=device)
    with torch.no_grad():
        one = published_loss(reference, latents, labels, sizes["classes"], t, noise)
        two = Flow(label_dropout=0.0).loss(own, latents, labels, sizes["classes"], time=t, noise=noise).mean()
    return abs(float(one - two))


def stepper(model: nn.Module, latents: Tensor, labels: Tensor, classes: int, mode: str) -> Callable[[], None]:
    device = latents.device.type
    model.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.0, fused=True)
    forward: Any = torch.compile(model, mode=None if mode == "default" else mode)
    flow = Flow()

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            if isinstance(model, Published):
                t, noise = torch.rand(len(latents), device=device), torch.randn_like(latents)
                dropped = torch.rand(len(labels), device=device) < 0.1
                inputs = torch.where(dropped, classes, labels)
                loss = published_loss(forward, latents, inputs, classes, t, noise)
            else:
                loss = flow.loss(forward, latents, labels, classes).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def sampling(sizes: dict[str, int], device: str, batch: int, steps: int, compiled: bool) -> float:
    """Images per second of sampling latents from noise, without guidance."""
    torch.manual_seed(0)
    model: Any = (
        ours(sizes).to(device).eval()
    )  # with requires_grad, since autocast caches bf16 copies of such weights only
    network = torch.compile(model) if compiled else model
    labels = torch.arange(batch, device=device) % sizes["classes"]
    shape = (sizes["channels"], sizes["size"], sizes["size"])

    def go(count: int) -> None:
        how = Sampling("heun", count)
        context = partial(torch.autocast, device, torch.bfloat16)
        list(draw(network, labels, shape, sizes["classes"], sampling=how, batch=batch, autocast=context))

    go(2)
    return pace(lambda: go(steps), 1, labels)


def main() -> None:
    options = arguments(__doc__, 128, 40, ROOT / "docs" / "results" / "train-sit-gpu.json")
    sizes = SMALL if options.small else BASE
    batch, steps = (8, 2) if options.small else (options.batch, options.steps)
    apart = loss_difference(sizes, options.device)
    print(f"losses differ by {apart:.2g}")
    assert apart < 1e-4, "the losses differ"
    makers: dict[str, Callable[[], nn.Module]] = {
        "published": lambda: Published(sizes),
        "ours": lambda: ours(sizes),
        "ours, narrow": lambda: ours(sizes, narrow=True),
        "ours, paper's": lambda: ours(sizes, long_skips=True),
    }
    latents, labels = data(sizes, batch, options.device)

    def prepared(make: Callable[[], nn.Module]) -> Step:
        return stepper(make().to(options.device), latents, labels, sizes["classes"], options.mode)

    chosen = {name: partial(prepared, make) for name, make in makers.items() if options.only in name}
    with attention(options.attention):
        results = turns(chosen, latents, steps, options.rounds)
        rates = {
            "compiled" if compiled else "eager": sampling(sizes, options.device, batch, 50, compiled)
            for compiled in (False, True)
        }
    if "published" in results and not options.small:
        reached = results["published"]["images a second"]
        print(f"published: {reached:.0f} img/s; a fair baseline needs {BAR} img/s on an H200")
    for name, value in rates.items():
        print(f"sampling, 50 steps of Heun's, {name}: {value:.1f} img/s")
    result = {"losses apart": apart, "results": results, "sampling, images a second at 50 steps of Heun's": rates}
    write(__file__, options, {"batch": batch, "steps": steps, **sizes}, **result)


if __name__ == "__main__":
    main()
