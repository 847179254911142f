"""`unskip demo`: minutes from an installation to a page about models that the demo has trained itself."""

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
    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff, option("Fewer steps: about half a minute.")] = False,
    out: Annotated[str, tyro.conf.arg(help="Where runs and page go.", metavar="FOLDER")] = "runs/demo",
    progress: Annotated[bool, tyro.conf.FlagCreatePairsOff, option("Show the progress of each run.")] = False,
) -> int:
    """Audit, rewire, train with and without shortcuts, prove, and report: minutes on two cores, no network.

    Example: unskip demo --quick
    """
    from unskip import demo as demonstration

    scale = demonstration.QUICK if quick else demonstration.SMALL
    shown = demonstration.run(out, functools.partial(print, flush=True), scale, quiet=not progress)
    if sys.stdout.isatty() and _has_screen():
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(shown.page.as_uri())
    return 0 if shown.holds else 1


def _has_screen() -> bool:
    """Whether a browser would open in a window: one in the terminal would take it over."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
