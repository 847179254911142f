"""Several processes match one: with whole and sharded weights, for each optimizer, with an EMA.

In float64, so that only the order of sums differs. All matrices are square: if a gradient lacks full rank, the first
basis of SOAP is arbitrary. One of 4 processes has an empty shard of every matrix.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.commands import on_ranks
from tests.training.tasks import Feed, new, schedule
from torch import Tensor, nn

from unskip.errors import UnskipWarning
from unskip.optim import build
from unskip.training import RunFolder, Task, run_task

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")

OPTIMIZERS = ("adamw", "soap", "muon")
BOUND = {"adamw": 1e-10, "soap": 1e-5, "muon": 1e-3}  # Muon orthogonalises in bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def task(optimizer: str, **feed: Any) -> Task:
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(), Block(), Block())
    model = nn.Sequential(OrderedDict(stem=nn.Linear(6, 6), blocks=blocks, head=nn.Linear(6, 6))).double()
    model.head.weight = model.stem.weight  # tied, saved under the alphabetically first name

    def loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        x = batch[0].double()
        return (network(x) - torch.sin(3 * x)).square().mean(), {}

    def save(network: nn.Module, folder: Path) -> None:
        from safetensors.torch import save_model

        save_model(network, str(folder / "model.safetensors"))

    return Task(model, Feed(**feed), loss, build(model, optimizer, lr=1e-2), save=save)


def train(folder: Path, fsdp: bool = False, **feed: Any) -> None:
    """A run of each optimizer, new or resumed."""
    for optimizer in OPTIMIZERS:
        first = os.environ.get("RANK", "0") == "0" and not (folder / optimizer).exists()
        run = new(folder / optimizer) if first else RunFolder(folder / optimizer)
        how = schedule(steps=10, checkpoint_every=99, ema=0.9, clip=1.0, fsdp=fsdp)
        run_task(task(optimizer, **feed), how, run, quiet=True)


def final(folder: Path, optimizer: str) -> dict[str, Tensor]:
    """The final weights and their EMA."""
    end = folder / optimizer / "checkpoints" / "step-10"
    return {
        f"{name}/{key}": value
        for name in ("model", "ema")
        for key, value in load_file(end / f"{name}.safetensors").items()
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    train(folder)
    return folder


def check(folder: Path, one: Path) -> None:
    for optimizer in OPTIMIZERS:
        wanted, found = final(one, optimizer), final(folder, optimizer)
        assert wanted.keys() == found.keys()
        off = max(float((found[key] - value).abs().max()) for key, value in wanted.items())
        assert off < BOUND[optimizer], optimizer


def test_two_processes_match_one(tmp_path: Path, one: Path) -> None:
    def both() -> None:
        train(tmp_path / "whole")
        train(tmp_path / "sharded", fsdp=True, stop_at=4)
        train(tmp_path / "sharded", fsdp=True)

    for name in ("whole", "sharded"):
        (tmp_path / name).mkdir()
    on_ranks(2, tmp_path, both)
    check(tmp_path / "whole", one)
    check(tmp_path / "sharded", one)


def test_broken_images_are_counted_over_all_processes(tmp_path: Path) -> None:
    """More processes do not allow more of them; a resumed run does not name them again."""

    def go(rank: int, run: RunFolder, steps: int) -> None:
        warnings.simplefilter("ignore", UnskipWarning)
        one = task("adamw")
        found: dict[int, str] = {rank: f"{rank}.png"}
        one.feed.broken = found  # type: ignore[attr-defined]
        run_task(one, schedule(steps=steps), run, quiet=True)
        assert sorted(found) == [0, 1]

    new(tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    on_ranks(2, tmp_path, lambda: go(int(os.environ["RANK"]), run, 10))
    on_ranks(2, tmp_path, lambda: go(int(os.environ["RANK"]), run, 20))
    named = [row["text"] for row in run.read("warnings.jsonl")]
    assert named == [f"{rank}.png; another image takes its place" for rank in range(2)]


@pytest.mark.full
def test_a_sharded_run_resumes_with_fewer_processes(tmp_path: Path, one: Path) -> None:
    on_ranks(4, tmp_path, lambda: train(tmp_path, fsdp=True, stop_at=2))
    assert {RunFolder(tmp_path / name).last_checkpoint()[0] for name in OPTIMIZERS} == {4}  # type: ignore[index]
    on_ranks(2, tmp_path, lambda: train(tmp_path, fsdp=True, stop_at=6))
    assert {RunFolder(tmp_path / name).last_checkpoint()[0] for name in OPTIMIZERS} == {8}  # type: ignore[index]
    train(tmp_path, fsdp=True)
    check(tmp_path, one)


@pytest.mark.parametrize("name", ["unskip", "pytorch_optimizer"])
def test_soap_amplifies_rounding_of_low_rank_gradients(name: str) -> None:
    """A float64 rounding error in every gradient of six steps, here and in another implementation. If a gradient has
    rank 8 of 32, Adam divides the rounding error in the other directions by its own size."""
    theirs: Any = pytest.importorskip("pytorch_optimizer") if name != "unskip" else None

    def trained(batch: int, rounded: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).double()
        soap: Any = build(model, "soap", lr=1e-2)
        if theirs is not None:
            soap = theirs.SOAP(model.parameters(), lr=1e-2)
        for _ in range(6):
            x = torch.randn(batch, 32, dtype=torch.float64)
            soap.zero_grad()
            (model(x) - torch.sin(3 * x)).square().mean().backward()
            for parameter in model.parameters():
                off = torch.randn_like(parameter) * torch.finfo(torch.float64).eps
                assert parameter.grad is not None
                parameter.grad.mul_(1 + off * rounded)
            soap.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    apart = {batch: float((trained(batch, True) - trained(batch, False)).abs().max()) for batch in (8, 256)}
    assert apart[8] > 1e-2
    assert apart[256] < 1e-11
