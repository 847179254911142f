"""The figures of a report as matplotlib figures, for papers and notebooks.

    groups = unskip.report.read(["runs/a", "runs/b"])
    unskip.report.figures.loss(groups).savefig("loss.pdf")

Each function takes the groups that `unskip.report.read` returns. It raises BadInput with the next step if the data was
not logged, evaluated or measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unskip.errors import BadInput
from unskip.report import _charts
from unskip.report._dots import of_groups
from unskip.report._read import Group
from unskip.report.figures._draw import Tiles, draw, draw_dots, draw_tiles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Tiles",
    "alphas",
    "conditions",
    "decay",
    "depth",
    "draw",
    "draw_tiles",
    "evaluation",
    "loss",
    "measured",
    "neighbours",
    "patch_features",
    "reconstructions",
    "results",
    "spectra",
]


def results(groups: Sequence[Group], name: str) -> Figure:
    """The newest value of an evaluation, such as test_accuracy, by group: one point per run, mean and interval."""
    dots = of_groups(groups, name)
    if not dots.columns:
        raise BadInput(f"{dots.title}: nothing to draw, because no run was evaluated with it; use `unskip eval RUN`")
    return draw_dots(dots)


def loss(groups: Sequence[Group], name: str = "loss") -> Figure:
    """The loss, or another logged metric, over training steps."""
    return draw(_charts.over_steps(groups, name))


def evaluation(groups: Sequence[Group], name: str) -> Figure:
    """A metric of evaluations during training, such as knn20."""
    return draw(_charts.evaluated(groups, name))


def depth(groups: Sequence[Group], name: str) -> Figure:
    """A metric of evaluations by block, such as knn20, probe_lbfgs or rank."""
    return draw(_charts.over_depth(groups, name))


def measured(groups: Sequence[Group], name: str) -> Figure:
    """echo, high_frequency, token_rank or norm, by block."""
    return draw(_charts.measured(groups, name))


def alphas(groups: Sequence[Group]) -> Figure:
    """The weight of every shortcut."""
    return draw(_charts.alphas(groups))


def decay(groups: Sequence[Group]) -> Figure:
    """The product of all alphas, over training steps."""
    return draw(_charts.decay(groups))


def spectra(groups: Sequence[Group], part: str = "sublayer", quantile: str = "0.5") -> Figure:
    """A quantile of the singular values of Jacobians, by site; `part` is "sublayer" or "branch"."""
    return draw(_charts.spectra(groups, part, quantile))


def conditions(groups: Sequence[Group], part: str = "sublayer") -> Figure:
    """Condition numbers of Jacobians, by site."""
    return draw(_charts.conditions(groups, part))


def reconstructions(groups: Sequence[Group], group: int = 0) -> Figure:
    """Masked patches and their reconstructions by a masked autoencoder."""
    return _tiles(groups, group, "reconstructions")


def patch_features(groups: Sequence[Group], group: int = 0) -> Figure:
    """Patch features by block, with their first three principal components as red, green and blue."""
    return _tiles(groups, group, "patch-features")


def neighbours(groups: Sequence[Group], group: int = 0) -> Figure:
    """Test images and their nearest training images by features of the last block."""
    return _tiles(groups, group, "neighbours")


def _tiles(groups: Sequence[Group], group: int, name: str) -> Figure:
    if not -len(groups) <= group < len(groups):
        raise BadInput(f"group is {group}; there are {len(groups)} groups of runs, counted from 0")
    looks = [run.look for run in groups[group].runs if run.look is not None]
    for look in looks:
        for tiles in look.tiles:
            if tiles.name == name:
                return draw_tiles(tiles)
    part = name.replace("-", " ")
    why = [note for look in looks for note in look.notes if note.startswith((f"{part}:", "not measured:"))]
    if not looks:
        why = ["its checkpoint was not measured: call unskip.report.read with look=True, or a larger number"]
    reason = "; ".join(why) or f"a {groups[group].recipe} run has none"
    raise BadInput(f"{groups[group].label}: no {part}, because {reason}")
