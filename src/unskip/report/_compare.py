"""What runs have in common, what sets them apart, and what came of them: the words and tables of a page."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from unskip.report import _charts
from unskip.report._html import short, words
from unskip.report._read import Group, Run, by_recipe, clean

_AT_FIRST = ("recipe", "preset", "data", "model", "shortcut", "where", "init", "optimizer", "lr", "steps", "epochs")
_OUTSIDE = ("seed",)
MISSING = "-"


def differences(groups: Sequence[Group]) -> tuple[list[str], list[str]]:
    """The fields of configs that differ between groups, and those that do not; what matters most first."""
    names: dict[str, None] = dict.fromkeys(_AT_FIRST)
    for group in groups:
        names |= dict.fromkeys(map(str, group.config))
    known = [name for name in names if name not in _OUTSIDE and any(name in group.config for group in groups)]
    differ = [name for name in known if len({shown(group.config, name) for group in groups}) > 1]
    return differ, [name for name in known if name not in differ]


def shown(config: dict[str, Any], name: str) -> str:
    """A value of a config as text."""
    if name not in config:
        return MISSING
    value = config[name]
    return clean(value if isinstance(value, str) else json.dumps(value, default=str), 120) or '""'


def sentence(groups: Sequence[Group]) -> str:
    """What was compared."""
    runs = sum(len(group.runs) for group in groups)
    kinds = [_kind(recipe, members) for recipe, members in by_recipe(groups).items()]
    if runs == 1:
        return f"One run, {groups[0].runs[0].state}: {kinds[0]}."
    count = f"{runs} runs" if runs == len(groups) else f"{runs} runs in {len(groups)} groups of equal config"
    return f"{count}: {'; '.join(kinds)}."


def _kind(recipe: str, groups: Sequence[Group]) -> str:
    """The groups of one recipe in words."""
    sets = [*dict.fromkeys(shown(group.config, "data") for group in groups if "data" in group.config)]
    what = recipe + (f" on {words(sets)}" if sets else "")
    if len(groups) == 1:
        seeds = [str(run.seed) for run in groups[0].runs]
        return what + (f" with the seeds {words(seeds)}" if len(seeds) > 1 else "")
    differ = [name for name in differences(groups)[0] if name != "data"]
    parts = [f"{name} ({words([*dict.fromkeys(shown(g.config, name) for g in groups)], 4)})" for name in differ[:4]]
    rest = len(differ) - len(parts)
    more = f" and {rest} more field{'s' * (rest > 1)}" if rest else ""
    return f"{what}, which differ in {words(parts)}{more}" if parts else f"{what}, which do not differ by their configs"


def results(groups: Sequence[Group]) -> tuple[list[str], list[list[object]]]:
    """A row a group: where it stands, its newest numbers over seeds, time and memory."""
    wanted = dict.fromkeys(_charts.evaluations(groups, False) + _charts.evaluations(groups, True))
    header = ["group", "runs", "state", "loss", *wanted, "time in steps (s)", "images a second", "peak memory (GiB)"]
    rows = []
    for group in groups:
        states = [*dict.fromkeys(run.state for run in group.runs)]
        found = [_charts.last_values(run) for run in group.runs]
        losses = [run.metrics[-1]["loss"] for run in group.runs if run.metrics and "loss" in run.metrics[-1]]
        row: list[object] = [group.label, len(group.runs), words(states, 3), over_seeds(losses)]
        row += [over_seeds([values[name] for values in found if name in values]) for name in wanted]
        row += [over_seeds([*filter(None, (each(run) for run in group.runs))]) for each in (_seconds, _rate, _memory)]
        rows.append(row)
    return header, rows


def over_seeds(values: Sequence[float]) -> object:
    """ "mean ± spread", sorted by the mean; None where there is nothing."""
    if not values:
        return None
    mean, spread, count = _charts.mean_and_spread(values)
    if not count:
        return "not finite"
    text = short(mean)
    if spread is not None:
        text += f" ± {spread:.0f}" if spread >= 100 else f" ± {spread:.2g}"
    return (mean, text + (f" ({len(values) - count} not finite)" if count < len(values) else ""))


def warned(groups: Sequence[Group]) -> list[list[object]]:
    """A row for each warning of a run: its name, how often, when, and its text."""
    rows: list[list[object]] = []
    for group in groups:
        for run in group.runs:
            kinds: dict[str, list[dict[str, Any]]] = {}
            for row in run.warnings:
                kinds.setdefault(clean(row.get("warning", "unnamed"), 60), []).append(row)
            for name, found in kinds.items():
                text = clean(found[-1].get("text", ""), 300)
                rows.append([title(group, run), name, len(found), found[0]["step"], found[-1]["step"], text])
    return rows


def title(group: Group, run: Run) -> str:
    """A run within its group."""
    return group.label if len(group.runs) == 1 else f"{group.label}, seed {clean(run.seed, 20)}"


def _seconds(run: Run) -> float:
    return sum(row.get("seconds", 0.0) for row in run.metrics)


def _rate(run: Run) -> float | None:
    rates = [row["samples_per_second"] for row in run.metrics if "samples_per_second" in row]
    return statistics.median(rates) if rates else None


def _memory(run: Run) -> float | None:
    return max((row["peak_memory_gib"] for row in run.metrics if "peak_memory_gib" in row), default=None)
