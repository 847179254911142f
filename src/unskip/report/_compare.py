"""The text and tables of a page: fields that runs share, fields that differ, and results."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from unskip.report._charts import mean_and_std
from unskip.report._intervals import Interval, difference, of_mean
from unskip.report._names import by_samples, evaluations, title_and_unit
from unskip.report._read import Group, Run, by_recipe
from unskip.report._rows import ON_CHANGED_DATA, interval_of, number
from unskip.report._text import clean, short, words

_FIRST = ("recipe", "preset", "data", "model", "shortcut", "where", "init", "optimizer", "lr", "steps", "epochs")
MISSING = "-"


def differences(groups: Sequence[Group]) -> tuple[list[str], list[str]]:
    """The fields of configs that differ between groups, and those that do not; the most important first."""
    names: dict[str, None] = dict.fromkeys(_FIRST)
    for group in groups:
        names |= dict.fromkeys(map(str, group.config))
    known = [name for name in names if name != "seed" and any(name in group.config for group in groups)]
    differ = [name for name in known if len({_as_json(group.config, name) for group in groups}) > 1]
    return differ, [name for name in known if name not in differ]


def shown(config: dict[str, Any], name: str) -> str:
    """A value of a config as text."""
    if name not in config:
        return MISSING
    value = config[name]
    return clean(value if isinstance(value, str) else json.dumps(value, default=str), 120) or '""'


def _as_json(config: dict[str, Any], name: str) -> str | None:
    return json.dumps(config[name], sort_keys=True, default=str) if name in config else None


def sentence(groups: Sequence[Group]) -> str:
    """A sentence on what the page compares."""
    runs = sum(len(group.runs) for group in groups)
    recipes = [_describe(recipe, members) for recipe, members in by_recipe(groups).items()]
    if runs == 1:
        return f"One run, {groups[0].runs[0].state}: {recipes[0]}."
    if len(groups) == 1:
        return f"{runs} runs of one config: {recipes[0]}."
    count = f"{runs} runs" if runs == len(groups) else f"{runs} runs in {len(groups)} groups of equal config"
    return f"{count}: {'; '.join(recipes)}."


def _describe(recipe: str, groups: Sequence[Group]) -> str:
    """The groups of one recipe as text."""
    data = [*dict.fromkeys(shown(group.config, "data") for group in groups if "data" in group.config)]
    name = recipe + (f" on {words(data)}" if data else "")
    if len(groups) == 1:
        runs = groups[0].runs
        seeds = [*dict.fromkeys(clean(run.seed, 20) for run in runs)]
        return name + (f" with the seed{'s' * (len(seeds) > 1)} {words(seeds)}" if len(runs) > 1 else "")
    differ = [name for name in differences(groups)[0] if name != "data" or len(data) < 2]
    if not differ and len(data) > 1:
        return f"{name}, which differ only in their data"
    parts = [f"{name} ({words([*dict.fromkeys(shown(g.config, name) for g in groups)], 4)})" for name in differ[:4]]
    rest = len(differ) - len(parts)
    more = f" and {rest} more field{'s' * (rest > 1)}" if rest else ""
    return f"{name}, which differ in {words(parts)}{more}" if parts else f"{name}, with equal configs"


def results(groups: Sequence[Group]) -> tuple[list[str], list[list[object]]]:
    """A row per group: its state, its newest metrics over seeds, time and memory."""
    columns = _columns(groups)
    names = [_head("loss"), *(_head(name) + _samples(n) for name, n, _ in columns)]
    unit = "sequences" if groups[0].is_text else "images"
    header = ["group", "runs", "state", *names, "training time (s)", f"{unit} a second (median)", "peak memory (GiB)"]
    table = []
    for index, group in enumerate(groups):
        losses = [run.metrics[-1]["loss"] for run in group.runs if run.metrics and "loss" in run.metrics[-1]]
        cells: list[object] = [group, len(group.runs), _states(group), over_seeds(losses, len(group.runs))]
        for name, _, newest in columns:
            present = newest[index]
            interval = interval_of(present[0], name) if len(present) == 1 else None
            cells.append(over_seeds([row[name] for row in present], len(group.runs), interval))
        for cost in (_seconds, _rate, _memory):
            cells.append(over_seeds([*filter(None, map(cost, group.runs))], len(group.runs)))
        table.append(cells)
    return header, table


def _head(name: str) -> str:
    """A metric's name and unit, as a column header."""
    title, unit = title_and_unit(name)
    suffix = unit[unit.rindex("(") :] if unit.endswith(")") and unit != title else ""  # title, where none is known
    return f"{title} {suffix}".strip()


def _columns(groups: Sequence[Group]) -> list[tuple[str, float | None, list[list[dict[str, Any]]]]]:
    """Every metric of evaluations, its n, and the newest rows of every group; a column for each n."""
    names = dict.fromkeys(evaluations(groups, False) + evaluations(groups, True))
    return [(name, n, rows) for name in names for n, rows in by_samples(groups, name).items()]


def _samples(n: float | None) -> str:
    """The number of test samples behind a column."""
    return "" if n is None else f", n = {n:g}"


