"""The demo: rewire a model, train with and without skips, decide an absorption, and one page about all of it.

Every number is of the run at hand, and the text says what that run showed.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from unskip.demo import _absorb, _knob, _train
from unskip.demo._train import QUICK, SMALL, Interrupted, Scale
from unskip.errors import BadInput
from unskip.recipes import Opener, cached_opener

__all__ = ["QUICK", "SMALL", "Scale", "Shown", "run"]
Write = Callable[[str], object]
LOOKED = 6  # runs that are measured and pictured: one seed of each model, and some more


class Shown(NamedTuple):
    """What came of a demo: whether everything that has to hold did, and its page."""

    holds: bool
    page: Path


def run(out: str | Path = "runs/demo", write: Write = print, scale: Scale = SMALL, quiet: bool = True) -> Shown:
    """Carries the demo out in a new folder; unless `quiet`, with the progress of each run."""
    opener = cached_opener()
    _refuse_early()
    folder, begun = _made(Path(out)), time.perf_counter()
    if folder != Path(out):
        write(f"{out} is taken, so this goes into {folder}.\n")
    try:
        shown = _all(folder, write, scale, quiet, opener)
    except (Interrupted, KeyboardInterrupt):
        write(f"\n{_stopped(folder, scale.runs)}")
        raise KeyboardInterrupt from None
    minutes, seconds = divmod(round(time.perf_counter() - begun), 60)
    write(f"It took {minutes} min {seconds} s. Next: docs/getting-started.md goes through the same, line by line.")
    return shown


def _all(folder: Path, write: Write, scale: Scale, quiet: bool, opener: Opener) -> Shown:
    from unskip.report import write as write_page

    parts = iter(range(1, 5))

    def part(title: str) -> None:
        number = next(parts)
        write(f"{'' if number == 1 else chr(10)}== {number} of 4: {title} ==\n")

    part("Rewire a model")
    holds = _knob.turn(write)
    part(f"Train without skips: {scale.fields['steps']} steps each, {len(scale.seeds)} seeds")
    runs = _train.classify(scale, folder, write, quiet, opener)
    kept = next((run for run in runs if any((run / "checkpoints").glob("step-*"))), None)
    part("Can an MLP absorb its own skip?")
    holds &= _absorb.decide(kept, write)
    part("One page about all of it")
    write("The models are loaded from their checkpoints and measured.")
    page = write_page(runs, folder / "report.html", look=LOOKED, opener=opener).resolve()
    write(f"Open {page} in a browser: results with intervals, curves, depth, pictures, and the data behind them.\n")
    return Shown(holds, page)


def _refuse_early() -> None:
    """What would end the demo after minutes ends it now."""
    try:
        import matplotlib  # noqa: F401  (it refuses an MPLBACKEND that it does not know)
    except (ImportError, ValueError) as error:
        raise BadInput(f"matplotlib, which draws the report, cannot be imported: {error}") from error


def _made(folder: Path) -> Path:
    """The folder, or where it is taken the next one: nothing of an earlier demo is overwritten."""
    number, free = 2, folder
    try:
        while free.exists() and not (free.is_dir() and not any(free.iterdir())):
            free, number = folder.with_name(f"{folder.name}-{number}"), number + 1
        free.mkdir(parents=True, exist_ok=True)
        (free / ".write").touch()
        (free / ".write").unlink()
    except OSError as error:
        raise BadInput(f"{free}: cannot be written ({error.strerror}); choose another folder with --out") from error
    return free


def _stopped(folder: Path, count: int) -> str:
    """What there is of a demo of so many runs that was stopped, and how to go on."""
    from unskip.report import read

    if not any([*folder.glob("*/config.json"), *folder.glob("*/seed-*/config.json")]):
        return "Stopped, before any run had begun."
    runs = [run for group in read([folder], look=False) for run in group.runs]
    lines = [f"Stopped. {folder} holds {len(runs)} of {count} runs; `unskip report {_quoted(folder)}` shows them."]
    lines += [
        f"`unskip resume {_quoted(run.path)}` finishes {run.name}." for run in runs if run.checkpoint != run.steps
    ]
    return " ".join([*lines, "The demo itself begins anew."])


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
