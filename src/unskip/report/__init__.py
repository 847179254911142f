"""Reports of runs: matplotlib figures, and one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from unskip._warn import warn
from unskip.errors import BadInput
from unskip.report import figures
from unskip.report._intervals import Difference, difference
from unskip.report._read import Group, Run, read_groups
from unskip.report.figures import Tiles

if TYPE_CHECKING:
    from unskip.recipes import Opener

LOOKED = 12  # runs whose checkpoints are looked at, unless asked otherwise

__all__ = ["Difference", "Group", "Run", "Tiles", "difference", "figures", "read", "write"]


def read(
    runs: Iterable[str | Path],
    look: bool | int = True,
    jacobians: bool = False,
    trust: bool = False,
    opener: Opener | None = None,
) -> list[Group]:
    """Runs, grouped by everything but their seed. A folder of runs stands for the runs in it.

    With `look` the models of the first 12 runs (or of so many as it says) are built, filled from their last checkpoint
    and measured on 16 test images; `jacobians` measures singular values too, which takes longer. A model that is a
    Python file is built with `trust` alone. Warns of a checkpoint that cannot be opened. `opener` opens the images, as
    for `unskip.train`.
    """
    groups = read_groups(runs)
    most = LOOKED if look is True else int(look)
    if not most:
        return groups
    from unskip.recipes import cached_opener
    from unskip.report._look import look as look_at

    # The first seed of every group, then the second: pictures of each before more of one.
    places = sorted((place, index) for index, group in enumerate(groups) for place in range(len(group.runs)))
    members = [list(group.runs) for group in groups]
    opener = opener or cached_opener()
    for place, index in places[:most]:
        run = members[index][place]
        result = look_at(run, jacobians, trust, opener)
        if run.checkpoint is not None and result.step is None:  # such as for want of a plugin; the page says so too
            warn(f"{run.path}: {result.notes[0]}")
        members[index][place] = replace(run, look=result)
    return [replace(group, runs=tuple(runs)) for group, runs in zip(groups, members, strict=True)]


def write(
    runs: Iterable[str | Path],
    out: str | Path = "report.html",
    look: bool | int = True,
    jacobians: bool = False,
    trust: bool = False,
    opener: Opener | None = None,
    export: str | Path | None = None,
) -> Path:
    """Writes the page about some runs; `look`, `jacobians`, `trust` and `opener` as for `read`.

    `export` names a folder for its tables (CSV, Markdown, LaTeX) and figures (SVG, PDF).
    """
    from unskip.report._export import export as write_files
    from unskip.report._page import page

    file = Path(out)
    aside = file.with_name(f".{file.name}.tmp")
    if file.is_dir():
        raise BadInput(f"{out} is a folder; name the page to write, such as {file / 'report.html'}")
    try:  # before the models are built, which takes longer
        file.parent.mkdir(parents=True, exist_ok=True)
        aside.touch()
        aside.unlink()
    except OSError as error:
        raise BadInput(f"{out}: cannot be written ({error.strerror}); choose another file") from error
    groups = read(runs, look, jacobians, trust, opener)
    text = page(groups)
    if export is not None:
        write_files(groups, Path(export))
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)
    return file
