"""The notebooks of the docs run from top to bottom, and are stored with their outputs, which are small."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_outputs_are_stored_and_small(path: Path) -> None:
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run it again from the top"
    assert any(cell["outputs"] for cell in cells)
    kinds = {output.get("name", output["output_type"]) for cell in cells for output in cell["outputs"]}
    assert kinds <= {"stdout", "display_data", "execute_result"}
    assert path.stat().st_size < 100_000


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*non-interactive, and thus cannot be shown")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": path.stem}
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in code_cells(path):
            exec(compile("".join(cell["source"]), str(path), "exec"), names)
