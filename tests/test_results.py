"""Numbers in README and docs match the records in docs/results, from which `make results` writes the tables."""

import json
import statistics
import sys
from pathlib import Path

import pytest

import unskip

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import _pages  # noqa: E402
from _sentences import sentences  # noqa: E402
from _typed import typed  # noqa: E402


@pytest.mark.parametrize("page", _pages.PAGES, ids=lambda page: page.name)
def test_tables_match_the_records(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert _pages.filled(text) == text, "run make results"


def test_every_table_is_on_a_page() -> None:
    assert _pages.unused() == set()


def test_sentences_match_the_records() -> None:
    pages = {page.stem: " ".join(page.read_text(encoding="utf-8").split()) for page in _pages.PAGES}
    assert [(page, part) for page, part in sentences() if part not in pages[page]] == []


@pytest.mark.parametrize("page", _pages.PAGES, ids=lambda page: page.name)
def test_no_measured_number_is_handwritten(page: Path) -> None:
    checked = [part for name, part in sentences() if name == page.stem]
    assert typed(page.read_text(encoding="utf-8"), checked) == []


def test_handwritten_numbers_are_found() -> None:
    text = (
        "Weight decay 0.3 and `x = 0.5` are settings, the paper has 80.8. It is 1.5 below the control, a 95% interval."
    )
    assert typed(text, ["1.5 below the control"]) == []
    (found,) = typed("The loop costs 3% of it.", [])
    assert "costs 3%" in found
    (found,) = typed(text.replace("1.5 below", "1.6 below"), ["1.5 below the control"])
    assert "is 1.6 below" in found


def test_changed_numbers_are_found() -> None:
    text = (ROOT / "docs" / "skipless-parts.md").read_text(encoding="utf-8")
    changed = text.replace("| residual | 74.1", "| residual | 75.1")
    assert changed != text
    assert _pages.filled(changed) == text


def test_expected_results_of_presets_match_the_record() -> None:
    names = {"supervised": "test_accuracy", "mae": "knn20", "simclr": "cls_knn20", "dino": "cls_knn20"}
    names |= {"sit": "test_loss", "uvit": "test_loss", "lm": "test_bits_per_byte"}
    record = json.loads((ROOT / "docs" / "results" / "presets-cpu.json").read_text(encoding="utf-8"))
    for run, rows in record["results"].items():
        recipe, preset = run.split()
        scale, digits = (1, 3 if recipe == "sit" else 2) if recipe in ("sit", "uvit", "lm") else (100, 1)
        values = [scale * row[names[recipe]] for row in rows]
        text = f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"
        assert text in unskip.recipes.RECIPES[recipe].presets[preset].expected
