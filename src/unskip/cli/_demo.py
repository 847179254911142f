"""`unskip demo`: train small models and write a report about them, in minutes."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import webbrowser
from typing import Annotated

import tyro

from unskip.cli._options import option


def demo_command(
    quick: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, option("Train for fewer steps: takes about half a minute.")
    ] = False,
    out: Annotated[str, tyro.conf.arg(help="Folder for the runs and the page.", metavar="FOLDER")] = "runs/demo",
    progress: Annotated[bool, tyro.conf.FlagCreatePairsOff, option("Show the progress of each run.")] = False,
) -> int:
    """Audit, rewire, train with and without skips, absorb and report, in minutes on two cores, without a network.

    Example: unskip demo --quick
    """
    from unskip import demo as demonstration

    scale = demonstration.QUICK if quick else demonstration.SMALL
    shown = demonstration.run(out, functools.partial(print, flush=True), scale, quiet=not progress)
    if sys.stdout.isatty() and _has_display():
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(shown.page.as_uri())
    return 0 if shown.holds else 1


def _has_display() -> bool:
    """Whether a browser opens in a window; a text browser would take over the terminal."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
