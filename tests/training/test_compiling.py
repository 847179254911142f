"""Compilation messages of a run, and the cache folder of compiled code."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.tasks import Feed, task
from torch import Tensor, nn

import unskip
from unskip.training import Task
from unskip.training._compiling import lasting_cache, timed_first_step


def messages(width: int = 2, rows: int = 4, shortcut: str = "keep", precision: str = "float32") -> list[str]:
    """What the first step of a run says."""
    model = nn.Sequential(Block(width), Block(width))
    rules = () if shortcut == "keep" else (unskip.rewire(model, shortcut, torch.ones(1, width)),)
    one, said = Task(model, Feed(), task().loss, None, wirings=rules), list[str]()
    inputs = iter([(torch.ones(rows, width), torch.ones(rows, width))] * 2)
    with timed_first_step(one, "cpu", precision, inputs, said.append) as parts:
        assert len(next(parts)[0]) == rows
    assert len(list(inputs)) == 1  # the other one is that of the second step
    return said


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


def test_second_run_reports_the_compile_time_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    first, again = messages(), messages()
    assert "Sequential" in first[0]
    assert "last time" not in first[0]
    assert "last time it took 0 s" in again[0]


def test_runs_of_other_code_do_not_report_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    messages()
    changes: list[dict[str, Any]] = [{"width": 3}, {"rows": 5}, {"shortcut": "decay:0.6"}, {"precision": "bf16"}]
    for change in changes:
        assert "last time" not in messages(**change)[0], change
        assert "last time" in messages(**change)[0], change


def test_an_unreadable_record_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for _ in range(2):
        messages()
        (file,) = (tmp_path / ".cache" / "unskip" / "compiled").iterdir()
        assert float(file.read_text()) >= 0
        file.write_text("damaged")


@pytest.mark.parametrize("before", [None, f"{tempfile.gettempdir()}/torchinductor_somebody", "/elsewhere"])
def test_a_cache_folder_of_the_user_is_kept(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if before is not None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
    with lasting_cache():
        inside = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert ("unskip" in inside) != (before == "/elsewhere")
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before
