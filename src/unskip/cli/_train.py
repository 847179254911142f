"""`unskip train RECIPE`, `unskip resume RUN` and `unskip recipes`."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import unskip
from unskip._table import table
from unskip.cli._options import ChangedData, Quiet, Runs, Trust, option
from unskip.cli._say import finite

if TYPE_CHECKING:
    from unskip.recipes import Opener
    from unskip.training import Outcome

_STOPPED = 130  # the shell's exit code of an interrupted process
_USAGE = """usage: unskip train RECIPE [--preset NAME] [OPTIONS]
       unskip train --config runs/x/config.json [OPTIONS]

Train a model by a recipe, in a new folder.

  unskip recipes               lists the recipes and their presets
  unskip train RECIPE --help   lists the options of a recipe

example: unskip train mae --preset digits --shortcut decay:0.6 --out runs/decayed"""


def train_command(args: Sequence[str]) -> int:
    """Train a model by a recipe: unskip train RECIPE [--preset NAME] [OPTIONS]."""
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    from unskip.cli._config import read

    job = read(args)
    if job.seeds is None:
        # torchrun --max-restarts restarts workers with the same command.
        start = _start_or_resume if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) else unskip.train
        code = _print_outcome(start(job.config, job.out, job.quiet))
    else:
        begin = [
            partial(_start_or_resume, replace(job.config, seed=seed), job.out / f"seed-{seed}", job.quiet)
            for seed in job.seeds
        ]
        code = _run_all(job.out, begin)
    return code


def resume_command(
    run: Runs,
    quiet: Quiet = False,
    data: Annotated[str | None, option("New location of the run's data, if it was moved.", "DATA")] = None,
    changed_data: ChangedData = False,
    trust: Trust = False,
) -> int:
    """Continue a run from its last checkpoint, or each run of a --seeds folder."""
    runs = unskip.training.find_runs(run)
    options: dict[str, Any] = {"data": data, "changed_data": changed_data, "trust": trust}
    if runs == [Path(run)]:
        code = _print_outcome(unskip.resume(run, quiet, **options))
    else:
        code = _run_all(Path(run), [partial(unskip.resume, folder, quiet, **options) for folder in runs])
    return code


def recipes_command() -> int:
    """List the recipes and their presets, with costs and expected results."""
    rows = [
        [recipe.name, name, preset.cost, preset.expected]
        for recipe in unskip.recipes.RECIPES.values()
        for name, preset in recipe.presets.items()
    ]
    print(table(("recipe", "preset", "cost", "expected"), rows))
    return 0


def _start_or_resume(config: Any, out: Path, quiet: bool, opener: Opener | None = None) -> Outcome:
    """Starts a run, or resumes it if the folder holds a run of the same config."""
    if (out / "config.json").exists():
        existing = unskip.recipes.from_dict(unskip.training.RunFolder.open(out).config)
        if existing == unskip.recipes.absolute_paths(config):
            return unskip.resume(out, quiet, opener)
    return unskip.train(config, out, quiet, opener)


def _run_all(out: Path, runs: Sequence[Callable[[Opener], Outcome]]) -> int:
    """Runs one after another, with the data opened once, and writes a summary."""
    opener = unskip.recipes.cached_opener()
    outcomes: list[Outcome] = []
    for run in runs:
        outcomes.append(run(opener))
        if _print_outcome(outcomes[-1]):
            if unskip.training.is_main():
                print("the same command continues this run and the remaining ones", file=sys.stderr)
            return _STOPPED
    if unskip.training.is_main():
        _summary(out, outcomes)
    return 0


def _print_outcome(outcome: Outcome) -> int:
    """Prints how a run ended; returns the exit code."""
    if unskip.training.is_main():
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in outcome.evaluations.items())
        state = "done" if outcome.finished else "stopped"
        print(f"{outcome.folder}: {state} at step {outcome.step}  {numbers}".rstrip())
    return 0 if outcome.finished else _STOPPED


def _summary(out: Path, outcomes: Sequence[Outcome]) -> None:
    """Prints the mean and standard deviation over seeds, and writes them to seeds.json."""
    seeds = [unskip.training.RunFolder.open(str(outcome.folder)).config["seed"] for outcome in outcomes]
    data: dict[str, Any] = {"seeds": seeds}
    for name in outcomes[0].evaluations:
        values = [outcome.evaluations.get(name, math.nan) for outcome in outcomes]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        data[name] = {"mean": statistics.mean(values), "stdev": spread, "values": values}
        print(f"{name}: {statistics.mean(values):.4g} ± {spread:.2g} over seeds {', '.join(map(str, seeds))}")
    (out / "seeds.json").write_text(json.dumps(finite(data), indent=1) + "\n")
