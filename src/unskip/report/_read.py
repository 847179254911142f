"""Run folders as plain data, complete or not.

Truncated lines, invalid numbers, unreadable configs and runs in progress become notes, and the rest is read. Only a
folder without any run is an error.
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
from unskip.report._rows import LABELS, evaluations, numbers, read_rows, read_text
from unskip.report._text import clean
from unskip.training import find_runs

if TYPE_CHECKING:
    from unskip.report._look import Look

FILES = ("metrics.jsonl", "evals.jsonl", "warnings.jsonl")
_PROTOCOL = re.compile(r".+-v\d+")
_SEED = re.compile(r"[-_ .]?seed[-_=]?\d+$", re.IGNORECASE)


class Weights(NamedTuple):
    """The weights of one site: x <- alpha x + beta f(x)."""

    site: int
    path: str
    alpha: float
    beta: float


@dataclass(frozen=True)
class Run:
    """The content of a run folder. Metrics and evaluations are sorted by step."""

    path: Path
    name: str
    config: dict[str, Any]
    about: dict[str, Any]  # device, versions, commit
    metrics: tuple[dict[str, float], ...]
    evals: tuple[dict[str, Any], ...]
    warnings: tuple[dict[str, Any], ...]
    weights: tuple[Weights, ...]  # of the newest checkpoint; empty if the model was not rewired
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
        """The seed in its config."""
        return self.config.get("seed")

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def state(self) -> str:
        """The progress of the run, as text."""
        if any(row.get("warning") == "non-finite-loss" for row in self.warnings):
            return f"stopped at step {self.step}: the loss was not finite"
        if not self.metrics:
            return "no step logged yet"
        if self.steps is None:
            return f"at step {self.step}"
        return f"finished, {self.steps} steps" if self.step >= self.steps else f"at step {self.step} of {self.steps}"


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    label: str
    runs: tuple[Run, ...]
    place: int = 0  # index among the groups of a page, which sets its colour

    @property
    def recipe(self) -> str:
        """The recipe of all its runs."""
        return self.runs[0].recipe

    @property
    def config(self) -> dict[str, Any]:
        """The config of its first run; the others differ only in the seed."""
        return self.runs[0].config

    @property
    def is_text(self) -> bool:
        """Whether its runs are language models."""
        return self.recipe == "lm"

    @property
    def repeats(self) -> bool:
        """Whether several of its runs have the same seed."""
        return len({json.dumps(run.seed, default=str) for run in self.runs}) < len(self.runs)


def read_groups(paths: Iterable[str | Path]) -> list[Group]:
    """Reads runs and groups those that differ only in their seed. A folder of runs counts as the runs in it."""
    folders = [folder for path in paths for folder in find_runs(path)]
    if not folders:
        raise BadInput("no run to report on: name the folders of one or more runs")
    unique: dict[Path, Path] = {}
    for folder in folders:
        unique.setdefault(folder.resolve(), folder)
    runs = _by_protocol([read_run(folder) for folder in unique.values()])
    by_config: dict[str, list[Run]] = {}
    for run in runs:
        rest = {name: value for name, value in run.config.items() if name != "seed"}
        # A run without a config is a group of its own.
        key = json.dumps(rest, sort_keys=True, default=str) if rest else str(run.path)
        by_config.setdefault(key, []).append(run)
    groups = [Group(_label(members), tuple(members)) for members in by_config.values()]
    return _unique(groups)


def _by_protocol(runs: Sequence[Run]) -> list[Run]:
    """Adds the protocol to the metrics that several of a recipe's share, as both segment protocols have mean_iou."""
    protocols: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        for row in run.evals:
            if _PROTOCOL.fullmatch(str(row.get("evaluation"))):  # training also evaluates under other names
                for name in row.keys() - set(LABELS):
                    protocols.setdefault((str(run.config.get("recipe")), name), set()).add(row["evaluation"])

    def named(run: Run, row: dict[str, Any]) -> dict[str, Any]:
        of_name = {name: protocols.get((str(run.config.get("recipe")), name), set()) for name in row}
        new = {
            name: f"{name} ({row['evaluation']})" if len(known) > 1 and row.get("evaluation") in known else name
            for name, known in of_name.items()
        }
        intervals = {new.get(name, name): ends for name, ends in row["intervals"].items()}
        return {new[name]: value for name, value in row.items()} | {"intervals": intervals}

    return [replace(run, evals=tuple(named(run, row) for row in run.evals)) for run in runs]


def by_recipe(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups of each recipe: metrics of different recipes are not comparable."""
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
        notes.append("config.json: the config is not a mapping")
        config = {}
    metrics = [numbers(row) for row in read_rows(folder / FILES[0], notes)]
    split = "val" if config.get("validate") is True else "test"
    evals = [e for row in read_rows(folder / FILES[1], notes) for e in evaluations(row, split)]
    alerts = read_rows(folder / FILES[2], notes)
    last_of_step = {row["step"]: row for row in metrics}  # a resumed run may log a step twice
    nonfinite = [row["step"] for row in last_of_step.values() if not math.isfinite(row.get("loss", 0.0))]
    if nonfinite:
        more = f", {len(nonfinite)} logged steps in total" if len(nonfinite) > 1 else ""
        notes.append(f"the loss is not finite at step {min(nonfinite):.0f}{more}")
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
        notes.append(f"{file.name}: missing")
        return {}
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        notes.append(f"{file.name}: damaged, so the config is unknown")
        return {}
    return data if isinstance(data, dict) else {}


def _checkpoint(folder: Path, notes: list[str]) -> tuple[int | None, tuple[Weights, ...]]:
    """The step of the newest checkpoint, and the weights of its sites, without building a model."""
    steps = [path.name.partition("-")[2] for path in (folder / "checkpoints").glob("step-*")]
    saved = sorted(int(step) for step in steps if step.isdigit() and len(step) < 16)
    if not saved:
        return None, ()
    checkpoint = folder / "checkpoints" / f"step-{saved[-1]}"
    for file in (checkpoint / "encoder" / "unskip.json", checkpoint / "unskip.json"):
        if not file.is_file():
            continue
        try:
            wiring = json.loads(file.read_text(encoding="utf-8")).get("wiring")
            if wiring is None:  # never rewired
                return saved[-1], ()
            sites = zip(wiring["sites"], wiring["alphas"], wiring["betas"], strict=True)
            # A long skip adds the output of an earlier block; it is not a shortcut of the stream.
            shortcuts = [(site, alpha, beta) for site, alpha, beta in sites if not site.get("long")]
            return saved[-1], tuple(
                Weights(int(s["index"]), str(s["path"]), float(a), float(b)) for s, a, b in shortcuts
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            notes.append(f"{file.name} of step {saved[-1]}: damaged, so the weights of its sites are unknown")
    return saved[-1], ()


def _label(runs: Sequence[Run]) -> str:
    """The name of a single run; of several their shared folder, or the shared part of their names."""
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
