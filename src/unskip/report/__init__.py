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

MEASURED_RUNS = 12  # default number of runs whose checkpoints are measured

__all__ = ["Difference", "Group", "Run", "Tiles", "difference", "figures", "read", "write"]


def read(
    runs: Iterable[str | Path],
    look: bool | int = True,
    jacobians: bool = False,
    trust: bool = False,
    opener: Opener | None = None,
) -> list[Group]:
    """Reads runs and groups those that differ only in their seed. A folder of runs counts as the runs in it.

    With `look`, the models of the first 12 runs (or of the first `look` runs) are loaded from their last checkpoint and
    measured on 16 test images; `jacobians` also measures singular values, which is slower. A model defined in a Python
    file is built only with `trust`. Warns of a checkpoint that cannot be opened. `opener` opens the images, as in
    `unskip.train`.
    """
    groups = read_groups(runs)
    most = MEASURED_RUNS if look is True else int(look)
    if not most:
        return groups
    from unskip.recipes import cached_opener
    from unskip.report._look import look as look_at

    # The first run of every group, then the second: every group is measured before any is measured twice.
    turns = sorted((turn, index) for index, group in enumerate(groups) for turn in range(len(group.runs)))
    members = [list(group.runs) for group in groups]
    opener = opener or cached_opener()
    for turn, index in turns[:most]:
        run = members[index][turn]
        result = look_at(run, jacobians, trust, opener)
        if run.checkpoint is not None and result.step is None:  # a missing plugin, for example; the page lists it too
            warn(f"{run.path}: {result.notes[0]}")
        members[index][turn] = replace(run, look=result)
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
    """Writes an HTML page about runs and returns its path; `look`, `jacobians`, `trust` and `opener` as in `read`.

    `export` names a folder for the tables (CSV, Markdown, LaTeX) and figures (SVG, PDF).
    """
    from unskip.report._export import export as write_files
    from unskip.report._page import page

    file = Path(out)
    temporary = file.with_name(f".{file.name}.tmp")
    if file.is_dir():
        raise BadInput(f"{out} is a folder; name the page to write, such as {file / 'report.html'}")
    try:  # fail before the models are built, which takes minutes
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise BadInput(f"{out}: cannot be written ({error.strerror}); choose another file") from error
    groups = read(runs, look, jacobians, trust, opener)
    text = page(groups)
    if export is not None:
        write_files(groups, Path(export))
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
    return file
