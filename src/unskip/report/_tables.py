"""A table as CSV, Markdown and LaTeX. A cell is None, text, a number, (number, text) or a group."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence

from unskip.report._read import Group
from unskip.report._text import short

Header = Sequence[str]
Rows = Sequence[Sequence[object]]

_TEX = {letter: f"\\{letter}" for letter in "&%$#_{}"}
_TEX |= {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "±": "$\\pm$",
    "²": "$^2$",
    "[": "{[}",
}


def to_csv(header: Header, rows: Rows) -> str:
    """CSV with full numbers. An apostrophe precedes text that a spreadsheet would read as a formula."""
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    for row in (header, *rows):
        cells = [cell if isinstance(cell, int | float) else _text(cell) for cell in row]
        writer.writerow([f"'{x}" if isinstance(x, str) and x.startswith(("=", "+", "-", "@")) else x for x in cells])
    return content.getvalue()


def to_markdown(header: Header, rows: Rows) -> str:
    """A pipe table with numbers right-aligned."""
    lines = [[_text(cell).replace("\\", "\\\\").replace("|", "\\|") for cell in row] for row in (header, *rows)]
    rule = ["---:" if _numeric(rows, column) else "---" for column in range(len(header))]
    return "".join(f"| {' | '.join(line)} |\n" for line in [lines[0], rule, *lines[1:]])


def to_latex(header: Header, rows: Rows) -> str:
    """A tabular with the rules of booktabs."""
    lines = ["".join(_TEX.get(letter, letter) for letter in "\0".join(map(_text, row))) for row in (header, *rows)]
    first, *rest = [line.replace("\0", " & ") + " \\\\\n" for line in lines]
    columns = "".join("r" if _numeric(rows, column) else "l" for column in range(len(header)))
    body = "".join(rest)
    return f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{first}\\midrule\n{body}\\bottomrule\n\\end{{tabular}}\n"


FORMATS: dict[str, Callable[[Header, Rows], str]] = {"csv": to_csv, "md": to_markdown, "tex": to_latex}


def _text(cell: object) -> str:
    if cell is None:
        return ""
    if isinstance(cell, Group):
        return cell.label
    if isinstance(cell, tuple):
        return str(cell[1])
    return short(cell) if isinstance(cell, float) else str(cell)


def _numeric(rows: Rows, column: int) -> bool:
    cells = [row[column] for row in rows if row[column] is not None]
    return bool(cells) and all(isinstance(cell, int | float | tuple) for cell in cells)
