"""What the study of SiT shows of its JSON."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


def test_seeds_are_in_their_order_whichever_ended_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is drawn solid, and further ones dashed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    results = importlib.import_module("_sit_results")
    ended = ["uvit | plain | seed 0", "judge", "sit | plain | seed 1", "sit | decay | seed 0", "sit | plain | seed 0"]
    groups = results.groups({name: {"name": name} for name in ended})
    assert list(groups) == ["sit | decay", "sit | plain", "uvit | plain"]
    assert [row["name"] for row in groups["sit | plain"]] == ["sit | plain | seed 0", "sit | plain | seed 1"]
