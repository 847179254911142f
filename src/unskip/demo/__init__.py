"""The demo: rewire a model, train with and without skips, test MLPs for absorption, and write a report.

All numbers in its text come from this run.
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
LOOKED = 6  # runs that the report measures and shows pictures of: at least one seed of each model


class Shown(NamedTuple):
    """The outcome of the demo: whether all checks passed, and the report."""

    holds: bool
    page: Path


def run(out: str | Path = "runs/demo", write: Write = print, scale: Scale = SMALL, quiet: bool = True) -> Shown:
    """Runs the demo in a new folder; unless `quiet`, the progress of each run is printed."""
    opener = cached_opener()
    _refuse_early()
    folder, start = _new_folder(Path(out)), time.perf_counter()
    if folder != Path(out):
        write(f"{out} is not empty, so the demo writes into {folder}.\n")
    try:
        shown = _parts(folder, write, scale, quiet, opener)
    except (Interrupted, KeyboardInterrupt):
        write(f"\n{_stopped_message(folder, scale.runs)}")
        raise KeyboardInterrupt from None
    minutes, seconds = divmod(round(time.perf_counter() - start), 60)
    write(f"It took {minutes} min {seconds} s. Next: docs/getting-started.md explains the same steps.")
    return shown


def _parts(folder: Path, write: Write, scale: Scale, quiet: bool, opener: Opener) -> Shown:
    from unskip.report import write as write_page

    parts = iter(range(1, 5))

    def part(title: str) -> None:
        number = next(parts)
        write(f"{'' if number == 1 else chr(10)}== {number} of 4: {title} ==\n")

    part("Rewire a model")
    holds = _knob.rewire_small_vit(write)
    part(f"Train without skips: {scale.fields['steps']} steps each, {len(scale.seeds)} seeds")
    runs = _train.classify(scale, folder, write, quiet, opener)
    trained = next((run for run in runs if any((run / "checkpoints").glob("step-*"))), None)
    part("Can an MLP absorb its own skip?")
    holds &= _absorb.decide(trained, write)
    part("Report")
    write("The models are loaded from their checkpoints and measured.")
    page = write_page(runs, folder / "report.html", look=LOOKED, opener=opener).resolve()
    write(f"Open {page} in a browser: results with intervals, training curves, measurements by block, and pictures.\n")
    return Shown(holds, page)


def _refuse_early() -> None:
    """Raises BadInput now if matplotlib cannot be imported: the report needs it minutes later."""
    try:
        import matplotlib  # noqa: F401  (ValueError: an unknown MPLBACKEND)
    except (ImportError, ValueError) as error:
        raise BadInput(f"matplotlib, which draws the report, cannot be imported: {error}") from error


def _new_folder(folder: Path) -> Path:
    """Creates and returns the folder, or if it is not empty `<folder>-2`, `-3`, ...; nothing is overwritten."""
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


def _stopped_message(folder: Path, count: int) -> str:
    """How many of `count` runs an interrupted demo has left, and the commands that report and resume them."""
    from unskip.report import read

    if not any([*folder.glob("*/config.json"), *folder.glob("*/seed-*/config.json")]):
        return "Stopped before the first run."
    runs = [run for group in read([folder], look=False) for run in group.runs]
    lines = [f"Stopped. {folder} has {len(runs)} of {count} runs; `unskip report {_quoted(folder)}` shows them."]
    lines += [
        f"`unskip resume {_quoted(run.path)}` finishes {run.name}." for run in runs if run.checkpoint != run.steps
    ]
    return " ".join([*lines, "`unskip demo` starts from the beginning."])


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
