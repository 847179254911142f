"""Parts of messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from textwrap import shorten


def nearest(word: str, names: Iterable[str]) -> str:
    """A hint for the end of a message: the names closest to a misspelt word."""
    close = get_close_matches(word.lower(), list(names))
    return f"; nearest: {', '.join(close)}" if close else ""


def some(names: Sequence[str], most: int = 3) -> str:
    """ "a, b, c and 4 more": the first names, and the number of the others."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def brief(error: BaseException) -> str:
    """The first paragraph of an error's message, on one line of at most 300 characters."""
    return shorten(str(error).strip().partition("\n\n")[0], 300, placeholder=" ...")


def count(number: int, noun: str) -> str:
    """ "1 site", "2 sites"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
