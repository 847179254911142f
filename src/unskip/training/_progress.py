"""Progress on stderr: a bar with loss, rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Reporter:
    """Shows the progress of a run on stderr."""

    def __init__(self, steps: int, start: int, quiet: bool) -> None:
        self.steps, self.start, self.quiet = steps, start, quiet
        self.begun = time.perf_counter()
        self.bar: Any = None
        self.task: Any = None

    def __enter__(self) -> Reporter:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self.bar = Progress(*columns, console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("", total=self.steps, completed=self.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, done: int, row: dict[str, Any]) -> None:
        """Shows a row of metrics."""
        text = f"loss {row['loss']:.4g}  lr {row['lr']:.2e}  {row['samples_per_second']:.0f}/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=done, description=text)
        elif not self.quiet:
            elapsed = time.perf_counter() - self.begun
            left = elapsed / max(done - self.start, 1) * (self.steps - done)
            self._line(f"step {done}/{self.steps}  {text}  {_span(left)} left")

    def say(self, text: str) -> None:
        """Prints a line."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False)
        elif not self.quiet:
            self._line(text)

    @staticmethod
    def _line(text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
