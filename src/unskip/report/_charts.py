"""The numbers behind every chart, as lines: one a group of runs, the mean over its seeds and their standard deviation.

mean = sum_i y_i / n,   std = sqrt(sum_i (y_i - mean)^2 / (n - 1)),   over the n runs with a finite value there
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unskip._checks import choice
from unskip.report._intervals import Interval, of_mean
from unskip.report._names import called
from unskip.report._read import Group, Run
from unskip.report._rows import interval_of, number
from unskip.report._text import words

POINTS = 300  # a longer curve is thinned: a page is some hundred pixels wide
BEYOND = 1e100  # larger than that no axis can be drawn
_WIDE = 30  # from here on the largest value over the smallest asks for a logarithmic axis


@dataclass(frozen=True)
class Line:
    """One group in a chart. `count` says over how many runs each point is a mean; `std` is None for one run.

    `interval` is at 95%: of one run that of its test samples, of several that of their mean; None where there is none.
    """

    label: str
    group: int  # its place among the groups, which decides its colour
    x: tuple[float, ...]
    y: tuple[float, ...]
    std: tuple[float | None, ...]
    count: tuple[int, ...]
    interval: tuple[Interval | None, ...]


@dataclass(frozen=True)
class Chart:
    """What a chart shows. `missing` is the reason why an empty one has no line."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...] = ()
    log: bool = False
    note: str = ""
    missing: str = ""

    def rows(self) -> tuple[list[str], list[list[object]]]:
        """The data as a table."""
        header = ["group", self.x_label, self.y_label, "standard deviation", "runs", "95% low", "95% high"]
        rows: list[list[object]] = [
            [line.label, *point, *(ends or (None, None))]
            for line in self.lines
            for *point, ends in zip(line.x, line.y, line.std, line.count, line.interval, strict=True)
        ]
        return header, rows

    def alt(self) -> str:
        """The chart in words."""
        notes = []
        for line in self.lines[:8]:
            x, y = (line.x[0], line.x[-1]), (line.y[0], line.y[-1])
            ends = f"{y[0]:.3g} at {x[0]:g}" + (f" to {y[1]:.3g} at {x[1]:g}" if len(line.x) > 1 else "")
            notes.append(f"{line.label}: {ends}")
        more = f" And {len(self.lines) - 8} more." if len(self.lines) > 8 else ""
        return f"Line chart. {self.title}: {self.y_label} over {self.x_label}. " + "; ".join(notes) + "." + more


def over_steps(groups: Sequence[Group], name: str) -> Chart:
    """A number of metrics.jsonl over training steps."""
    title, unit = called(name)
    missing = f"no run has logged {name}"
    return _chart(f"step-{name}", title, "training step", unit, groups, _logged(groups, name), missing)


def evaluated(groups: Sequence[Group], name: str) -> Chart:
    """A number of evals.jsonl that was taken in the course of training."""
    title, unit = called(name)
    values = [[_course(run, name) for run in group.runs] for group in groups]
    chart = _chart(
        f"eval-{name}",
        title,
        "training step",
        unit,
        groups,
        values,
        "no run was evaluated so in training; `unskip eval RUN` evaluates its last checkpoint",
        intervals=[[_ends(_course_rows(run, name), "step", name) for run in group.runs] for group in groups],
    )
    if chart.lines and all(len(line.x) == 1 for line in chart.lines):
        return replace(chart, lines=(), missing="evaluated once, at the end: the number is in the table of results")
    return chart


def over_depth(groups: Sequence[Group], name: str) -> Chart:
    """A number that `unskip eval` gave for every block."""
    title, unit = called(name)
    values = [[_by_block(run, name) for run in group.runs] for group in groups]
    missing = "no run was evaluated so by block; `unskip eval RUN` does it"
    absent = "Not evaluated by block"
    intervals = [[_ends(_block_rows(run, name), "block", name) for run in group.runs] for group in groups]
    return _chart(f"depth-{name}", f"{title}, by depth", "block", unit, groups, values, missing, absent, intervals)


_MEASURED = {
    "echo": ("Reconstruction of the input (echo), by depth", "R² of a linear reconstruction (fraction)"),
    "high_frequency": ("High frequencies of the patch tokens, by depth", "fraction of the energy"),
    "token_rank": ("Effective rank of the tokens, by depth", "effective rank (directions)"),
    "norm": ("Norm of the tokens, by depth", "mean norm of a token"),
}


