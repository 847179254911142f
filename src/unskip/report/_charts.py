"""The data of every chart: a line per group of runs, with the mean and the standard deviation over its seeds.

mean = sum_i y_i / n,   std = sqrt(sum_i (y_i - mean)^2 / (n - 1)),   over the n runs with a finite value at that x
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unskip._checks import choice
from unskip.report._intervals import Interval, of_mean
from unskip.report._names import title_and_unit
from unskip.report._read import Group, Run
from unskip.report._rows import interval_of, number
from unskip.report._text import words

Rows = list[dict[str, Any]]

POINTS = 300  # longer curves are thinned; a page is a few hundred pixels wide
BEYOND = 1e100  # larger values cannot be drawn on an axis
_WIDE = 30  # above this ratio of largest to smallest value the axis is logarithmic


@dataclass(frozen=True)
class Line:
    """One group in a chart. Each point is a mean over `count` runs; `std` is None for one run.

    `interval` is at 95%: over the test samples of one run, or of the mean of several; None if unknown.
    """

    label: str
    group: int  # index of the group, which sets its colour
    x: tuple[float, ...]
    y: tuple[float, ...]
    std: tuple[float | None, ...]
    count: tuple[int, ...]
    interval: tuple[Interval | None, ...]


@dataclass(frozen=True)
class Chart:
    """A line chart. `missing` says why it has no lines, if it has none."""

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
        """Alternative text."""
        notes = []
        for line in self.lines[:8]:
            last = f" to {line.y[-1]:.3g} at {line.x[-1]:g}" if len(line.x) > 1 else ""
            notes.append(f"{line.label}: {line.y[0]:.3g} at {line.x[0]:g}{last}")
        more = f" And {len(self.lines) - 8} more." if len(self.lines) > 8 else ""
        return f"Line chart. {self.title}: {self.y_label} over {self.x_label}. " + "; ".join(notes) + "." + more


def over_steps(groups: Sequence[Group], name: str) -> Chart:
    """A metric of metrics.jsonl over training steps."""
    title, unit = title_and_unit(name)
    missing = f"no run has logged {name}"
    return _chart(f"step-{name}", title, "training step", unit, groups, _logged(groups, name), missing)


def evaluated(groups: Sequence[Group], name: str) -> Chart:
    """A metric of evals.jsonl over training steps."""
    title, unit = title_and_unit(name)
    rows = [[_training_rows(run, name) for run in group.runs] for group in groups]
    chart = _chart(
        f"eval-{name}",
        title,
        "training step",
        unit,
        groups,
        [[_values_by(of_run, "step", name) for of_run in runs] for runs in rows],
        "no run has this evaluation; `unskip eval RUN` evaluates the last checkpoint",
        intervals=[[_intervals_by(of_run, "step", name) for of_run in runs] for runs in rows],
    )
    if chart.lines and all(len(line.x) == 1 for line in chart.lines):
        return replace(chart, lines=(), missing="evaluated once, at the end; see the table of results")
    return _with_samples(chart, groups, rows)


def over_depth(groups: Sequence[Group], name: str) -> Chart:
    """A metric that `unskip eval` wrote for every block."""
    title, unit = title_and_unit(name)
    rows = [[_block_rows(run, name) for run in group.runs] for group in groups]
    values = [[_values_by(of_run, "block", name) for of_run in runs] for runs in rows]
    missing = "no run has this evaluation by block; `unskip eval RUN` adds it"
    absent = "Not evaluated by block"
    intervals = [[_intervals_by(of_run, "block", name) for of_run in runs] for runs in rows]
    chart = _chart(f"depth-{name}", f"{title}, by depth", "block", unit, groups, values, missing, absent, intervals)
    return _with_samples(chart, groups, rows)


_MEASURED = {
    "echo": ("Reconstruction of the input (echo), by depth", "R² of a linear reconstruction (fraction)"),
    "high_frequency": ("High-frequency energy of the patch tokens, by depth", "fraction of the energy"),
    "token_rank": ("Effective rank of the tokens, by depth", "effective rank (directions)"),
    "norm": ("Norm of the tokens, by depth", "mean norm of a token"),
}


def measured(groups: Sequence[Group], name: str) -> Chart:
    """A metric that `unskip.measure` computed for every block of a run's last checkpoint."""
    title, unit = _MEASURED[choice("measured", "name", name, _MEASURED)]
    values = [[_of_measurement(run, "blocks", lambda row: row.get(name)) for run in group.runs] for group in groups]
    missing = _unmeasured(groups) or f"{name} could not be measured"
    chart = _chart(f"measured-{name}", title, "block", unit, groups, values, missing, "Not measured")
    gaps = []
    for group, runs in zip(groups, values, strict=True):
        blocks = [_of_measurement(run, "blocks", lambda row: row["index"]) for run in group.runs]
        without = sorted({x for run in blocks for x in run} - {x for run in runs for x, y in run.items() if y == y})
        if without and any(runs):
            gaps.append(f"{group.label} at block {words([f'{x:g}' for x in without])}")
    identical = " where all tokens are identical"
    why = {"token_rank": identical, "high_frequency": f"{identical} or do not form a square grid"}.get(name, "")
    note = f"No value{why}: {'; '.join(gaps)}." if gaps else ""
    return replace(chart, note=" ".join(filter(None, [chart.note, note])))


