"""Parts of messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from textwrap import shorten


def nearest(word: str, names: Iterable[str]) -> str:
    """A hint for the end of a message: the names closest to a misspelt word."""
    close = get_close_matches(word.lower(), list(names))
    return f"; nearest: {', '.join(close)}" if close else ""


def brief(error: BaseException) -> str:
    """The first paragraph of an error's message, on one line of at most 300 characters."""
    return shorten(str(error).strip().partition("\n\n")[0], 300, placeholder=" ...")


def count(number: int, noun: str) -> str:
    """ "1 site", "2 sites"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
