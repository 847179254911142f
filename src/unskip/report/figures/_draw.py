"""Matplotlib figures: points by group, lines over steps or depth, and grids of small images."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unskip._extras import need
from unskip.errors import BadInput
from unskip.report._charts import Chart, Line
from unskip.report._dots import Dots
from unskip.report.figures import _style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARK = " ✗"  # caption suffix that is drawn in the corner of its picture
_PAPER = {"facecolor": _style.GRID, "edgecolor": "none", "pad": 1.0}
_POINTS, _EM = 8.1, 0.62  # caption font size, readable on a phone; mean letter width in em
Pixels = NDArray[np.uint8]  # (height, width, 3)


@dataclass(frozen=True, eq=False)
class Tiles:
    """A grid of small images, `images[row][column]`, with optional captions."""

    name: str
    title: str
    images: tuple[tuple[Pixels, ...], ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    description: str  # alternative text
    captions: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    header: tuple[str, ...] = ()  # data of the figure, as a table
    table: tuple[tuple[object, ...], ...] = ()


def draw(chart: Chart) -> Figure:
    """Draws a chart. Raises BadInput if it has no lines."""
    ticker = need("matplotlib.ticker")
    if not chart.lines:
        raise BadInput(f"{chart.title}: nothing to draw, because {chart.missing}")
    shown = [line for line in chart.lines if line.group < _style.SHOWN]
    height = _style.SIZE[1] + 0.19 * ((len(shown) + 1) // 2)
    with _style.settings():
        figure: Figure = need("matplotlib.figure").Figure(figsize=(_style.SIZE[0], height), layout="constrained")
        axes: Any = figure.add_subplot()
        handles = [_line(axes, chart, line) for line in reversed(chart.lines)][::-1]  # draws the first on top
        axes.set_title(textwrap.fill(_style.plain(chart.title, 90), 52), loc="left")
        axes.set_xlabel(_style.plain(chart.x_label))
        axes.set_ylabel(textwrap.fill(_style.plain(chart.y_label, 60), 34))
        if chart.log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(ticker.LogLocator(numticks=7))  # avoids overlapping labels
        axes.xaxis.set_major_locator(ticker.MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))  # blocks, sites or steps
        if shown:
            texts = [_style.plain(line.label, 26) for line in shown]
            kept = [handle for handle, line in zip(handles, chart.lines, strict=True) if line.group < _style.SHOWN]
            figure.legend(kept, texts, loc="outside lower center", ncols=2 if len(shown) > 1 else 1)
    return figure


def _line(axes: Any, chart: Chart, line: Line) -> Any:
    style = _style.style_of(line.group)
    few = len(line.x) <= 24
    width = 1.8 if line.group < _style.SHOWN else 0.8
    (drawn,) = axes.plot(
        line.x,
        line.y,
        color=style.colour,
        linestyle=style.dash,
        linewidth=width,
        marker=style.marker if few else "",
    )
    if not few and style.marker:  # few markers, so that they do not hide the line
        drawn.set_marker(style.marker)
        drawn.set_markevery(max(1, len(line.x) // 6))
    std = np.array([0.0 if value is None else value for value in line.std])
    low, high = np.array(line.y) - std, np.array(line.y) + std
    if not std.any():  # one run: the interval over its test samples
        low, high = np.array([ends or (y, y) for ends, y in zip(line.interval, line.y, strict=True)]).T
    if (high > low).any():
        if chart.log:
            low = np.maximum(low, np.array(line.y) * 1e-2)  # a logarithmic axis cannot show zero
        axes.fill_between(line.x, low, high, color=style.colour, alpha=0.2, linewidth=0)
    return drawn


def draw_dots(dots: Dots) -> Figure:
    """Draws a column per group: runs as points, the mean as a line, the interval as a box."""
    with _style.settings():
        figure: Figure = need("matplotlib.figure").Figure(figsize=_style.SIZE, layout="constrained")
        axes: Any = figure.add_subplot()
        for place, column in enumerate(dots.columns):
            style = _style.style_of(column.group)
            if column.interval is not None:
                axes.fill_between(
                    [place - 0.18, place + 0.18], *column.interval, color=style.colour, alpha=0.2, linewidth=0
                )
            axes.plot([place - 0.25, place + 0.25], [column.mean] * 2, color=style.colour, linewidth=1.8)
            spread = np.linspace(-0.08, 0.08, len(column.values)) if len(column.values) > 1 else [0.0]
            x, marker = place + np.array(spread), style.marker or "o"
            axes.plot(x, column.values, linestyle="", marker=marker, color=style.colour, alpha=0.8)
        axes.set_title(textwrap.fill(_style.plain(dots.title, 90), 52), loc="left")
        axes.set_ylabel(textwrap.fill(_style.plain(dots.unit, 60), 34))
        if len(dots.columns) < 6:
            lines = [textwrap.wrap(column.label, 48 // len(dots.columns))[:3] for column in dots.columns]
            names = ["\n".join(_style.plain(line) for line in wrapped) for wrapped in lines]
            axes.set_xticks(range(len(names)), names)
        else:
            names = [_style.plain(column.label, 18) for column in dots.columns]
            axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.grid(visible=False, axis="x")
    return figure


def draw_tiles(tiles: Tiles) -> Figure:
    """Draws a grid of images."""
    rows, columns = len(tiles.images), max(map(len, tiles.images), default=0)
    if not rows or not columns:
        raise BadInput(f"{tiles.title}: no images")
    label = 0.09 * min(12, max((len(text) for text in tiles.rows), default=0)) + 0.1
    title = textwrap.fill(_style.plain(tiles.title, 90), 58)
    below, above = (0.22 if tiles.captions else 0.05), (0.55 if tiles.columns else 0.36) + 0.16 * title.count("\n")
    # The same width for any number of columns, so that a page scales all text equally.
    width = _style.SIZE[0]
    cell = min(0.9, (width - label) / columns)
    height = above + rows * (cell + below)
    with _style.settings():
        figure: Figure = need("matplotlib.figure").Figure(figsize=(width, height))
        axes: Any = figure.add_axes((0, 0, 1, 1))  # one for all tiles, because creating axes is slow
        axes.set(xlim=(0, width), ylim=(0, height), autoscale_on=False)
        axes.set_axis_off()
        axes.text(0.02, height - 0.06, title, va="top", fontsize=10.5)
        for column, name in enumerate(tiles.columns[:columns]):
            middle, top = label + (column + 0.47) * cell, height - above + 0.03
            axes.text(middle, top, _fitting(name, cell), ha="center", va="bottom", fontsize=_POINTS)
        for row, images in enumerate(tiles.images):
            bottom = height - above - (row + 1) * cell - row * below
            lines = [_fitting(line, label) for line in textwrap.wrap(tiles.rows[row], 12)[:2]]
            axes.text(0.02, bottom + cell / 2, "\n".join(lines), va="center", fontsize=_POINTS)
            for column, image in enumerate(images):
                left = label + column * cell
                extent = (left, left + 0.94 * cell, bottom + 0.06 * cell, bottom + cell)
                axes.imshow(image, interpolation="none", extent=extent, aspect="auto")
                if tiles.captions:
                    caption = _fitting(tiles.captions[row][column].removesuffix(MARK), cell)
                    axes.text(left + 0.47 * cell, bottom + 0.03, caption, ha="center", va="top", fontsize=_POINTS)
                    _mark(axes, extent, tiles.captions[row][column])
    return figure


def _mark(axes: Any, extent: tuple[float, float, float, float], caption: str) -> None:
    """Draws the mark of a caption in the upper right corner of its picture, `extent` = (left, right, bottom, top)."""
    if caption.endswith(MARK):
        axes.text(extent[1] - 0.03, extent[3] - 0.03, MARK.strip(), ha="right", va="top", fontsize=8.5, bbox=_PAPER)


def _fitting(text: str, inches: float) -> str:
    """One line of text, cut to a width in inches."""
    return _style.plain(text, int(72 * inches / (_POINTS * _EM)))
