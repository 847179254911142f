"""Trains rewired models on each rank; test_distributed.py starts it and checks the files that it writes.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.tools.ranks FOLDER
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.tools.models import images, labels, vit
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import unskip
from unskip import Anneal, Cut, Decay, Keep, Learn, Wiring
from unskip.errors import UnskipError, WrappedError

RULES: dict[str, Any] = {
    "keep": Keep(),
    "decay": Decay(0.3),
    "cut": Cut(),
    "anneal": Anneal(Keep(), Cut(), steps=4),
    "learn": Learn(0.5),
    "learn channel": Learn(0.5, per="channel"),
}
STEPS = 2
BATCH = 4


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, wiring: Wiring, x: Tensor, y: Tensor, optimizer: Any = None, backward: Any = None) -> None:
    """STEPS steps of gradient descent, with a wiring.step in each."""
    model.train()
    optimizer = optimizer or optimizer_of(model)
    for step in range(STEPS):
        wiring.step(step)
        loss = cross_entropy(model(x), y)
        backward(loss) if backward else loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def single(rule: Any) -> dict[str, Tensor]:
    """The weights after one process has trained on the whole batch."""
    model = vit()
    train(model, unskip.rewire(model, rule), images(BATCH), labels(BATCH))
    return model.state_dict()


def ddp(rule: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    model = vit()
    wiring = unskip.rewire(model, rule)
    train(DistributedDataParallel(model), wiring, x, y)
    return model.state_dict()


def accelerated(rule: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = vit()
    wiring = unskip.rewire(model, rule)
    prepared, optimizer = accelerator.prepare(model, optimizer_of(model))
    assert isinstance(prepared, DistributedDataParallel)
    assert accelerator.unwrap_model(prepared) is model
    train(prepared, wiring, x, y, optimizer, accelerator.backward)
    return model.state_dict()


def shard(model: nn.Module, mesh: Any, blocks: bool = True) -> None:
    for block in model.blocks if blocks else ():  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def sharded(rule: Any, mesh: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Outputs before and after training, and the trained weights."""
    model = vit()
    wiring = unskip.rewire(model, rule)
    shard(model, mesh)
    # The optimizer is built before any forward, after which the root has gathered parameters instead of sharded ones.
    optimizer = optimizer_of(model)
    with torch.no_grad():
        first = model(images(BATCH))
    train(model, wiring, x, y, optimizer)
    return {"output": first, "weights": {name: p.full_tensor() for name, p in model.state_dict().items()}}


def handle_of_a_sharded_model(mesh: Any, blocks: bool) -> dict[str, Any]:
    """Results or errors of the wiring's methods on a sharded model, sharded block by block or only as a whole."""
    model, x = vit(), images(BATCH)
    wiring = unskip.rewire(model, Decay(0.3))
    shard(model, mesh, blocks)
    told: dict[str, Any] = {"alphas": wiring.alphas}
    for name, action in (("set", lambda: wiring.set(Cut())), ("undo", wiring.undo)):
        try:
            action()
            told[name] = "done"
        except UnskipError as error:
            told[name] = str(error)
        told[f"{name}: output"] = model(x).detach()
    return told


def rewire_after_sharding(mesh: Any) -> str:
    model = vit()
    shard(model, mesh)
    try:
        unskip.rewire(model, Cut())
    except WrappedError as error:
        return str(error)
    return "not refused"


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    x, y = images(BATCH).chunk(world)[rank], labels(BATCH).chunk(world)[rank]
    found = {
        "ddp": {name: ddp(rule, x, y) for name, rule in RULES.items()},
        "accelerate": {name: accelerated(RULES[name], x, y) for name in ("decay", "cut")},
        "fsdp": {name: sharded(RULES[name], mesh, x, y) for name in ("keep", "decay", "cut", "learn channel")},
        "handle_of_a_sharded_model": {
            "blocks": handle_of_a_sharded_model(mesh, True),
            "whole": handle_of_a_sharded_model(mesh, False),
        },
        "rewire_after_sharding": rewire_after_sharding(mesh),
    }
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()
