"""Puts a recorded wiring back into a model: of a saved folder, or of a checkpoint that another tool wrote."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from unskip.anatomy import Survey
from unskip.errors import BadInput, LoadError, WrappedError
from unskip.wiring._bind import Patch, is_bound, patched
from unskip.wiring._record import MALFORMED, wiring_of
from unskip.wiring._select import Assignment
from unskip.wiring._wiring import Wiring, find_wiring


def restore_wiring(model: nn.Module, data: dict[str, Any], source: object, trust: bool = False) -> Wiring:
    """The wiring that `wiring_record` recorded, in the model; `source` is where it stands, for errors.

    A model that is rewired already must have the same rules on the same sites, and is moved to the recorded step.
    """
    survey, plan, step = wiring_of(data, source, trust)
    wiring = find_wiring(model)
    if wiring is None:
        return put_wiring(model, survey, plan, step, data, source)
    if _rules(wiring._plan) != _rules(plan):
        raise BadInput(
            f"{source}: {type(model).__name__} was rewired with {_say(plan)} there, and with {_say(wiring._plan)} now. "
            "Rewire it as it was, or leave rewire out: the wiring is restored"
        )
    wiring.step(step)
    return wiring


def put_wiring(
    model: nn.Module, survey: Survey, plan: tuple[Assignment, ...], step: int, data: dict[str, Any], source: object
) -> Wiring:
    """A plain model rewired as it was; taken back where that fails."""
    try:
        wiring = Wiring(model, survey)
        for path, sites in wiring._sites_at.items():
            module = wiring._module_at[path]
            base: Any = type(module)
            if is_bound(module):
                raise LoadError(f"{path} is rewired already")
            if "forward" in vars(module):
                raise WrappedError(f"{path or 'the model'} has a forward of its own on the instance: rewire before")
            patched(base, Patch(tuple(site.places for site in sites)))  # raises where the source is another
    except MALFORMED as error:
        raise LoadError(f"{source}: its wiring does not fit this model: {error}") from error
    try:
        wiring._follow(plan, step)
        _check_weights(wiring, data)
    except BaseException as error:
        wiring.undo()
        if isinstance(error, MALFORMED):
            raise LoadError(f"{source}: its wiring does not fit this model: {error}") from error
        raise
    return wiring


def _check_weights(wiring: Wiring, data: dict[str, Any]) -> None:
    """The rules must give the weights that they gave; learned ones come from the file."""
    for name, now in (("alphas", wiring.alphas), ("betas", wiring.betas)):
        for a in wiring._plan:
            # An annealed weight is a buffer, and may have been rounded to a narrow dtype.
            tolerance = 1e-2 if a.rule.steps else 1e-6
            for site in () if a.rule.learnable else a.sites:
                was = data[name][site.index]
                if not math.isclose(now[site.index], was, rel_tol=tolerance):
                    raise ValueError(f"{name} of {site.name} are {now[site.index]} by its rule, and were {was}")


def _rules(plan: tuple[Assignment, ...]) -> list[tuple[object, list[tuple[str, int]]]]:
    return [(a.rule, [(site.path, site.index) for site in a.sites]) for a in plan]


def _say(plan: tuple[Assignment, ...]) -> str:
    return ", ".join(f"{a.rule} on {len(a.sites)} sites" for a in plan) or "no rule"
