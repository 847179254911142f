"""Run folders as plain data, whatever state they are in.

A line that is cut off, a number that is none, a config that cannot be read, a run that goes on meanwhile: each leaves a
note, and the rest is shown. Only a folder that holds no run at all is an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unskip.errors import BadInput
from unskip.report._rows import evaluations, numbers, read_rows, read_text
from unskip.report._text import clean
from unskip.training import find_runs

if TYPE_CHECKING:
    from unskip.report._look import Look

FILES = ("metrics.jsonl", "evals.jsonl", "warnings.jsonl")
_SEED = re.compile(r"[-_ .]?seed[-_=]?\d+$", re.IGNORECASE)


class Weights(NamedTuple):
    """What one site of a run's model has: x <- alpha x + beta f(x)."""

    site: int
    path: str
    alpha: float
    beta: float


@dataclass(frozen=True)
class Run:
    """What the folder of one run holds. Metrics and evaluations are in the order of their steps."""

    path: Path
    name: str
    config: dict[str, Any]
    about: dict[str, Any]  # device, versions, commit
    metrics: tuple[dict[str, float], ...]
    evals: tuple[dict[str, Any], ...]
    warnings: tuple[dict[str, Any], ...]
    weights: tuple[Weights, ...]  # of the newest checkpoint; empty where nothing was rewired
    checkpoint: int | None
    steps: int | None  # planned
    notes: tuple[str, ...]
    look: Look | None = None

    @property
    def recipe(self) -> str:
        """The name of its recipe."""
        return clean(self.config.get("recipe", "unknown"), 40)

    @property
    def seed(self) -> object:
        """As its config has it."""
        return self.config.get("seed")

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def state(self) -> str:
        """Where the run stands, in a few words."""
        if any(row.get("warning") == "non-finite-loss" for row in self.warnings):
            return f"stopped at step {self.step}: the loss was not finite"
        if not self.metrics:
            return "no step logged yet"
        if self.steps is None:
            return f"at step {self.step}"
        return f"finished, {self.steps} steps" if self.step >= self.steps else f"at step {self.step} of {self.steps}"


@dataclass(frozen=True)
class Group:
    """Runs that differ by their seed alone."""

    label: str
    runs: tuple[Run, ...]
    place: int = 0  # among the groups of a page: it decides the colour

    @property
    def recipe(self) -> str:
        """The recipe of all its runs."""
        return self.runs[0].recipe

    @property
    def config(self) -> dict[str, Any]:
        """The config of its first run, which the others share but for the seed."""
        return self.runs[0].config

    @property
    def repeats(self) -> bool:
        """Whether a seed stands for several of its runs, so that they do not differ by it."""
        return len({json.dumps(run.seed, default=str) for run in self.runs}) < len(self.runs)


def read_groups(paths: Iterable[str | Path]) -> list[Group]:
    """The runs at some paths, grouped by everything but their seed. A folder of runs stands for the runs in it."""
    folders = [folder for path in paths for folder in find_runs(path)]
    if not folders:
        raise BadInput("no run to report on: name the folders of one or more runs")
    unique: dict[Path, Path] = {}
    for folder in folders:
        unique.setdefault(folder.resolve(), folder)
    runs = [read_run(folder) for folder in unique.values()]
    together: dict[str, list[Run]] = {}
    for run in runs:
        rest = {name: value for name, value in run.config.items() if name != "seed"}
        # A run without a config is like no other.
        key = json.dumps(rest, sort_keys=True, default=str) if rest else str(run.path)
        together.setdefault(key, []).append(run)
    groups = [Group(_label(members), tuple(members)) for members in together.values()]
    return _unique(groups)


