"""A small task for the step loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unskip.training import RunFolder, Schedule, Task


class Feed:
    """Regression batches as a function of (seed, step)."""

    steps_per_epoch = 7

    def __init__(self, poison: int | None = None, stop_at: int | None = None) -> None:
        self.poison, self.stop_at = poison, stop_at

    def iterate(self, start_step: int, stop_step: int, rank: int = 0, world: int = 1, parts: int = 1) -> Iterator[Any]:
        for step in range(start_step, stop_step):
            if step == self.stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            generator = torch.Generator().manual_seed(1000 + step)
            x = torch.randn(8, 6, generator=generator)
            y = torch.stack([x.sum(1), x.prod(1)], 1)
            if step == self.poison:
                y = y * torch.nan
            yield from zip(x[rank::world].chunk(parts), y[rank::world].chunk(parts), strict=True)


def task(optimizer: str = "adamw", **feed: Any) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 2))
    if optimizer == "adamw":
        chosen: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        from unskip.optim import build

        chosen = build(model, optimizer, lr=1e-2)

    def loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        x, y = batch
        value = (network(x) - y).square().mean()
        return value, {"twice": 2 * value}

    def evaluation(network: nn.Module) -> dict[str, float]:
        assert not network.training
        return {"bias": float(network[-1].bias[0])}

    def save(network: nn.Module, folder: Any) -> None:
        from safetensors.torch import save_model

        save_model(network, str(Path(folder) / "model.safetensors"))

    return Task(model, Feed(**feed), loss, chosen, evaluations={"bias": evaluation}, save=save)


def schedule(**changes: Any) -> Schedule:
    return Schedule(
        **{"steps": 20, "warmup": 3, "log_every": 4, "checkpoint_every": 6, "evaluate_every": 10, **changes}
    )


def new(path: Path) -> RunFolder:
    return RunFolder.create(path, {"recipe": "test"}, "cpu")


def weights(one: Task) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in one.model.parameters()]
