"""`unskip train RECIPE`, `unskip resume RUN` and `unskip recipes`.

The fields of a recipe's config are the options of `train`; a preset sets their defaults.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tyro

from unskip import recipes as book
from unskip._table import table
from unskip.cli._options import Quiet, Run
from unskip.cli._say import finite
from unskip.errors import BadInput
from unskip.recipes import Opener, is_main, opening_once, resolve
from unskip.training import Outcome, RunFolder

_OWN = ("--preset", "--out", "--seeds")
_STOPPED = 130  # as a shell says of what was interrupted


@dataclass(frozen=True)
class Job:
    """What a command line asks for."""

    config: Any
    out: Path
    seeds: list[int] | None
    quiet: bool


def plan(args: Sequence[str]) -> Job:
    """The arguments of `train`, read: the recipe, the preset, then the fields of its config."""
    recipe, rest = _recipe(args)
    options, rest = _options(rest)
    presets = book.RECIPES[recipe].presets
    preset = options.get("--preset", next(iter(presets)))
    config = resolve(recipe, preset, {})
    for word in rest:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name != "help" and not hasattr(config, name.removeprefix("no_")):
            resolve(recipe, preset, {name: None})  # raises, with the nearest names
    description = (
        f"Presets (--preset): {', '.join(presets)}. --out FOLDER is where the run goes; --seeds 0,1,2 makes several; "
        "--quiet shows no progress. Defaults are those of the preset."
    )
    read = partial(tyro.cli, type(config), args=rest, prog=f"unskip train {recipe}", description=description)
    given: Any = read(default=config)
    if given.model != config.model:  # then the preset's model_args, which are for its own, are no default
        given = read(default=resolve(recipe, preset, {"model": given.model}))
    seeds = _seeds(options["--seeds"]) if "--seeds" in options else None
    return Job(given, Path(options.get("--out", f"runs/{recipe}-{preset}")), seeds, "--quiet" in options)


def train(job: tyro.conf.Fixed[Any] = None) -> int:
    """Train a model by a recipe: unskip train RECIPE [--preset P] [--field value ...] [--out FOLDER]."""
    assert isinstance(job, Job)  # of `plan`: its options depend on the recipe and the preset, which tyro cannot read
    code = _runs(job)
    _part()
    return code


def _runs(job: Job) -> int:
    if job.seeds is None:
        return _tell(book.train(job.config, job.out, job.quiet))
    outcomes, opener = [], opening_once()
    for seed in job.seeds:
        outcome = _begun(replace(job.config, seed=seed), job.out / f"seed-{seed}", job.quiet, opener)
        if _tell(outcome):
            if is_main():
                print("the same command goes on with this seed and the ones after it", file=sys.stderr)
            return _STOPPED
        outcomes.append(outcome)
    if is_main():
        _summary(job.out, job.seeds, outcomes)
    return 0


def _begun(config: Any, out: Path, quiet: bool, opener: Opener) -> Outcome:
    """A run of several, or the rest of it: the same command goes on with what was interrupted."""
    if (out / "config.json").exists() and book.from_dict(RunFolder.open(out).config) == config:
        return book.resume(out, quiet, opener)
    return book.train(config, out, quiet, opener)


def resume(run: Run, quiet: Quiet = False) -> int:
    """Go on with a run from its last checkpoint."""
    code = _tell(book.resume(run, quiet))
    _part()
    return code


def _part() -> None:
    """Ends what joins several processes; their threads may abort where the interpreter goes first."""
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def recipes() -> int:
    """List the recipes and their presets, with what they cost and what they should reach."""
    rows = [
        [recipe.name, name, preset.cost, preset.expected]
        for recipe in book.RECIPES.values()
        for name, preset in recipe.presets.items()
    ]
    print(table(("recipe", "preset", "cost", "expected"), rows))
    return 0


def _recipe(args: Sequence[str]) -> tuple[str, list[str]]:
    if not args or args[0] in ("-h", "--help"):
        print("usage: unskip train RECIPE [--preset P] [--field value ...] [--out FOLDER] [--seeds 0,1,2]\n")
        recipes()
        print("\nunskip train RECIPE --help lists the fields.")
        raise SystemExit(0)
    if args[0] not in book.RECIPES:
        resolve(args[0], "", {})  # raises, with the nearest name
    return args[0], list(args[1:])


def _options(args: list[str]) -> tuple[dict[str, str], list[str]]:
    """What belongs to the command and not to the config."""
    found: dict[str, str] = {}
    rest: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name in _OWN:
            given = value if equals else next(words, None)
            if given is None:
                raise BadInput(f"{name} needs a value")
            found[name] = given
        elif word == "--quiet":
            found[word] = ""
        else:
            rest.append(word)
    return found, rest


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(item) for item in text.split(",")]
    except ValueError:
        raise BadInput(f"--seeds {text}: write whole numbers, as in 0,1,2") from None
    if len({*seeds}) < len(seeds):
        raise BadInput(f"--seeds {text}: the same seed twice is the same run twice")
    return seeds


def _tell(outcome: Outcome) -> int:
    """Says how a run ended; returns the exit code."""
    code = 0 if outcome.finished else _STOPPED
    if not is_main():
        return code
    numbers = "  ".join(f"{name} {value:.4g}" for name, value in outcome.evaluations.items())
    state = "done" if outcome.finished else "stopped"
    print(f"{outcome.folder}: {state} at step {outcome.step}  {numbers}".rstrip())
    return code


def _summary(out: Path, seeds: list[int], outcomes: list[Outcome]) -> None:
    """Mean and spread over seeds, printed and kept."""
    data: dict[str, Any] = {"seeds": seeds}
    for name in outcomes[0].evaluations:
        values = [outcome.evaluations.get(name, math.nan) for outcome in outcomes]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        data[name] = {"mean": statistics.mean(values), "stdev": spread, "values": values}
        print(f"{name}: {statistics.mean(values):.4g} +- {spread:.2g} over seeds {', '.join(map(str, seeds))}")
    (out / "seeds.json").write_text(json.dumps(finite(data), indent=1) + "\n")
