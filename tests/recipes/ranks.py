"""Trains DINO and SimCLR on each rank; test_crops_processes.py starts it and checks the files that it writes.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.recipes.ranks FOLDER [shard]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unskip.data import CropFeed, Crops, ImageSet
from unskip.models import DINO, SimCLR
from unskip.models._processes import BatchNorm

STEPS = 3


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    options = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2, "num_classes": 0}
    backbone = timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **options)
    if kind == "contrast":
        return SimCLR(backbone, hidden=20, out=6, norm=False).double()
    model = DINO(backbone, out=12, hidden=20, bottleneck=8, balance=kind).double()  # type: ignore[arg-type]
    for parameter in model.teacher.parameters():  # so that student and teacher differ
        parameter.add_(0.02 * torch.randn(parameter.shape, dtype=torch.float64))
    return model


def trained(kind: str, rank: int, world: int) -> tuple[nn.Module, list[float]]:
    model = made(kind)
    network: Any = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    pixels = torch.randint(0, 256, (16, 3, 16, 16), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    images = ImageSet("noise", "train", ("a",), torch.zeros(16, dtype=torch.int64), pixels)
    feed = CropFeed(images, 8, Crops(local_crops=2, size=16, local_size=8))
    losses = []
    for large, small, _ in feed.iterate(0, STEPS, rank, world):
        optimizer.zero_grad()
        views = [large.double()] if kind == "contrast" else [large.double(), small.double()]
        loss = network(*views).loss
        loss.backward()
        optimizer.step()
        if isinstance(model, DINO):
            model.update_teacher_(0.9)
        losses.append(float(loss.detach()))
    return model, losses


def _largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def main(folder: Path) -> None:
    # First the run of one process, before the process group exists, over which losses and centres would be reduced.
    alone = {kind: trained(kind, 0, 1) for kind in ("centre", "sinkhorn", "contrast")}
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    record: dict[str, dict[str, float]] = {}
    for kind, (expected, losses) in alone.items():
        model, mine = trained(kind, rank, world)
        mean = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(mean)
        off, moved = (_largest_difference(model, other) for other in (expected, made(kind)))
        record[kind] = {
            "loss": float((mean / world - torch.tensor(losses, dtype=torch.float64)).abs().max()),
            "weights": off,
            "moved": moved,
        }
        if kind == "centre":
            record["batch norm"] = {"off": _batch_norm(rank, world)}
            record[kind]["centre"] = float((model.centre - expected.centre).abs().max())  # type: ignore[operator]
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(record))
    dist.destroy_process_group()


def _batch_norm(rank: int, world: int) -> float:
    """The largest difference between batch norm over all processes and torch's batch norm over the whole batch."""
    random = torch.Generator().manual_seed(2)
    x = torch.randn(8, 5, generator=random, dtype=torch.float64) + 3
    target = torch.randn(8, 5, generator=random, dtype=torch.float64)
    mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
    result = []
    for norm, part in ((nn.BatchNorm1d(5).double(), slice(0, 8)), (BatchNorm(5).double(), mine)):
        values = x[part].clone().requires_grad_()
        out = norm(values)
        (out * target[part]).sin().sum().backward()
        assert values.grad is not None
        own = slice(mine.start - part.start, mine.stop - part.start)
        result.append([out.detach()[own], values.grad[own], norm.running_mean, norm.running_var])
    return max(float((a - b).abs().max()) for a, b in zip(*result, strict=True))
