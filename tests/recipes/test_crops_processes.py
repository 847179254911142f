"""The recipes dino and simclr on two processes, with whole and with sharded weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from unskip.training import RunFolder

pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")  # runs of a few steps look unhealthy


def by_two(folder: Path, *words: str) -> None:
    """`tests.recipes.ranks` on two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.recipes.ranks", str(folder), *words],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_two_processes_are_one(tmp_path: Path) -> None:
    """Losses, centre, Sinkhorn's balance and weights after some steps: those of one process on the whole batch."""
    by_two(tmp_path)
    told = json.loads((tmp_path / "result.json").read_text())
    assert set(told) == {"centre", "sinkhorn", "contrast"}
    for name, row in told.items():
        assert row["loss"] < 1e-6, name
        assert row["moved"] > 1e-3, name
        assert row["weights"] < 1e-6 * max(1.0, row["moved"]), name
        assert row.get("centre", 0.0) < 1e-6, name


@pytest.mark.full
def test_a_sharded_run_is_the_run(tmp_path: Path) -> None:
    """Weights spread over two processes: the same losses, weights and neighbours, a frozen last layer included."""
    from tests.recipes.ranks import sharded

    (tmp_path / "two").mkdir()
    by_two(tmp_path / "two", "shard")
    sharded(tmp_path / "one")
    one, two = (RunFolder(tmp_path / name / "run") for name in ("one", "two"))
    weights, spread = (load_file(each.path / "checkpoints" / "step-4" / "model.safetensors") for each in (one, two))
    assert weights.keys() == spread.keys()
    assert max(float((spread[name].float() - value.float()).abs().max()) for name, value in weights.items()) < 1e-5
    losses, again = ([row["loss"] for row in each.read("metrics.jsonl")] for each in (one, two))
    assert again == pytest.approx(losses, abs=1e-5)
    assert one.read("evals.jsonl")[0]["knn20"] == two.read("evals.jsonl")[0]["knn20"]
