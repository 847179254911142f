"""`unskip report RUN ...`: one page about any runs."""

from __future__ import annotations

from typing import Annotated

import tyro

import unskip
from unskip.cli._options import Trust, option
from unskip.cli._say import busy
from unskip.errors import BadInput

_RUNS = "Folders of runs; a folder of runs, such as --seeds makes, stands for the runs in it."
_EXPORT = "Also write every table (CSV, Markdown, LaTeX) and every figure (SVG, PDF) into this folder."
_LOOK = "How many runs to build and measure from their checkpoints, and to show pictures of; 0 for none."


def report_command(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, option(_RUNS, "RUN ...")],
    out: Annotated[str, tyro.conf.arg(help="The page to write.", metavar="FILE")] = "report.html",
    look: Annotated[int, tyro.conf.arg(help=_LOOK, metavar="N")] = 12,
    jacobians: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, option("Measure the singular values of Jacobians too; takes longer.")
    ] = False,
    trust: Trust = False,
    export: Annotated[str | None, option(_EXPORT, "FOLDER")] = None,
) -> int:
    """Write one self-contained HTML page about any runs: curves, depth, shortcuts, pictures, warnings.

    Example: unskip report runs/plain runs/decayed --out page.html
    """
    if look < 0:
        raise BadInput(f"--look {look}: it is the number of runs to look at, 0 for none")
    with busy("writing the page"):
        page = unskip.report.write(runs, out, look, jacobians, trust, export=export)
    print(page)
    return 0
