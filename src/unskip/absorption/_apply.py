"""Rewrites the MLP sites of a model without their skips, reversibly.

    exact         sites whose verdict is possible: the same weights with the signs of some rows flipped
    widen         sites without a norm on the branch: exact, with more units
    approximate   any site, norms included: the same width, fitted to the site's inputs

`rewire` cuts the skip, so the model's own forward runs with alpha = 0 there. Approximate replacements are fitted in
execution order, each to the inputs of its site after the sites before it were rewritten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unskip import _checks
from unskip._modes import evaluating
from unskip.absorption._applied import Applied, Owners, write
from unskip.absorption._approximate import approximate, inputs_to_read
from unskip.absorption._block import Block
from unskip.absorption._decide import absorb
from unskip.absorption._from import (
    NoBlock,
    count_samples,
    mlp_sites,
    one_batch,
    read_block,
    streams,
    trace_sample,
)
from unskip.absorption._widen import widen
from unskip.anatomy import Example, MlpParts, Site, example_for
from unskip.errors import BadInput, RewireError, UnskipError
from unskip.wiring import Cut, find_wiring, rewire

Mode = Literal["exact", "widen", "approximate"]  # how a model is rewritten
_MAX_CHANGE = 1e-2  # relative: above the rounding of a deep model, far below the change that another function makes
_MAX_CHANGE_HALF = 1e-1
NORM_ON_BRANCH = "its branch has a norm, so no exact replacement exists; mode='approximate' fits one to data"


def apply(
    model: nn.Module,
    mode: Mode = "exact",
    example: object = None,
    data: object = None,
    where: Callable[[Site], bool] | None = None,
    max_error: float | None = None,
    distil: int = 0,
) -> Applied:
    """Rewrites MLP sites in place, and returns a report. `data` is a batch; mode="approximate" needs it.

    mode="approximate" fits on the first half of the batch and compares the model's outputs on the second. A site whose
    own error is above `max_error` (default 0.1) is left as it is; if the outputs of the model differ by more than that,
    the model is restored and RewireError is raised. `distil` trains each replacement for that many steps. If anything
    fails, the model is restored.
    """
    _checks.choice("apply", "mode", mode, get_args(Mode))
    if mode == "approximate" and data is None:
        raise BadInput("apply: mode='approximate' fits to inputs; give data=, a batch that the model takes")
    if mode != "approximate" and (max_error is not None or distil):
        raise BadInput(f"apply: max_error= and distil= are for mode='approximate', not {mode!r}")
    if where is not None and not callable(where):
        raise BadInput(f"apply: where is {where!r}; it is a function of a Site that returns whether to rewrite it")
    _checks.whole("apply", "distil", distil, low=0)
    max_error = _checks.number("apply", "max_error", 0.1 if max_error is None else max_error, zero=False)
    if find_wiring(model) is not None:
        raise BadInput(f"apply: {type(model).__name__} is rewired already; undo its wiring first")
    given = example_for(model, one_batch("apply", example, data))
    fit, test = _halves(given) if mode == "approximate" else (given, given)
    out = Applied(model, mode)
    before = _outputs(model, test)
    traced = trace_sample(model, given)
    mlps = list(traced.parts.mlps())
    used = Counter(id(weight) for part in mlps for weight in {*part.parameters, *part.biases})
    places = [(module, name, id(value)) for module in model.modules() for name, value in module._parameters.items()]
    held = Counter(place for _, _, place in places)  # an embedding or a head may share a weight
    tied = {place for place in used if used[place] > 1 or held[place] > 1}
    owners = {place: (module, name) for module, name, place in places}
    try:
        with torch.no_grad():
            for site, part, reason in mlp_sites(traced.parts):
                if where is not None and not where(site):
                    continue
                out.sites[site.index] = site
                if part is None:
                    out.left[site.index] = reason
                    continue
                block = read_block(traced, part)
                if isinstance(block, NoBlock):
                    out.left[site.index] = block.reason
                    continue
                why = _refusal(part, block, mode, tied) or _rewrite(
                    part, block, mode, fit, owners, out, max_error, distil
                )
                if why:
                    out.left[site.index] = why
                elif mode == "approximate":
                    _cut(model, given, out)
        if out.done:
            _cut(model, given, out)
        out.difference = _difference(before, _outputs(model, test))
        if mode == "approximate" and not out.difference <= max_error:
            raise RewireError(
                f"apply: with {len(out.done)} approximate replacements the model's outputs differ by "
                f"{out.difference:.2g} of their size on inputs that were held out, more than max_error={max_error:g}; "
                "nothing was changed. Rewrite fewer sites with where=, use distil=, or raise max_error"
            )
        if mode != "approximate" and not out.difference <= _max_change(model):
            raise RewireError(
                f"apply: the rewritten model's outputs differ by {out.difference:.2g} of their size on the example, so "
                "some branch computes more than its weights show; nothing was changed. where= leaves sites out"
            )
        out.parameters.append(sum(value.numel() for value in model.parameters()))
    except BaseException:
        out.undo()
        raise
    return out


def _halves(given: Example) -> tuple[Example, Example]:
    count = count_samples(given)
    if count < 2:
        raise BadInput(
            "apply: mode='approximate' fits on one half of data and tests on the other; give 2 samples or more"
        )
    try:
        return given.rows(0, count // 2), given.rows(count // 2, count)
    except UnskipError:  # an argument without a row for each sample
        return given, given


def _cut(model: nn.Module, given: Example, out: Applied) -> None:
    picked = set(out.done)
    out.wiring = rewire(model, Cut(), given, where=lambda site: site.index in picked)


def _outputs(model: nn.Module, example: Example) -> list[Tensor]:
    with evaluating(model), torch.no_grad():
        leaves = tree_leaves(example.copy().run(model))
    return [leaf.detach().double() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _difference(before: list[Tensor], after: list[Tensor]) -> float:
    """|after - before| / |before|; an entry that is not finite must be the same in both."""
    gaps = [torch.where(a.eq(b) | (a.isnan() & b.isnan()), 0.0, a - b) for a, b in zip(after, before, strict=True)]
    gap, size = (sum(float(x.square().sum()) for x in xs) for xs in (gaps, [b[b.isfinite()] for b in before]))
    return (gap / size) ** 0.5 if size else gap


def _max_change(model: nn.Module) -> float:
    """The relative change of the outputs that rounding may cause."""
    half = any(weight.is_floating_point() and weight.element_size() < 4 for weight in model.parameters())
    return _MAX_CHANGE_HALF if half else _MAX_CHANGE


def _refusal(part: MlpParts, block: Block, mode: Mode, tied: set[int]) -> str | None:
    """The reason why a site may not be rewritten, or None."""
    if part.site.problem is not None:
        return part.site.problem
    if part.site.runs > 1 or any(id(weight) in tied for weight in (*part.parameters, *part.biases)):
        return "its weights are tied to those of another run, site or module"
    if {"pre", "out"} & block.norms.keys() and mode != "approximate":
        return NORM_ON_BRANCH
    scale = part.beta * (block.down.new_ones(len(block.down)) if part.scale is None else part.scale.flatten())
    return None if bool((scale != 0).all()) else "its branch is scaled by zero"


def _rewrite(
    part: MlpParts,
    block: Block,
    mode: Mode,
    fit: Example,
    owners: Owners,
    out: Applied,
    max_error: float,
    distil: int,
) -> str | None:
    """Writes the replacement of one site into the model, or returns the reason why it cannot."""
    try:
        if mode == "exact":
            verdict = absorb(block)
            if verdict.status != "possible":
                return verdict.reason
            made, said = verdict.replacement(), f"exact, relative error {verdict.error:.2g}"
        elif mode == "widen":
            wide = widen(block)
            made, said = wide.block, f"{wide.extra} more units, relative error {wide.error:.2g}"
        else:
            read = streams(out.model, fit, inputs_to_read(block.width), part.site.index).get(part.site.index)
            if read is None:
                return "its inputs could not be recorded"
            near = approximate(block.bare() if "post" in block.norms else block, read, distil=distil)
            if not near.error <= max_error:
                return f"its error {near.error:.3g} on {near.held_out} held-out inputs is above max_error={max_error:g}"
            made, said = near.block, f"{near.step}, error {near.error:.3g} on {near.held_out} held-out inputs"
    except UnskipError as error:
        return str(error)
    why = write(part, made, owners, out)
    if why is None:
        out.done[part.site.index] = said
    return why