def measured(groups: Sequence[Group], name: str) -> Chart:
    """A number that `unskip.measure` takes of every block of a run's last checkpoint."""
    title, unit = _MEASURED[choice("measured", "name", name, _MEASURED)]
    values = [[_looked(run, "blocks", lambda row: row.get(name)) for run in group.runs] for group in groups]
    missing = _unlooked(groups) or f"{name} could not be measured"
    chart = _chart(f"measured-{name}", title, "block", unit, groups, values, missing, "Not measured")
    gaps = []
    for group, runs in zip(groups, values, strict=True):
        every = [_looked(run, "blocks", lambda row: row["index"]) for run in group.runs]
        without = sorted({x for run in every for x in run} - {x for run in runs for x, y in run.items() if y == y})
        if without and any(runs):
            gaps.append(f"{group.label} at block {words([f'{x:g}' for x in without])}")
    alike = " where tokens are all alike"
    why = {"token_rank": alike, "high_frequency": f"{alike} or lie on no square"}.get(name, "")
    note = f"No value{why}: {'; '.join(gaps)}." if gaps else ""
    return replace(chart, note=" ".join(filter(None, [chart.note, note])))


def alphas(groups: Sequence[Group]) -> Chart:
    """How strong each shortcut is, as the last checkpoint holds it. A run that was never rewired has alpha = 1."""
    values = []
    for group in groups:
        mine: list[dict[float, float]] = []
        for run in group.runs:
            kept = _looked(run, "sites", lambda row: row.get("alpha"))
            mine.append({float(each.site): each.alpha for each in run.weights} or kept)
        values.append(mine)
    missing = "no run has a checkpoint that records its shortcuts"
    unit = "alpha"
    return _chart("alphas", "Shortcut weight alpha, by site", "site", unit, groups, values, missing)


def decay(groups: Sequence[Group]) -> Chart:
    """The product of all alphas over training steps; a line at 1 is not drawn for a run without a rule."""
    title, unit, values = "Effective decay in training", "product of all alphas", _logged(groups, "effective_decay")
    missing = "no run has logged an effective decay: none has a rule"
    return _chart("decay", title, "training step", unit, groups, values, missing, "Without a logged rule")


_SPECTRA = {
    "sublayer": "from a sublayer's input to its sum",
    "branch": "of a branch, from its normalised input",
}


def spectra(groups: Sequence[Group], part: str = "sublayer", quantile: str = "0.5") -> Chart:
    """A quantile of the singular values of each site's Jacobian, on one sample."""
    called = {"0.1": "10% quantile", "0.5": "Median", "0.9": "90% quantile"}.get(quantile, quantile)
    name, title = f"spectrum-{part}-{quantile.replace('.', '')}", f"{called} of the singular values"
    return _jacobian(groups, part, name, title, "singular value", lambda spectrum: spectrum["quantiles"].get(quantile))


def conditions(groups: Sequence[Group], part: str = "sublayer") -> Chart:
    """Condition numbers of the Jacobians; lower bounds where they were estimated."""
    name, title = f"condition-{part}", "Condition number of the Jacobian"
    return _jacobian(groups, part, name, title, "condition number", lambda spectrum: spectrum.get("condition"))


def _jacobian(
    groups: Sequence[Group], part: str, name: str, title: str, unit: str, value: Callable[[dict[str, Any]], object]
) -> Chart:
    where = _SPECTRA[choice("spectra", "part", part, _SPECTRA)]

    def of_site(row: Mapping[str, Any]) -> object:
        spectrum = row.get(part)
        return value(spectrum) if isinstance(spectrum, dict) else None

    values = [[_looked(run, "sites", of_site) for run in group.runs] for group in groups]
    missing = _unlooked(groups) or "not measured: ask for it with --jacobians"
    return _chart(name, f"{title} {where}", "site", unit, groups, values, missing)


def mean_and_std(values: Iterable[float]) -> tuple[float, float | None, int]:
    """Over what is finite: mean, standard deviation (None for one), and how many there are."""
    kept = [value for value in values if math.isfinite(value)]
    if not kept:
        return math.nan, None, 0
    scale = max(map(abs, kept)) or 1.0  # squares of what is large would overflow
    shrunk = [value / scale for value in kept]
    std = statistics.stdev(shrunk) * scale if len(kept) > 1 else None
    return statistics.fmean(shrunk) * scale, std, len(kept)


