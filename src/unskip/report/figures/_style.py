"""One visual language for all figures: the colours, dashes and markers of groups, and the settings of matplotlib.

The colours are those of Okabe and Ito (2008, "Color Universal Design"), without the yellow and the black, which do not
stand out on both a light and a dark page. A group also has a dash and a marker of its own, so colour is never all there
is. In a page every colour becomes a CSS variable, whose value depends on the reader's scheme.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from unskip._extras import need

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, GRID, REST = "#1b1f24", "#d0d7de", "#8c959f"  # text and axes; the grid; groups beyond those with a colour
SHOWN = 10  # groups with a style of their own; more cannot be told apart
_DASHES = ("-", (0, (5, 2)))
_MARKERS = "osD^vPX*ph"

SIZE = (4.4, 3.1)  # inches: small enough that its text is readable where a phone shrinks it


class Style(NamedTuple):
    """How a group is drawn."""

    colour: str
    dash: str | tuple[int, tuple[int, ...]]
    marker: str


def style_of(group: int) -> Style:
    """The style of the group at this place."""
    if group >= SHOWN:
        return Style(REST, "-", "")
    return Style(COLOURS[group % len(COLOURS)], _DASHES[group // len(COLOURS)], _MARKERS[group])


@contextmanager
def settings() -> Iterator[None]:
    """The settings of matplotlib while a figure is made or written."""
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
            "axes.formatter.useoffset": False,  # "1e-5+9.999e-1" is no label to read
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
    """Text that matplotlib takes as it is: a dollar begins no formula, a leading underscore hides nothing."""
    short = text if len(text) <= limit else text[: limit - 1] + "…"
    escaped = short.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped
