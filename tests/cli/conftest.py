"""What the tests of the command line share."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.models import SOURCE

from unskip import cli


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file of models in the working directory."""
    (tmp_path / "models_of_cli.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield "models_of_cli.py"
    for name in [name for name in sys.modules if name.startswith("models_of_cli")]:
        del sys.modules[name]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """A command: its exit code, stdout and stderr."""

    def call(*args: str) -> tuple[int, str, str]:
        code = cli.main(list(args))
        out, err = capsys.readouterr()
        return code, out, err

    return call
