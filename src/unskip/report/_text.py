"""Text for a page: cleaned names, rounded numbers, lists as words."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence


def clean(text: object, limit: int = 80) -> str:
    """One line of at most `limit` printable characters."""
    kept = str(text).encode("utf-8", "replace").decode("utf-8")  # drops lone surrogates
    kept = "".join(letter if letter.isprintable() else " " for letter in kept)
    kept = " ".join(kept.split())
    return kept if len(kept) <= limit else kept[: limit - 1] + "…"


def short(value: float) -> str:
    """A number with about four digits."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e6 else f"{value:.4g}"


def slug(text: str) -> str:
    """A file name made from text."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "table"


def words(items: Sequence[str], most: int = 6) -> str:
    """ "a, b and c", the rest counted."""
    kept = [clean(item, 60) for item in items[:most]]
    if len(items) > most:
        return f"{', '.join(kept)} and {len(items) - most} more"
    return " and ".join(filter(None, [", ".join(kept[:-1]), *kept[-1:]]))
