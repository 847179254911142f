"""An audit as a terminal table, with the weights of a wiring; columns that are empty or do not fit are left out."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unskip._table import cell
from unskip._words import count
from unskip.anatomy import AUDIT_HEADER, Audit, Site, audit_rows
from unskip.wiring import Wiring


def draw(survey: Audit, wiring: Wiring | None) -> None:
    """Prints an audit, with the weights of its wiring if given."""
    console = Console(highlight=False)
    console.print(f"{survey.model}: {count(len(survey), 'residual site')}", markup=False, style="bold")
    _print(console, survey.sites, wiring)
    if survey.blocks:
        console.print(survey.shown_blocks, markup=False)
    if survey.unknown:
        console.print(f"{count(len(survey.unknown), 'addition')} not decided, and left alone:", style="yellow")
    for unknown in survey.unknown:
        console.print(f"  {unknown.path or '(model)'} ({unknown.source}): {unknown.reason}", markup=False)
    for note in survey.notes:
        console.print(f"note: {note}", markup=False)


def _print(console: Console, sites: Sequence[Site], wiring: Wiring | None) -> None:
    header, cells = list(AUDIT_HEADER), audit_rows(sites)
    if wiring is not None:
        header[5:5] = ["alpha", "beta"]
        for row, alpha, beta in zip(cells, wiring.alphas, wiring.betas, strict=True):
            row[5:5] = [alpha, beta]
    default = {"runs": 1}  # a column with only this value is left out
    shown = [name for i, name in enumerate(header) if any(row[i] not in (None, "", default.get(name)) for row in cells)]
    table = _table(header, cells, shown)
    unlimited = console.options.update_width(10_000)  # the width of the table before it is cut to the terminal
    dropped = []
    for name in ("source", "branch"):
        if name in shown and console.measure(table, options=unlimited).maximum > console.width:
            shown.remove(name)
            dropped.append(name)
            table = _table(header, cells, shown)
    if shown:
        console.print(table)
    if dropped:
        console.print(
            f"too wide for the terminal: {' and '.join(dropped)} not shown; add | cat for all columns", style="dim"
        )


def _table(header: Sequence[str], cells: Sequence[Sequence[object]], shown: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    indices = [header.index(name) for name in shown]
    for i in indices:
        numbers = all(isinstance(row[i], int | float | None) for row in cells)
        short = header[i] not in ("path", "branch", "source", "note")
        table.add_column(escape(header[i]), justify="right" if numbers else "left", no_wrap=short, overflow="fold")
    for row in cells:
        table.add_row(*(escape(cell(row[i])) for i in indices))
    return table
