"""What every rank does under DistributedDataParallel and FSDP2; test_distributed.py starts it and checks the result.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.optim.ranks FOLDER
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from unskip.errors import BadInput
from unskip.optim import build

STEPS = 14


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> None:
    for step in range(STEPS):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x[rank * 8 // ranks : (rank + 1) * 8 // ranks]).square().mean().backward()
        optimizer.step()


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name in ("soap", "muon"):
        net = model()
        wrapped = DistributedDataParallel(net)
        train(wrapped, build(wrapped, name, lr=0.01), rank, ranks)
        torch.save(net.state_dict(), folder / f"{name}-{rank}.pt")
    for name in ("soap", "muon"):
        sharded = model()
        fully_shard(sharded)
        try:
            build(sharded, name, lr=0.01)
            said = "nothing"
        except BadInput as error:
            said = str(error)
        (folder / f"{name}-{rank}.txt").write_text(said)
    dist.destroy_process_group()
