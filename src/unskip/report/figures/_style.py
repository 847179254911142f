"""The style of all figures: the colours, dashes and markers of groups, and the settings of matplotlib.

The colours are those of Okabe and Ito (2008, "Color Universal Design"), without yellow and black, which lack contrast
on a light or a dark page. Groups also differ in dash and marker, not only in colour. In a page every colour is a CSS
variable, whose value depends on the light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from unskip._extras import need

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, GRID, REST = "#1b1f24", "#d0d7de", "#8c959f"  # text and axes; grid; groups after the first SHOWN
SHOWN = 10  # groups with a distinct style
_DASHES = ("-", (0, (5, 2)))
_MARKERS = "osD^vPX*ph"

SIZE = (4.4, 3.1)  # inches, small enough that text stays readable on a phone


class Style(NamedTuple):
    """How a group is drawn."""

    colour: str
    dash: str | tuple[int, tuple[int, ...]]
    marker: str


def style_of(group: int) -> Style:
    """The style of the group with this index."""
    if group >= SHOWN:
        return Style(REST, "-", "")
    return Style(COLOURS[group % len(COLOURS)], _DASHES[group // len(COLOURS)], _MARKERS[group])


@contextmanager
def settings() -> Iterator[None]:
    """The settings of matplotlib while a figure is drawn or saved."""
    with need("matplotlib").rc_context(
        {
            "axes.edgecolor": INK,
            "axes.facecolor": "none",
            "axes.grid": True,
            "axes.labelcolor": INK,
            "axes.labelsize": 9.5,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlecolor": INK,
            "axes.titlesize": 10.5,
            "axes.formatter.useoffset": False,  # avoids labels such as "1e-5+9.999e-1"
            "axes.unicode_minus": False,
            "figure.facecolor": "none",
            "figure.dpi": 120,
            "font.family": "DejaVu Sans",
            "font.size": 9.5,
            "grid.color": GRID,
            "grid.linewidth": 0.7,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "legend.labelcolor": INK,
            "lines.linewidth": 1.8,
            "lines.markersize": 5,
            "savefig.facecolor": "none",
            "svg.fonttype": "none",
            "svg.hashsalt": "unskip",
            "text.color": INK,
            "xtick.color": INK,
            "xtick.labelsize": 9,
            "ytick.color": INK,
            "ytick.labelsize": 9,
        }
    ):
        yield


def plain(text: str, limit: int = 40) -> str:
    """Escaped text: for matplotlib a dollar starts a formula and a leading underscore hides a label."""
    short = text if len(text) <= limit else text[: limit - 1] + "…"
    escaped = short.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped
