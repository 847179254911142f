"""Compilation messages of a run, and the cache folder of compiled code."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from torch import nn

from unskip.training._compiling import lasting_cache, timed_first_step


def test_second_run_reports_the_compile_time_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    messages: list[list[str]] = []
    for width in (2, 2, 3):
        messages.append([])
        with timed_first_step(nn.Linear(width, 2), "cpu", messages[-1].append):
            pass
    first, again, other = messages
    assert "Linear" in first[0]
    assert "last time" not in first[0]
    assert "last time it took 0 s" in again[0]
    assert "last time" not in other[0]


def test_an_unreadable_record_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for _ in range(2):
        with timed_first_step(nn.Linear(2, 2), "cpu", lambda text: None):
            pass
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
