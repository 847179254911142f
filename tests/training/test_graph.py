"""Replayed CUDA graphs match eager steps with annealing, dropout and running means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unskip
from unskip import Anneal, Cut, Keep
from unskip.data import Augment, Feed, ImageSet
from unskip.training import RunFolder, Schedule, Task, run_task
from unskip.training._graph import why_not

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Normed(nn.Module):
    """A ViT with dropout after a batch norm, which has running means."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.vit = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48, num_classes=4, proj_drop_rate=0.1
        )

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.vit(self.norm(images))
        return out


def run(folder: Path, graph: bool, device: str, steps: int = 8) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8, generator=random)
    images = ImageSet("made", "train", tuple("abcd"), torch.randint(0, 4, (64,), generator=random), pixels)
    model = Normed().to(device)
    wiring = unskip.rewire(model, Anneal(Keep(), Cut(), steps=5), torch.zeros(2, 3, 32, 32, device=device))

    def loss(network: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        logits = network(batch[0])
        return F.cross_entropy(logits, batch[1]), {"mean": logits.mean()}

    feed = Feed(images, 16, 32, seed=0, augment=Augment(), device=device)
    task = Task(model, feed, loss, torch.optim.SGD(model.parameters(), lr=0.01), wirings=(wiring,))
    schedule = Schedule(steps, clip=1.0, log_every=1, checkpoint_every=4, graph=graph)
    runs = RunFolder.create(folder, {}, device)
    run_task(task, schedule, runs, quiet=True)
    return [row["loss"] for row in runs.read("metrics.jsonl")], model.state_dict()


@needs_cuda
def test_graph_replay_matches_eager_steps(tmp_path: Path) -> None:
    losses, weights = run(tmp_path / "eager", False, "cuda")
    replayed, same = run(tmp_path / "graph", True, "cuda")
    assert replayed == pytest.approx(losses, abs=1e-4)
    assert losses[0] != pytest.approx(losses[1], abs=1e-4)  # otherwise a graph that changes nothing would pass
    for name, value in weights.items():
        torch.testing.assert_close(same[name], value, atol=1e-4, rtol=1e-3, msg=name)


def test_graph_has_no_effect_on_a_cpu(tmp_path: Path) -> None:
    losses, weights = run(tmp_path / "plain", False, "cpu")
    asked, same = run(tmp_path / "graph", True, "cpu")
    assert asked == losses
    assert all(torch.equal(same[name], value) for name, value in weights.items())


@pytest.mark.parametrize(
    ("kind", "world", "accumulate", "reason"),
    [
        ("cuda", 1, 1, None),
        ("cpu", 1, 1, "this run is on cpu"),
        ("cuda", 2, 1, "there are 2"),
        ("cuda", 1, 4, "accumulated over 4"),
    ],
)
def test_reasons_against_a_graph(kind: str, world: int, accumulate: int, reason: str | None) -> None:
    result = why_not(kind, world, accumulate)
    assert result is None if reason is None else result is not None and reason in result