def by_recipe(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups of each recipe: what different kinds of runs log is not the same thing."""
    recipes: dict[str, list[Group]] = {}
    for group in groups:
        recipes.setdefault(group.recipe, []).append(group)
    return recipes


def read_run(path: str | Path) -> Run:
    """One run folder."""
    folder = Path(path)
    notes: list[str] = []
    about = _json(folder / "config.json", notes)
    config = about.pop("config", {})
    if not isinstance(config, dict):
        notes.append("config.json: its config is no mapping")
        config = {}
    metrics = [numbers(row) for row in read_rows(folder / FILES[0], notes)]
    own = "val" if config.get("validate") is True else "test"
    evals = [each for row in read_rows(folder / FILES[1], notes) for each in evaluations(row, own)]
    alerts = read_rows(folder / FILES[2], notes)
    last_of_step = {row["step"]: row for row in metrics}  # a resumed run may have logged a step twice
    broken = [row["step"] for row in last_of_step.values() if not math.isfinite(row.get("loss", 0.0))]
    if broken:
        more = f", and in {len(broken)} logged steps in all" if len(broken) > 1 else ""
        notes.append(f"the loss is not finite at step {min(broken):.0f}{more}")
    checkpoint, weights = _checkpoint(folder, notes)
    planned = about.pop("steps", None) or config.get("steps")
    return Run(
        path=folder,
        name=clean(folder.resolve().name) or "run",
        config=config,
        about=about,
        metrics=tuple(last_of_step[step] for step in sorted(last_of_step)),
        evals=tuple(sorted(evals, key=lambda row: row["step"])),
        warnings=tuple(alerts),
        weights=weights,
        checkpoint=checkpoint,
        steps=planned if isinstance(planned, int) and planned > 0 else None,
        notes=tuple(notes),
    )


def _json(file: Path, notes: list[str]) -> dict[str, Any]:
    text = read_text(file, notes)
    if text is None:
        notes.append(f"{file.name}: not there")
        return {}
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        notes.append(f"{file.name}: damaged, so its config is not known")
        return {}
    return data if isinstance(data, dict) else {}


def _checkpoint(folder: Path, notes: list[str]) -> tuple[int | None, tuple[Weights, ...]]:
    """The step of the newest checkpoint, and the weights of its sites, without building a model."""
    steps = [each.name.partition("-")[2] for each in (folder / "checkpoints").glob("step-*")]
    known = sorted(int(step) for step in steps if step.isdigit() and len(step) < 16)
    if not known:
        return None, ()
    place = folder / "checkpoints" / f"step-{known[-1]}"
    for file in (place / "encoder" / "unskip.json", place / "unskip.json"):
        if not file.is_file():
            continue
        try:
            wiring = json.loads(file.read_text(encoding="utf-8")).get("wiring")
            if wiring is None:  # never rewired
                return known[-1], ()
            sites = zip(wiring["sites"], wiring["alphas"], wiring["betas"], strict=True)
            # A long skip adds what an earlier block saw: it is no shortcut of the stream.
            governed = [(site, alpha, beta) for site, alpha, beta in sites if not site.get("long")]
            return known[-1], tuple(
                Weights(int(s["index"]), str(s["path"]), float(a), float(b)) for s, a, b in governed
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            notes.append(f"{file.name} of step {known[-1]}: damaged, so the weights of its sites are not known")
    return known[-1], ()


def _label(runs: Sequence[Run]) -> str:
    """The name of the only run; of several the folder they share, or what their names share."""
    if len(runs) == 1:
        run = runs[0]
        return clean(run.path.resolve().parent.name) if _SEED.fullmatch(run.name) else run.name
    parents = {run.path.resolve().parent for run in runs}
    if len(parents) == 1 and all(_SEED.fullmatch(run.name) for run in runs):
        return clean(parents.pop().name) or "runs"
    return _SEED.sub("", runs[0].name) or runs[0].name


def _unique(groups: list[Group]) -> list[Group]:
    counts: dict[str, int] = {}
    unique = []
    for place, group in enumerate(groups):
        counts[group.label] = counts.get(group.label, 0) + 1
        again = counts[group.label]
        label = group.label if again == 1 else f"{group.label} ({again})"
        unique.append(replace(group, label=label, place=place))
    return unique