def _logged(groups: Sequence[Group], name: str) -> list[list[dict[float, float]]]:
    return [[{row["step"]: row[name] for row in run.metrics if name in row} for run in g.runs] for g in groups]


def _course_rows(run: Run, name: str) -> list[dict[str, Any]]:
    return [row for row in run.evals if row.get("block") is None and name in row]


def _course(run: Run, name: str) -> dict[float, float]:
    return {row["step"]: value for row in _course_rows(run, name) if (value := number(row[name])) is not None}


def _block_rows(run: Run, name: str) -> list[dict[str, Any]]:
    """Of the newest step that was evaluated so; a later line takes the place of an earlier one."""
    rows = [row for row in run.evals if row.get("block") is not None and name in row]
    newest = max((row["step"] for row in rows), default=0)
    return [row for row in rows if row["step"] == newest]


def _by_block(run: Run, name: str) -> dict[float, float]:
    return {float(row["block"]): value for row in _block_rows(run, name) if (value := number(row[name])) is not None}


def _ends(rows: Iterable[Mapping[str, Any]], place: str, name: str) -> dict[float, Interval]:
    """The interval of a number by step or block, where its line has one."""
    return {float(row[place]): ends for row in rows if (ends := interval_of(row, name)) is not None}


def _looked(run: Run, part: str, value: Callable[[Mapping[str, Any]], object]) -> dict[float, float]:
    measurement = run.look.measurement if run.look is not None else None
    if measurement is None:
        return {}
    values = {float(row["index"]): number(value(row)) for row in measurement[part]}
    return {index: given for index, given in values.items() if given is not None}


def _unlooked(groups: Sequence[Group]) -> str:
    if any(run.look is not None and run.look.measurement is not None for group in groups for run in group.runs):
        return ""
    return "no checkpoint was looked at"


def _chart(
    name: str,
    title: str,
    x_label: str,
    y_label: str,
    groups: Sequence[Group],
    values: Sequence[Sequence[Mapping[float, float]]],
    missing: str,
    absent: str = "Not there",
    intervals: Sequence[Sequence[Mapping[float, Interval]]] = (),
) -> Chart:
    lines, thinned, beyond = [], False, False
    most = max(40, min(POINTS, 20 * POINTS // max(1, len(groups))))
    for place, (group, runs) in enumerate(zip(groups, values, strict=True)):
        points = []
        for x in sorted({x for run in runs for x in run}):
            there = [run[x] for run in runs if x in run]
            mean, std, count = mean_and_std(there)
            if count and abs(mean) < BEYOND:
                only = intervals[place][0].get(x) if intervals and len(runs) == 1 else None
                points.append((x, mean, std, count, of_mean([*filter(math.isfinite, there)]) or only))
            beyond |= abs(mean) >= BEYOND
        if not points:
            continue
        every = max(1, math.ceil(len(points) / most))
        thinned |= every > 1
        kept = points[::every] + ([points[-1]] if (len(points) - 1) % every else [])
        lines.append(Line(group.label, group.place, *zip(*kept, strict=True)))
    notes = [f"Long curves are thinned to {most} points."] if thinned else []
    notes += [f"Values beyond {BEYOND:.0e} are not drawn."] if beyond else []
    same = [words([line.label for line in each]) for each in _equal(lines)]
    notes += [f"On one line, as they are equal: {'; '.join(same)}."] if same else []
    drawn = {line.group for line in lines}
    without = [group.label for group in groups if group.place not in drawn]
    notes += [f"{absent}: {words(without)}."] if without else []
    shown = [y for line in lines for y in line.y]
    # A fraction near zero is nothing, which a logarithm would make much of.
    wide = "fraction" not in y_label and bool(shown) and min(shown) > 0 and max(shown) > _WIDE * min(shown)
    note = "" if not lines else " ".join(notes)
    return Chart(name, title, x_label, y_label, tuple(lines), wide, note, "" if lines else missing)


def _equal(lines: Sequence[Line]) -> list[list[Line]]:
    """Lines that hide one another: where two have a point, it is the same."""
    together: list[list[Line]] = []
    for line in lines:
        mine = dict(zip(line.x, line.y, strict=True))
        for others in together:
            first = dict(zip(others[0].x, others[0].y, strict=True))
            shared = mine.keys() & first.keys()
            if shared and all(mine[x] == first[x] for x in shared):
                others.append(line)
                break
        else:
            together.append([line])
    return [others for others in together if len(others) > 1]