def alphas(groups: Sequence[Group]) -> Chart:
    """The weight of each shortcut in the last checkpoint. A run that was never rewired has alpha = 1."""
    values = []
    for group in groups:
        per_run: list[dict[float, float]] = []
        for run in group.runs:
            measured_alphas = _of_measurement(run, "sites", lambda row: row.get("alpha"))
            per_run.append({float(weights.site): weights.alpha for weights in run.weights} or measured_alphas)
        values.append(per_run)
    missing = "no run has a checkpoint that records its shortcuts"
    return _chart("alphas", "Shortcut weight alpha, by site", "site", "alpha", groups, values, missing)


def decay(groups: Sequence[Group]) -> Chart:
    """The product of all alphas over training steps; runs without a rule have no line."""
    title, unit, values = "Effective decay in training", "product of all alphas", _logged(groups, "effective_decay")
    missing = "no run has logged an effective decay, because none has a rule"
    return _chart("decay", title, "training step", unit, groups, values, missing, "Without a logged rule")


_SPECTRA = {
    "sublayer": "from a sublayer's input to its output with the skip",
    "branch": "of a branch, from its normalised input",
}


def spectra(groups: Sequence[Group], part: str = "sublayer", quantile: str = "0.5") -> Chart:
    """A quantile of the singular values of each site's Jacobian, on one sample."""
    quantile_name = {"0.1": "10% quantile", "0.5": "Median", "0.9": "90% quantile"}.get(quantile, quantile)
    name, title = f"spectrum-{part}-{quantile.replace('.', '')}", f"{quantile_name} of the singular values"
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

    values = [[_of_measurement(run, "sites", of_site) for run in group.runs] for group in groups]
    missing = _unmeasured(groups) or "not measured; use --jacobians"
    return _chart(name, f"{title} {where}", "site", unit, groups, values, missing)


