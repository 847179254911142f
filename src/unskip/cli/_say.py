"""How the command line writes: results as JSON, warnings in a line, and progress on stderr."""

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

_PAUSE = 30.0  # seconds between two lines of a log


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(data: dict[str, Any]) -> None:
    """The result of a command for other programs."""
    print(json.dumps(finite(data), indent=2, allow_nan=False))


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[int, int, str], None]]:
    """Takes (done, total, what): a bar on a terminal, elsewhere a line every half a minute."""
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
    """A spinner on a terminal, elsewhere nothing."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(text)):
        yield


@contextlib.contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Our own warnings as one line each, all of them; those of other libraries as Python shows them."""

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
            others(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        others, warnings.showwarning = warnings.showwarning, show
        warnings.filterwarnings("always", category=UnskipWarning)
        yield


def one_line(message: object) -> str:
    """A message without its line breaks."""
    return " ".join(str(message).split())
