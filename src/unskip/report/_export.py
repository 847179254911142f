"""The tables and figures of a page as files: CSV, Markdown and LaTeX; SVG and PDF."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unskip.report._dots import summaries
from unskip.report._page import every_chart, tables
from unskip.report._read import Group
from unskip.report._tables import FORMATS
from unskip.report._text import slug
from unskip.report.figures import _style
from unskip.report.figures._draw import draw, draw_dots, draw_tiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def export(groups: Sequence[Group], folder: Path) -> list[Path]:
    """Writes every table and figure of the groups' page into a folder, and returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for _, _, parts in tables(groups):
        for part in parts:
            if part.get("header"):
                for form, write in FORMATS.items():
                    files.append(folder / f"{slug(part['label'])}.{form}")
                    files[-1].write_text(write(part["header"], part["rows"]), encoding="utf-8")
    for name, figure in _figures(groups):
        for form, metadata in (("svg", {"Date": None, "Creator": None}), ("pdf", {"CreationDate": None})):
            files.append(folder / f"{slug(name)}.{form}")
            with _style.settings(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Glyph .* missing from")
                figure.savefig(files[-1], format=form, metadata=metadata)
    return files


def _figures(groups: Sequence[Group]) -> Iterator[tuple[str, Figure]]:
    yield from ((dots.name, draw_dots(dots)) for dots in summaries(groups, _style.SHOWN))
    for _, _, charts in every_chart(groups):
        yield from ((chart.name, draw(chart)) for chart in charts if chart.lines)
    for group in groups:
        look = next((run.look for run in group.runs if run.look is not None and run.look.tiles), None)
        yield from ((f"{group.label}-{tiles.name}", draw_tiles(tiles)) for tiles in (look.tiles if look else ()))
