"""SIGINT and SIGTERM, read between steps."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Stop:
    """Set by a signal, read between steps."""

    asked = False


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """SIGINT and SIGTERM end the run after the step in hand; a second one ends it at once."""
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = {}
    with contextlib.suppress(ValueError):  # not the main thread: signals are somebody else's
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
