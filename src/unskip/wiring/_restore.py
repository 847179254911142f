"""Restores a recorded wiring, from a saved folder or a checkpoint of another tool."""

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
    """Rewires a model from the data of `wiring_record`; `source` names the origin of the data in errors.

    A model that is already rewired must have the same rules on the same sites. It is set to the recorded step.
    """
    survey, plan, step = wiring_of(data, source, trust)
    wiring = find_wiring(model)
    if wiring is None:
        return put_wiring(model, survey, plan, step, data, source)
    if _rules(wiring._plan) != _rules(plan):
        raise BadInput(
            f"{source}: {type(model).__name__} was saved with {_describe(plan)}, and is now rewired with "
            f"{_describe(wiring._plan)}. Rewire it with the saved rules, or do not rewire it: the wiring is restored"
        )
    wiring.step(step)
    return wiring


def put_wiring(
    model: nn.Module, survey: Survey, plan: tuple[Assignment, ...], step: int, data: dict[str, Any], source: object
) -> Wiring:
    """Rewires a plain model as recorded. On an error the model is left as it was."""
    try:
        wiring = Wiring(model, survey)
        for path, sites in wiring._sites_at.items():
            module = wiring._module_at[path]
            base: Any = type(module)
            if is_bound(module):
                raise LoadError(f"{path} is already rewired")
            if "forward" in vars(module):
                raise WrappedError(f"{path or 'the model'} has a forward on the instance: rewire before adding it")
            patched(base, Patch(tuple(site.places for site in sites)))  # raises if the source is different
    except MALFORMED as error:
        raise LoadError(f"{source}: its wiring does not fit this model: {error}") from error
    try:
        wiring._set_plan(plan, step)
        _check_weights(wiring, data)
    except BaseException as error:
        wiring.undo()
        if isinstance(error, MALFORMED):
            raise LoadError(f"{source}: its wiring does not fit this model: {error}") from error
        raise
    return wiring


def _check_weights(wiring: Wiring, data: dict[str, Any]) -> None:
    """Raises ValueError if the rules give other weights than recorded; learned weights come from the file."""
    for name, weights in (("alphas", wiring.alphas), ("betas", wiring.betas)):
        for a in wiring._plan:
            # An annealed weight may have been rounded to a narrow dtype.
            tolerance = 1e-2 if a.rule.steps else 1e-6
            for site in () if a.rule.learnable else a.sites:
                weight, saved = weights[site.index], data[name][site.index]
                if not math.isclose(weight, saved, rel_tol=tolerance):
                    raise ValueError(f"{name} of {site.name} are {weight} by its rule, but {saved} in the record")


def _rules(plan: tuple[Assignment, ...]) -> list[tuple[object, list[tuple[str, int]]]]:
    return [(a.rule, [(site.path, site.index) for site in a.sites]) for a in plan]


def _describe(plan: tuple[Assignment, ...]) -> str:
    return ", ".join(f"{a.rule} on {len(a.sites)} sites" for a in plan) or "no rule"
