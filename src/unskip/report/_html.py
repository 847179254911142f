"""Markup that cannot be broken by what it shows: text is escaped unless it is markup already."""

from __future__ import annotations

import base64
import csv
import html
import io
import math
from collections.abc import Iterable, Sequence

from unskip.report._read import clean

TABLE_ROWS = 200  # of a figure's data that are shown; its CSV has them all


class Markup(str):
    """Text that is HTML."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element. `class_` and `aria_label` become class and aria-label; None leaves an attribute out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Markup:
    """Several pieces in a row."""
    return Markup("".join(c if isinstance(c, Markup) else html.escape(str(c)) for c in children if c is not None))


def table(label: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    """A table that scrolls by itself where it is wide, and sorts by its heads. A pair (value, text) sorts by value."""
    heads = [tag("th", tag("button", name, type="button"), scope="col") for name in header]
    body = [tag("tr", *(_cell(value) for value in row)) for row in rows]
    made = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body))
    return tag("div", made, class_="wide", role="region", aria_label=label, tabindex=0)


def _cell(value: object) -> Markup:
    if isinstance(value, Markup):
        return tag("td", value)
    if isinstance(value, tuple):
        key, text = value
        return tag("td", text, data_value=repr(float(key)) if math.isfinite(key) else None, class_="number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return tag("td", "" if value is None else value)
    return tag("td", short(value), data_value=repr(float(value)) if math.isfinite(value) else None, class_="number")


def short(value: float) -> str:
    """A number in few digits."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e6 else f"{value:.4g}"


def data(label: str, name: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    """A figure's data, one click away: a table, and all of it as CSV."""
    shown = table(f"Data: {label}", header, rows[:TABLE_ROWS])
    more = f"The first {TABLE_ROWS} of {len(rows)} rows; the CSV has all. " if len(rows) > TABLE_ROWS else None
    link = tag("a", "Save as CSV", download=f"{name}.csv", href=f"data:text/csv;base64,{_csv(header, rows)}")
    return tag(
        "details", tag("summary", "Data", tag("span", f" of {label}", class_="hidden")), shown, tag("p", more, link)
    )


def _csv(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([_safe(value) for value in row] for row in (header, *rows))
    return base64.b64encode(file.getvalue().encode()).decode()


def _safe(value: object) -> object:
    """A text that a spreadsheet would take for a formula begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@" and value else value


def words(items: Sequence[str], most: int = 6) -> str:
    """ "a, b and c", the rest counted."""
    kept = [clean(item, 60) for item in items[:most]]
    if len(items) > most:
        return f"{', '.join(kept)} and {len(items) - most} more"
    return " and ".join(filter(None, [", ".join(kept[:-1]), *kept[-1:]]))
