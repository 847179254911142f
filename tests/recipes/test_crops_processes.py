"""The recipes dino and simclr on two processes, with whole and with sharded weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.commands import on_ranks
from tests.recipes.ranks import main, sharded

from unskip.training import RunFolder

pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")  # runs of a few steps look unhealthy


def test_two_processes_are_one(tmp_path: Path) -> None:
    """Losses, centre, Sinkhorn's balance and weights after some steps: those of one process on the whole batch."""
    on_ranks(2, tmp_path, lambda: main(tmp_path))
    told = json.loads((tmp_path / "result.json").read_text())
    assert told.pop("batch norm")["off"] < 1e-12
    assert set(told) == {"centre", "sinkhorn", "contrast"}
    for name, row in told.items():
        assert row["loss"] < 1e-6, name
        assert row["moved"] > 1e-3, name
        assert row["weights"] < 1e-6 * max(1.0, row["moved"]), name
        assert row.get("centre", 0.0) < 1e-6, name


@pytest.mark.full
def test_a_sharded_run_is_the_run(tmp_path: Path) -> None:
    """Weights spread over two processes: the same losses, weights and neighbours, a frozen last layer included."""
    on_ranks(2, tmp_path, lambda: sharded(tmp_path / "two"))
    sharded(tmp_path / "one")
    one, two = (RunFolder(tmp_path / name / "run") for name in ("one", "two"))
    weights, spread = (load_file(each.path / "checkpoints" / "step-4" / "model.safetensors") for each in (one, two))
    assert weights.keys() == spread.keys()
    assert max(float((spread[name].float() - value.float()).abs().max()) for name, value in weights.items()) < 1e-5
    losses, again = ([row["loss"] for row in each.read("metrics.jsonl")] for each in (one, two))
    assert again == pytest.approx(losses, abs=1e-5)
    assert one.read("evals.jsonl")[0]["knn20"] == two.read("evals.jsonl")[0]["knn20"]