def _states(group: Group) -> str:
    """The states of a group's runs, with counts if they differ."""
    counts: dict[str, int] = {}
    for run in group.runs:
        counts[run.state] = counts.get(run.state, 0) + 1
    if len(counts) == 1:
        return next(iter(counts))
    shown = [f"{count} {state}" for state, count in [*counts.items()][:3]]
    return "; ".join([*shown, *([f"{len(counts) - 3} more states"] if len(counts) > 3 else [])])


def over_seeds(values: Sequence[float], runs: int = 0, interval: Interval | None = None) -> object:
    """ "mean ± std [low, high]", sorted by the mean; None without values.

    The brackets hold the 95% interval of the mean, or `interval` for one value. A note says if values are fewer than
    `runs`.
    """
    if not values:
        return None
    mean, std, count = mean_and_std(values)
    if not count:
        return "not finite"
    text = short(mean) if std is None else _with_std(mean, std)
    ends = interval or of_mean([value for value in values if math.isfinite(value)])
    text += f" {bracketed(ends)}" if ends else ""
    notes = [f"{len(values) - count} not finite"] if count < len(values) else []
    notes += [f"{len(values)} of {runs} runs"] if len(values) < runs else []
    return (mean, text + (f" ({', '.join(notes)})" if notes else ""))


def deltas(groups: Sequence[Group]) -> tuple[list[str], list[list[object]]]:
    """A row per metric and group after the first: the difference to the first, with a 95% interval."""
    first, *others = groups
    header = ["group", "metric", first.label, "this group", "difference", "95% interval", "method"]
    rows: list[list[object]] = []
    for name, n, (of_first, *of_others) in _columns(groups):
        if ON_CHANGED_DATA in name:  # the data of two runs may have changed differently
            continue
        before, wilson = _values(of_first, name)
        for group, newest in zip(others, of_others, strict=True):
            after, other_wilson = _values(newest, name)
            delta = difference(before, after, (wilson, other_wilson))
            if delta is not None:
                cells = [over_seeds(before, 0, wilson), over_seeds(after, 0, other_wilson)]
                ends = bracketed(delta.interval) if delta.interval else None
                rows.append(
                    [
                        group,
                        _head(name) + _samples(n),
                        *cells,
                        (delta.value, f"{delta.value:+{_digits(delta.interval) if delta.interval else '.4g'}}"),
                        ends,
                        delta.method,
                    ]
                )
    return header, rows


def _values(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[float], Interval | None]:
    """The finite values of a metric in the rows of a group, and the interval if there is one value."""
    values = [value for row in rows if (value := number(row[name])) is not None and math.isfinite(value)]
    return values, interval_of(rows[0], name) if len(values) == len(rows) == 1 else None


def changed(first: Group, other: Group) -> str:
    """The config fields in which a group differs from the first, as text."""
    fields = differences([first, other])[0]
    return "; ".join(f"{name}: {shown(first.config, name)} → {shown(other.config, name)}" for name in fields[:12])


def bracketed(ends: Interval) -> str:
    """An interval, rounded according to its width."""
    form = _digits(ends)
    return f"[{ends[0]:{form}}, {ends[1]:{form}}]"


def _digits(ends: Interval) -> str:
    """The number format for an interval and the values in it."""
    width = ends[1] - ends[0]
    if not width or max(map(abs, ends)) < 1e-4:
        return ".4g"
    places = min(6, max(0, 1 - math.floor(math.log10(width)))) if 0 < width < 1e6 else 0
    places = max(3, places) if max(map(abs, ends)) < 10 else places
    return f".{places}f" if max(map(abs, ends)) < 1e6 else ".3g"


def _with_std(mean: float, std: float) -> str:
    """Both to the same decimal: two digits of the std, but at most four of the mean."""
    size, small = (math.floor(math.log10(abs(value))) if value else 0 for value in (mean, std))
    if not -4 < size < 6:
        return f"{short(mean)} ± {std:.2g}"
    places = max(0, min(1 - small, 3 - size)) if std else max(0, 3 - size)
    return f"{mean:.{places}f} ± {std:.{places}f}"


def warned(groups: Sequence[Group]) -> list[list[object]]:
    """A row per kind of warning of a run: name, count, first and last step, and text."""
    rows: list[list[object]] = []
    for group in groups:
        for run in group.runs:
            kinds: dict[str, list[dict[str, Any]]] = {}
            for row in run.warnings:
                kinds.setdefault(clean(row.get("warning", "unnamed"), 60), []).append(row)
            for name, alerts in kinds.items():
                text = clean(alerts[-1].get("text", ""), 300)
                rows.append([title(group, run), name, len(alerts), alerts[0]["step"], alerts[-1]["step"], text])
    return rows


def title(group: Group, run: Run) -> str:
    """The name of a run within its group."""
    if len(group.runs) == 1:
        return group.label
    return f"{group.label}, {run.name}" if group.repeats else f"{group.label}, seed {clean(run.seed, 20)}"


def _seconds(run: Run) -> float:
    return sum(row.get("seconds", 0.0) for row in run.metrics)


def _rate(run: Run) -> float | None:
    rates = [row["samples_per_second"] for row in run.metrics if "samples_per_second" in row]
    return statistics.median(rates) if rates else None


def _memory(run: Run) -> float | None:
    return max((row["peak_memory_gib"] for row in run.metrics if "peak_memory_gib" in row), default=None)
