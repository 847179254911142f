"""Plain text tables: columns padded to their widest cell, numbers right-aligned."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table as text; None is an empty cell, floats have four digits."""
    cells = [list(header), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    right = [bool(rows) and all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def cell(value: object) -> str:
    """The text of one cell."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
