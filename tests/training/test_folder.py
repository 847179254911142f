"""Run folders."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from tests.training.tasks import new

from unskip.errors import BadInput
from unskip.training import RunFolder
from unskip.training._state import read_state, write_state


def test_a_run_folder_is_not_overwritten(tmp_path: Path) -> None:
    new(tmp_path / "run")
    with pytest.raises(BadInput, match="unskip resume"):
        new(tmp_path / "run")
    with pytest.raises(BadInput, match="no run there"):
        RunFolder.open(tmp_path / "other")


def test_config_and_versions_are_written(tmp_path: Path) -> None:
    new(tmp_path / "run")
    data = json.loads((tmp_path / "run" / "config.json").read_text())
    assert data["config"] == {"recipe": "test"}
    assert data["versions"]["torch"] == torch.__version__


def test_non_finite_state_is_valid_json(tmp_path: Path) -> None:
    write_state(tmp_path, "some", {"limits": (math.inf, -math.inf, 1.5), "mean": math.nan, "step": torch.ones(2)})
    json.loads((tmp_path / "some.json").read_text(), parse_constant=pytest.fail)
    state = read_state(tmp_path, "some")
    assert state["limits"] == (math.inf, -math.inf, 1.5)
    assert math.isnan(state["mean"])


def test_a_truncated_line_is_skipped(tmp_path: Path) -> None:
    folder = new(tmp_path / "run")
    folder.append("metrics.jsonl", {"step": 1, "loss": 0.5})
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert folder.read("metrics.jsonl") == [{"step": 1, "loss": 0.5}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder.rewind(1)
    assert (folder.path / "metrics.jsonl").read_text().count("\n") == 1
