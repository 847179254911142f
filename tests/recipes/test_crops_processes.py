"""The recipes dino and simclr on two processes, with replicated and with sharded weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commands import on_ranks
from tests.recipes.ranks import main

pytestmark = pytest.mark.filterwarnings("ignore::unskip.errors.UnskipWarning")  # runs of a few steps look unhealthy


def test_two_processes_match_one(tmp_path: Path) -> None:
    """Losses, centre, Sinkhorn normalisation and weights after some steps match one process with the whole batch."""
    on_ranks(2, tmp_path, lambda: main(tmp_path))
    record = json.loads((tmp_path / "result.json").read_text())
    assert record.pop("batch norm")["off"] < 1e-12
    assert set(record) == {"centre", "sinkhorn", "contrast"}
    for name, row in record.items():
        assert row["loss"] < 1e-6, name
        assert row["moved"] > 1e-3, name
        assert row["weights"] < 1e-6 * max(1.0, row["moved"]), name
        assert row.get("centre", 0.0) < 1e-6, name
