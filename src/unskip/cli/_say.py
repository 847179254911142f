"""How the command line speaks: one line for an error or a warning, a spinner or a bar where somebody is looking, and
now and then a line in a log.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from threading import Event, Thread
from time import monotonic
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from unskip.errors import UnskipWarning

_SECONDS = 10.0  # until the first line of a log: short work says nothing
_LONGEST = 80.0  # between two of them: the pause doubles up to this


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
    """Takes (done, total, what): a bar on stderr where somebody is looking, elsewhere a line now and then."""
    if not sys.stderr.isatty():
        with _told(text) as tick:
            yield tick
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(text), total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=escape(f"{text}: {what}")
        )


@contextlib.contextmanager
def busy(text: str) -> Iterator[None]:
    """A spinner while it lasts, where somebody is looking, elsewhere a line now and then."""
    with _told(text) if not sys.stderr.isatty() else Console(stderr=True).status(escape(text)):
        yield


@contextlib.contextmanager
def _told(text: str) -> Iterator[Callable[[int, int, str], None]]:
    """A line in a log after some seconds and then every minute or so, by a thread: one step may take that long."""
    begun, end, place = monotonic(), Event(), ""

    def tick(done: int, total: int, what: str) -> None:
        nonlocal place
        place = f": {what}, {done} of {total}"

    def tell() -> None:
        pause = _SECONDS
        while not end.wait(pause):
            pause = min(2 * pause, _LONGEST)
            print(f"{text}{place}, for {monotonic() - begun:.0f} s now", file=sys.stderr, flush=True)

    thread = Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield tick
    finally:
        end.set()
        thread.join()


@contextlib.contextmanager
def argument_errors_in_a_line(commands: dict[str, Callable[..., int]]) -> Iterator[dict[str, Callable[..., int]]]:
    """Holds back what tyro prints about bad arguments, a box of several lines, and prints it as one.

    What it gives are the commands, which let go of stderr when they start.
    """
    stderr, held = sys.stderr, io.StringIO()

    def letting_go(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def run(*args: Any, **kwargs: Any) -> int:
            sys.stderr = stderr
            return command(*args, **kwargs)

        return run

    sys.stderr = held
    try:
        yield {name: letting_go(command) for name, command in commands.items()}
    finally:
        sys.stderr = stderr
        words = re.sub(r"[^\x20-\x7e]+", " ", held.getvalue()).split()
        words = [word for word in words if word.strip("-")]
        if words:
            text = re.sub(r"^(.+?) (?=\1)", "", " ".join(words))  # the title of a box is how its text begins
            print("unskip:", text, file=stderr)


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