def mean_and_std(values: Iterable[float]) -> tuple[float, float | None, int]:
    """Mean, standard deviation (None for one value) and count of the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.nan, None, 0
    scale = max(map(abs, finite)) or 1.0  # avoids overflow of squares
    scaled = [value / scale for value in finite]
    std = statistics.stdev(scaled) * scale if len(scaled) > 1 else None
    return statistics.fmean(scaled) * scale, std, len(scaled)


def _logged(groups: Sequence[Group], name: str) -> list[list[dict[float, float]]]:
    return [[{row["step"]: row[name] for row in run.metrics if name in row} for run in g.runs] for g in groups]


def _training_rows(run: Run, name: str) -> Rows:
    return _of_one_n([row for row in run.evals if row.get("block") is None and name in row], "step")


def _block_rows(run: Run, name: str) -> Rows:
    """The rows by block of the newest step with this metric."""
    rows = [row for row in run.evals if row.get("block") is not None and name in row]
    newest = max((row["step"] for row in rows), default=0)
    return _of_one_n([row for row in rows if row["step"] == newest], "block")


def _of_one_n(rows: Rows, axis: str) -> Rows:
    """The rows of one number of test samples: the number with the most points, or the newest of such."""
    places: dict[float | None, set[Any]] = {}
    for row in reversed(rows):
        places.setdefault(number(row.get("n")), set()).add(row[axis])
    n = max(places, key=lambda count: len(places[count]), default=None)
    return [row for row in rows if number(row.get("n")) == n]


def _with_samples(chart: Chart, groups: Sequence[Group], rows: Sequence[Sequence[Rows]]) -> Chart:
    """A chart with a note if its groups were evaluated on different numbers of test samples."""
    of_group = [{number(row.get("n")) for run in runs for row in run} - {None} for runs in rows]
    if len(set().union(*of_group)) < 2:
        return chart
    counts = [
        f"{group.label} {words([f'{n:g}' for n in sorted(filter(None, each))])}"
        for group, each in zip(groups, of_group, strict=True)
        if each
    ]
    return replace(chart, note=f"{chart.note} Test samples: {'; '.join(counts)}.".strip())


def _values_by(rows: Rows, axis: str, name: str) -> dict[float, float]:
    """The values of a metric by step or block."""
    return {float(row[axis]): value for row in rows if (value := number(row[name])) is not None}


def _intervals_by(rows: Iterable[Mapping[str, Any]], axis: str, name: str) -> dict[float, Interval]:
    """The intervals of a metric by step or block, for rows that have one."""
    return {float(row[axis]): ends for row in rows if (ends := interval_of(row, name)) is not None}


def _of_measurement(run: Run, part: str, value: Callable[[Mapping[str, Any]], object]) -> dict[float, float]:
    measurement = run.look.measurement if run.look is not None else None
    if measurement is None:
        return {}
    values = {float(row["index"]): number(value(row)) for row in measurement[part]}
    return {index: x for index, x in values.items() if x is not None}


def _unmeasured(groups: Sequence[Group]) -> str:
    if any(run.look is not None and run.look.measurement is not None for group in groups for run in group.runs):
        return ""
    return "no checkpoint was measured"


def _chart(
    name: str,
    title: str,
    x_label: str,
    y_label: str,
    groups: Sequence[Group],
    values: Sequence[Sequence[Mapping[float, float]]],
    missing: str,
    absent: str = "No data",
    intervals: Sequence[Sequence[Mapping[float, Interval]]] = (),
) -> Chart:
    most = max(40, min(POINTS, 20 * POINTS // max(1, len(groups))))  # points of a line
    lines, notes, thinned, beyond = list[Line](), list[str](), False, False
    for index, (group, runs) in enumerate(zip(groups, values, strict=True)):
        points, left_out = _points(runs, intervals[index][0] if intervals and len(runs) == 1 else {})
        beyond |= left_out
        if points:
            stride = math.ceil(len(points) / most)
            thinned |= stride > 1
            kept = points[::stride] + ([points[-1]] if (len(points) - 1) % stride else [])
            lines.append(Line(group.label, group.place, *zip(*kept, strict=True)))
    if not lines:
        return Chart(name, title, x_label, y_label, missing=missing)
    if thinned:
        notes.append(f"Long curves are thinned to {most} points.")
    if beyond:
        notes.append(f"Values above {BEYOND:.0e} are not drawn.")
    if same := [words([line.label for line in overlapping]) for overlapping in _equal(lines)]:
        notes.append(f"Equal, drawn on one line: {'; '.join(same)}.")
    drawn = {line.group for line in lines}
    if without := [group.label for group in groups if group.place not in drawn]:
        notes.append(f"{absent}: {words(without)}.")
    return Chart(name, title, x_label, y_label, tuple(lines), _is_wide(lines, y_label), " ".join(notes))


def _points(runs: Sequence[Mapping[float, float]], of_one_run: Mapping[float, Interval]) -> tuple[list[Any], bool]:
    """The points of a group, as in `Line` (x, y, std, count, interval), and whether some are too large to draw."""
    points, beyond = [], False
    for x in sorted({x for run in runs for x in run}):
        finite = [run[x] for run in runs if math.isfinite(run.get(x, math.nan))]
        mean, std, count = mean_and_std(finite)
        beyond |= abs(mean) >= BEYOND
        if count and abs(mean) < BEYOND:
            points.append((x, mean, std, count, of_mean(finite) or of_one_run.get(x)))
    return points, beyond


def _is_wide(lines: Sequence[Line], y_label: str) -> bool:
    """Whether the axis is logarithmic: not for fractions, because it would exaggerate those near zero."""
    shown = [y for line in lines for y in line.y]
    return "fraction" not in y_label and min(shown) > 0 and max(shown) > _WIDE * min(shown)


def _equal(lines: Sequence[Line]) -> list[list[Line]]:
    """Groups of overlapping lines, which agree wherever both have a point."""
    clusters: list[list[Line]] = []
    for line in lines:
        points = dict(zip(line.x, line.y, strict=True))
        for cluster in clusters:
            first = dict(zip(cluster[0].x, cluster[0].y, strict=True))
            shared = points.keys() & first.keys()
            if shared and all(points[x] == first[x] for x in shared):
                cluster.append(line)
                break
        else:
            clusters.append([line])
    return [cluster for cluster in clusters if len(cluster) > 1]
