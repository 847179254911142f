"""Output of the command line: results as JSON, warnings in one line, and progress on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, TextIO

from unskip.errors import UnskipWarning

_PAUSE = 30.0  # seconds between two progress lines


def finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(data: dict[str, Any]) -> None:
    """Prints the result of a command as JSON."""
    print(json.dumps(finite(data), indent=2, allow_nan=False))


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a callback for (done, total, what): a progress bar on a terminal, elsewhere a line every 30 seconds."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(escape(text), total=None)
            yield lambda done, total, what: bar.update(
                task, completed=done, total=total, description=escape(f"{text}: {what}")
            )
        return
    last = monotonic()

    def tick(done: int, total: int, what: str) -> None:
        nonlocal last
        if monotonic() - last >= _PAUSE:
            last = monotonic()
            print(f"{text}: {what}, {done} of {total}", file=sys.stderr, flush=True)

    yield tick


@contextlib.contextmanager
def busy(text: str) -> Iterator[None]:
    """Shows a spinner on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(text)):
        yield


@contextlib.contextmanager
def one_line_warnings() -> Iterator[None]:
    """Prints every warning of unskip in one line; warnings of other libraries as usual."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, UnskipWarning):
            print(f"warning: {one_line(message)}", file=sys.stderr)
        else:
            show_default(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        show_default, warnings.showwarning = warnings.showwarning, show
        warnings.filterwarnings("always", category=UnskipWarning)
        yield


def one_line(message: object) -> str:
    """A message without line breaks."""
    return " ".join(str(message).split())
