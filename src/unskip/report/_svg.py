"""matplotlib figures as inline SVG: colours from the page's scheme, selectable text, unique ids."""

from __future__ import annotations

import html
import io
import re
import warnings
import zlib
from typing import TYPE_CHECKING

from unskip.report.figures import _style

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

_VARIABLES = {colour: f"var(--c{index})" for index, colour in enumerate(_style.COLOURS)}
_VARIABLES |= {_style.INK: "var(--ink)", _style.GRID: "var(--grid)", _style.REST: "var(--rest)"}
_COLOUR = re.compile("|".join(_VARIABLES), re.IGNORECASE)
_STYLE = re.compile(r' style="[^"]*"')
_FONT = re.compile(r"font: ((?:[\w.]+ )*?)([\d.]+)px [^;\"]*")
_GEOMETRY = re.compile(r' (?:d|x|y|width|height|transform|points)="[^"]*"')
_DIGITS = re.compile(r"(\d\.\d\d)\d+")
_IDS = re.compile(r'\b(id="|href="#|url\(#)')


def inline(figure: Figure, name: str, alt: str) -> Markup:
    """The figure as an <svg> element; its ids are prefixed with `name` to be unique in the page."""
    from markupsafe import Markup

    file = io.StringIO()
    with _style.settings(), warnings.catch_warnings():
        # The browser has glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    opening, _, rest = text.partition(">")
    box = re.search(r'viewBox="[^"]*"', opening)
    width = re.search(r'width="([\d.]+)pt"', opening)
    assert box is not None
    assert width is not None
    rest = _STYLE.sub(lambda match: _COLOUR.sub(lambda c: _VARIABLES[c[0].lower()], match[0]), rest)
    rest = _STYLE.sub(lambda match: _FONT.sub(r"font: \1\2px var(--font)", match[0]), rest)
    rest = _GEOMETRY.sub(lambda match: _DIGITS.sub(r"\1", match[0]), rest)
    rest = _IDS.sub(rf"\g<1>{_id(name)}-", rest)
    rest = re.sub(r"\n\s*", "\n", rest)
    size = f'style="max-width: {float(width[1]) * 1.6:.0f}px"'
    label = html.escape(alt, quote=True)
    return Markup(f'<svg class="chart" {box[0]} {size} role="img" aria-label="{label}">{rest}')


def _id(name: str) -> str:
    """Part of an id, from the name of a metric, which may have any characters."""
    kept = re.sub(r"[^\w-]", "-", name, flags=re.ASCII)
    return kept if kept == name else f"{kept}-{zlib.crc32(name.encode()):08x}"
