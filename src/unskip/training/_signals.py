"""SIGINT and SIGTERM stop a run between two steps."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Stop:
    """Set by a signal, read between steps."""

    requested = False


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """SIGINT and SIGTERM stop the run after the current step; a second signal stops it at once."""
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    before = {}
    with contextlib.suppress(ValueError):  # only the main thread can set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
