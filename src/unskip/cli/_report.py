"""`unskip report RUN ...`: write one page about runs."""

from __future__ import annotations

from typing import Annotated

import tyro

import unskip
from unskip.cli._options import Trust, option
from unskip.cli._say import busy
from unskip.errors import BadInput

_RUNS = "Folders of runs, or folders that contain runs, such as those of --seeds."
_EXPORT = "Also write all tables (CSV, Markdown, LaTeX) and figures (SVG, PDF) to this folder."
_LOOK = "Number of runs to load from their checkpoints, measure and show pictures of; 0 for none."


def report_command(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, option(_RUNS, "RUN ...")],
    out: Annotated[str, tyro.conf.arg(help="HTML file to write.", metavar="FILE")] = "report.html",
    look: Annotated[int, tyro.conf.arg(help=_LOOK, metavar="N")] = 12,
    jacobians: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, option("Also measure the singular values of Jacobians; takes longer.")
    ] = False,
    trust: Trust = False,
    export: Annotated[str | None, option(_EXPORT, "FOLDER")] = None,
) -> int:
    """Write one self-contained HTML page about runs: curves, depth, shortcuts, pictures, warnings.

    Example: unskip report runs/plain runs/decayed --out page.html
    """
    if look < 0:
        raise BadInput(f"--look {look}: give a number of runs, 0 for none")
    with busy("writing the page"):
        page = unskip.report.write(runs, out, look, jacobians, trust, export=export)
    print(page)
    return 0
