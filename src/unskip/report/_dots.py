"""The newest value of a metric for every group: one point per run, the mean, and its 95% interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unskip.report._charts import BEYOND, mean_and_std
from unskip.report._intervals import Interval, of_mean
from unskip.report._names import by_samples, evaluations, title_and_unit
from unskip.report._read import Group, by_recipe
from unskip.report._rows import ON_CHANGED_DATA, interval_of, number

MOST = 3  # figures per recipe at the top of a page


@dataclass(frozen=True)
class Column:
    """One group: the values of its runs, their mean, and the interval of the mean, or of the single run."""

    label: str
    group: int  # index of the group, which sets its colour
    values: tuple[float, ...]
    mean: float
    interval: Interval | None


@dataclass(frozen=True)
class Dots:
    """One metric of several groups."""

    name: str
    title: str
    unit: str
    columns: tuple[Column, ...]

    def rows(self) -> tuple[list[str], list[list[object]]]:
        """The data as a table, a row per run."""
        header = ["group", self.unit, "mean of the group", "95% low", "95% high"]
        return header, [
            [column.label, value, column.mean, *(column.interval or (None, None))]
            for column in self.columns
            for value in column.values
        ]

    def alt(self) -> str:
        """Alternative text."""
        means = "; ".join(f"{column.label}: {column.mean:.3g}" for column in self.columns)
        return f"Points, one per run. {self.title}, mean of each group: {means}."


def summaries(groups: Sequence[Group], most: int) -> list[Dots]:
    """The first metrics that at least two of a recipe's first `most` groups have, fractions first."""
    summary: list[Dots] = []
    recipes = by_recipe(groups[:most])
    for recipe, members in recipes.items():
        names = evaluations(members, False) + evaluations(members, True)
        names.sort(key=lambda name: "fraction" not in title_and_unit(name)[1])  # stable
        figures = [of_groups(members, name) for name in dict.fromkeys(names) if ON_CHANGED_DATA not in name]
        if len(recipes) > 1:
            figures = [replace(d, name=f"{recipe}-{d.name}", title=f"{d.title} ({recipe})") for d in figures]
        summary += [dots for dots in figures if len(dots.columns) > 1][:MOST]
    return summary


def of_groups(groups: Sequence[Group], name: str) -> Dots:
    """A metric by group, without groups that lack it and values too large for an axis.

    Where groups were evaluated on different numbers of samples, n is that of most groups.
    """
    title, unit = title_and_unit(name)
    columns: list[Column] = []
    samples, newest = max(by_samples(groups, name).items(), key=lambda item: (sum(map(bool, item[1])), item[0] or 0.0))
    for group, rows in zip(groups, newest, strict=True):
        values = [value for row in rows if (value := number(row[name])) is not None and abs(value) < BEYOND]
        if values:
            ends = interval_of(rows[0], name) if len(rows) == 1 else _of_mean(values, "fraction" in unit)
            columns.append(Column(group.label, group.place, tuple(values), mean_and_std(values)[0], ends))
    return Dots(f"result-{name}", title if samples is None else f"{title}, n = {samples:g}", unit, tuple(columns))


def _of_mean(values: Sequence[float], fraction: bool) -> Interval | None:
    """The interval of a mean; None for two values, whose interval would be wider than the figure."""
    ends = of_mean(values) if len(values) > 2 else None
    return ends if ends is None or not fraction else (max(ends[0], 0.0), min(ends[1], 1.0))
