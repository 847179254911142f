"""rewire: sets shortcut weights in an existing model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from unskip.anatomy import Example, Survey, example_for, survey
from unskip.errors import NoResidualError, RewireError
from unskip.wiring import _caution, _verify
from unskip.wiring._select import Rules, Where, assign, normalise
from unskip.wiring._wiring import Wiring, find_wiring


def rewire(
    model: nn.Module,
    shortcut: Rules,
    example: object = None,
    where: Where = None,
    *,
    verify: bool = True,
    force: bool = False,
) -> Wiring:
    """Sets x <- alpha_l * x + beta_l * f_l(x) at the residual sites of a model, in place.

    `shortcut` is a rule, its text ("decay:0.6"), or a mapping from a kind or predicate to rules; `where` is None, a
    kind or a predicate on Site. Without a predicate, projected shortcuts and long skips are kept. `example` is a
    tensor, a tuple of arguments or a mapping of keyword arguments; None infers one. New rules replace those of a model
    that is already rewired. On an error the model is left as it was.

    `verify` checks the detection on the example against an independent oracle before the weights are set. `force` also
    patches blocks whose weights are all 1, which otherwise stay unchanged.
    """
    wiring = find_wiring(model)
    pairs = normalise(shortcut, where)
    if wiring is not None:
        wiring._start(assign(pairs, wiring.sites), force)
        return wiring
    given = example_for(model, example)
    found = survey(model, given)
    if not found.sites:
        raise NoResidualError(_no_sites(model, found))
    plan = assign(pairs, found.sites)
    wiring = Wiring(model, found)
    if verify and _verify.can_verify(model, given):
        _check(wiring, given)
        wiring.verified = True
    _caution.left_alone([f"{u.path or '(model)'} ({u.source}): {u.reason}" for u in found.unknown])
    wiring._start(plan, force)
    return wiring


@contextmanager
def rewired(
    model: nn.Module, shortcut: Rules, example: object = None, where: Where = None, *, verify: bool = True
) -> Iterator[Wiring]:
    """Context manager for `rewire`: on exit the model returns to its previous state, rewired or not."""
    before = find_wiring(model)
    state = before._state() if before is not None else None
    wiring = rewire(model, shortcut, example, where, verify=verify)
    try:
        yield wiring
    finally:
        if state is None:
            wiring.undo()
        else:
            wiring._restore(state)


def _no_sites(model: nn.Module, survey: Survey) -> str:
    name = type(model).__name__
    if survey.unknown:
        first = survey.unknown[0]
        return f"{name}: no residual addition that can be rewired; {first.path} ({first.source}): {first.reason}"
    return f"{name}: no residual additions found on the example. unskip.audit(model, example) shows what was found."


def _check(wiring: Wiring, example: Example) -> None:
    """Compares the model, rewired with probe weights, with the oracle. The model is always restored."""
    sites = [site for site in wiring.sites if site.problem is None]
    if not sites:
        return
    weights = _verify.probe(sites)
    model = wiring.model
    paths = {id(module): path for path, module in model.named_modules()}
    met: set[object] = set()
    for training in (False, True):
        if training and len(met) == sum(len(site.places) for site in sites):
            break  # evaluation ran every addition
        oracle = _verify.Oracle(paths, sites, weights)
        try:
            expected = _verify.fingerprint(model, example, training, oracle)
        except Exception:
            if not training:  # the training forward may need what the example lacks; the audit notes it
                raise
            break
        met |= oracle.met
        try:
            wiring._probe(dict(zip([site.index for site in sites], weights, strict=True)))
            got = _verify.fingerprint(model, example, training)
        finally:
            wiring.undo()
        wrong = _verify.mismatch(expected, got)
        if wrong:
            raise RewireError(
                f"{type(model).__name__}: rewired on the example, it does not compute alpha * x + beta * f(x): "
                f"{wrong}. The model is left as it was. Please report it; where= can leave the site out, verify=False "
                "skips this check."
            )
