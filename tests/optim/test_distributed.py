"""Two ranks: the same weights on both under DistributedDataParallel, and a refusal of sharded parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.commands import on_ranks
from tests.optim.ranks import main, model

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(2, folder, lambda: main(folder))
    return folder


@pytest.mark.parametrize("name", ["soap", "muon"])
def test_every_rank_has_the_same_weights(left: Path, name: str) -> None:
    one, other = (torch.load(left / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not torch.equal(one["0.weight"], model().state_dict()["0.weight"])


@pytest.mark.parametrize("name", ["soap", "muon"])
def test_sharded_parameters_are_refused_in_a_sentence(left: Path, name: str) -> None:
    said = (left / f"{name}-0.txt").read_text()
    assert "no whole matrix on any rank" in said
    assert "DistributedDataParallel" in said
