"""A table as CSV, Markdown and LaTeX. Cells are as on the page: None, text, a number, (number, text) or a group."""

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
    """Numbers in full. A text that a spreadsheet would take for a formula begins with an apostrophe."""
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    for row in (header, *rows):
        cells = [cell if isinstance(cell, int | float) else _text(cell) for cell in row]
        writer.writerow(
            [f"'{each}" if isinstance(each, str) and each[:1] in "=+-@" and each else each for each in cells]
        )
    return content.getvalue()


def to_markdown(header: Header, rows: Rows) -> str:
    """A pipe table, numbers to the right."""
    lines = [[_text(cell).replace("\\", "\\\\").replace("|", "\\|") for cell in row] for row in (header, *rows)]
    rule = ["---:" if _numbers(rows, place) else "---" for place in range(len(header))]
    return "".join(f"| {' | '.join(line)} |\n" for line in [lines[0], rule, *lines[1:]])


def to_latex(header: Header, rows: Rows) -> str:
    """A tabular with the rules of booktabs."""
    lines = ["".join(_TEX.get(letter, letter) for letter in "\0".join(map(_text, row))) for row in (header, *rows)]
    first, *rest = [line.replace("\0", " & ") + " \\\\\n" for line in lines]
    columns = "".join("r" if _numbers(rows, place) else "l" for place in range(len(header)))
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


def _numbers(rows: Rows, place: int) -> bool:
    cells = [row[place] for row in rows if row[place] is not None]
    return bool(cells) and all(isinstance(cell, int | float | tuple) for cell in cells)
