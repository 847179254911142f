"""Zero branches: every branch adds zero at the start, so the model starts as its stream.

    W_out = 0, b_out = 0        then        x  <-  alpha x + beta f(x)  =  alpha x

The stabiliser of decayed shortcuts ("Residual Connections Harm Generative Representation Learning", arXiv 2404.10947).
Exactly one factor of the branch is zero: with two, neither would get a gradient. So LayerScale becomes 1, a branch that
ends in a normalisation gets a zero gain there, and a branch with a zero gate (adaLN-zero) is not changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from unskip._warn import warn
from unskip.anatomy import (
    AttentionParts,
    MlpParts,
    NormParts,
    ParallelParts,
    Part,
    example_for,
    named,
    trace_parts,
)
from unskip.errors import InitError
from unskip.init._check import Check, RowBuilder, chosen_parts, transaction
from unskip.wiring import Where, check_selector, picks


def zero_branches_(model: nn.Module, example: object = None, *, where: Where = None) -> Check:
    """Sets the last weight of every branch to zero. Returns the result of `verify_zero_branches`.

    Works before or after `rewire` and never rewires. `where` selects sites as in `rewire`. If a site cannot be
    initialised, nothing is changed.
    """
    check_selector(where)
    example = example_for(model, example)
    chosen = chosen_parts(trace_parts(model, example).parts, partial(picks, where))
    scaled, gated = [], []
    with torch.no_grad(), transaction(model):
        for part in _branches(chosen):
            if part.closed:
                gated.append(part.site)
                continue
            for tensor, value in _last(part):
                tensor.fill_(value)
            if part.scale is not None:
                part.scale.fill_(1)
                scaled.append(part.site)
        check = verify_zero_branches(model, example, where=where)
    notes = []
    if scaled:
        notes.append(f"{named(scaled)}: LayerScale was set to 1, because the branch's last weight is 0")
    if gated:
        notes.append(f"{named(gated)}: not changed, because its gate starts at zero")
    for note in notes:
        warn(note)
    return Check(check.title, check.rows, tuple(notes))


def verify_zero_branches(model: nn.Module, example: object = None, *, where: Where = None, check: bool = True) -> Check:
    """Checks exactly what `zero_branches_` sets. Raises InitError where a check fails, unless `check` is off.

    By site: the largest value that the branch adds on the example (expected: 0); how many of its factors are zero
    (expected: 1; with none another input gives another output, with two neither learns); the largest value of the bias
    after that factor (expected: 0), and the distance of LayerScale from 1.
    """
    check_selector(where)
    traced = trace_parts(model, example_for(model, example))
    trace, all_parts = traced.trace, traced.parts
    rows, unknown = [], []
    for site, run, part in zip(trace.sites, trace.last_runs, all_parts, strict=True):
        if not picks(where, site):
            continue
        sizes = torch.stack([trace.graph.values[f.branch].abs().max() for f in run.findings])
        size = float(sizes.max())  # NaN if any is
        row = RowBuilder()
        row.values["largest"] = size
        row.expect(size == 0, f"the branch adds up to {size:.3g}, expected 0")
        for branch in _branches([part]):
            _check_branch(branch, row)
        rows.append(row.row(site))
        unknown += [site] if part is None else []
    if not rows:
        raise InitError(f"{type(model).__name__}: no site to check")
    notes = (f"{named(unknown)}: parts unknown, checked only on the example",) if unknown else ()
    result = Check(f"{type(model).__name__}: zero branches, {len(rows)} sites", tuple(rows), notes)
    return result.raise_if_failed() if check else result


def _check_branch(part: AttentionParts | MlpParts, row: RowBuilder) -> None:
    """Checks that one factor of the branch is zero, and its biases. A parallel site has two branches."""
    norm = part.out_norm
    weight = part.out if isinstance(part, AttentionParts) else part.down
    factors = {"the last weight": bool(weight.any()), "a gate": not part.closed}
    if norm is not None and norm.gain is not None:
        factors["the gain of the last norm"] = bool((norm.gain - _zero_gain(norm)).any())
    if part.scale is not None:
        factors["LayerScale"] = bool(part.scale.any())
    zeros = [name for name, nonzero in factors.items() if not nonzero]
    if row.values.get("zeros", 1) == 1:
        row.values["zeros"] = float(len(zeros))
    row.expect(len(zeros) > 0, "no factor of the branch is 0, expected one")
    row.expect(len(zeros) < 2, f"{' and '.join(zeros)} are 0, and neither would learn; expected one")
    if part.closed:  # the model's own initialisation, which was not changed
        return
    for tensor, value in _last(part)[1:]:
        size = row.worst("bias", float((tensor - value).abs().max()))
        row.expect(size == 0, f"the last bias reaches {size:.2g}, expected 0")
    if part.scale is not None:
        error = row.worst("layer scale error", float((part.scale.double() - 1).abs().max()))
        row.expect(error == 0, f"LayerScale is {error:.2g} away from 1")


def _branches(parts: Iterable[Part | None]) -> Iterator[AttentionParts | MlpParts]:
    """Every attention and MLP, including those of parallel sites; unknown parts are skipped."""
    for part in parts:
        if isinstance(part, ParallelParts):
            yield part.attention
            yield part.mlp
        elif part is not None:
            yield part


def _last(part: AttentionParts | MlpParts) -> list[tuple[Tensor, float]]:
    """The last factor and bias of the branch, each with the value that makes its output zero."""
    norm = part.out_norm
    if norm is not None and norm.gain is not None:
        last = [(norm.gain, _zero_gain(norm)), (norm.bias, 0.0)]
    elif isinstance(part, AttentionParts):
        last = [(part.out, 0.0), (part.out_bias, 0.0)]
    else:
        last = [(part.down, 0.0), (part.down_bias, 0.0)]
    return [(tensor, value) for tensor, value in last if tensor is not None]


def _zero_gain(norm: NormParts) -> float:
    """The stored gain for which a norm outputs zero; a norm that outputs zero now does not show its offset."""
    minus_one = norm.kind == "other" and norm.gain is not None and bool((norm.gain == -1).all())
    return -1.0 if minus_one else -norm.offset
