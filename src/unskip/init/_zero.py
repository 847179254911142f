"""Zero start: every branch begins by adding nothing, so the model begins as its stream.

    W_out = 0, b_out = 0        then        x  <-  alpha x + beta f(x)  =  alpha x

The stabiliser of decayed shortcuts ("Residual Connections Harm Generative Representation Learning", arXiv 2404.10947).
One factor of the branch starts at zero, never two: with two, neither would get a gradient. So LayerScale becomes 1, a
branch that ends in a normalisation starts with that gain at zero, and one whose gate starts shut (adaLN-zero) is left
as it is.
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
    """Sets the last weight of every branch to zero. Returns what `verify_zero_branches` found.

    Works before or after `rewire` and never rewires. `where` chooses sites as in `rewire`. Where a site cannot be done
    nothing is changed.
    """
    check_selector(where)
    whole = example_for(model, example)
    chosen = chosen_parts(trace_parts(model, whole).parts, partial(picks, where))
    scaled, shut = [], []
    with torch.no_grad(), transaction(model):
        for part in _branches(chosen):
            if part.closed:
                shut.append(part.site)
                continue
            for tensor, value in _last(part):
                tensor.fill_(value)
            if part.scale is not None:
                part.scale.fill_(1)
                scaled.append(part.site)
        check = verify_zero_branches(model, whole, where=where)
    notes = []
    if scaled:
        notes.append(f"{named(scaled)}: LayerScale was set to 1, the branch's weight is the zero start")
    if shut:
        notes.append(f"{named(shut)}: left as it is, its gate starts at zero")
    for note in notes:
        warn(note)
    return Check(check.title, check.rows, tuple(notes))


def verify_zero_branches(model: nn.Module, example: object = None, *, where: Where = None, check: bool = True) -> Check:
    """Checks exactly what `zero_branches_` sets. Raises InitError where it does not hold, unless `check` is off.

    By site: the largest number that the branch adds on the example (expected: 0); how many factors of the branch are
    zero, whatever the example (expected: 1, for with none it comes to life elsewhere and with two it never learns); the
    largest number of the bias behind that factor (0), and how far LayerScale is from 1.
    """
    check_selector(where)
    traced = trace_parts(model, example_for(model, example))
    trace, all_parts = traced.trace, traced.parts
    rows, unknown = [], []
    for site, run, part in zip(trace.sites, trace.last_runs, all_parts, strict=True):
        if not picks(where, site):
            continue
        sizes = torch.stack([trace.graph.values[f.branch].abs().max() for f in run.findings])
        size = float(sizes.max())  # NaN where one is
        row = RowBuilder()
        row.values["largest"] = size
        row.expect(size == 0, f"the branch adds up to {size:.3g}, expected 0")
        for branch in _branches([part]):
            _check_branch(branch, row)
        rows.append(row.row(site))
        unknown += [site] if part is None else []
    if not rows:
        raise InitError(f"{type(model).__name__}: no site to check")
    notes = (f"{named(unknown)}: parts unknown, checked on the example alone",) if unknown else ()
    result = Check(f"{type(model).__name__}: zero branches, {len(rows)} sites", tuple(rows), notes)
    return result.raise_if_failed() if check else result


def _check_branch(part: AttentionParts | MlpParts, row: RowBuilder) -> None:
    """One zero among what the branch is a multiple of, and what goes with it. A parallel site has two branches."""
    norm = part.out_norm
    weight = part.out if isinstance(part, AttentionParts) else part.down
    factors = {"the last weight": bool(weight.any()), "a gate": not part.closed}
    if norm is not None and norm.gain is not None:
        factors["the gain of the last norm"] = bool((norm.gain - _nothing(norm)).any())
    if part.scale is not None:
        factors["LayerScale"] = bool(part.scale.any())
    zeros = [name for name, acts in factors.items() if not acts]
    if row.values.get("zeros", 1) == 1:
        row.values["zeros"] = float(len(zeros))
    row.expect(len(zeros) > 0, "no factor of the branch is 0, expected one")
    row.expect(len(zeros) < 2, f"{' and '.join(zeros)} are 0, and neither would learn; expected one")
    if part.closed:  # the gate is the model's own start, and nothing else was touched
        return
    for tensor, value in _last(part)[1:]:
        size = row.worst("bias", float((tensor - value).abs().max()))
        row.expect(size == 0, f"the last bias reaches {size:.2g}, expected 0")
    if part.scale is not None:
        away = row.worst("layer scale error", float((part.scale.double() - 1).abs().max()))
        row.expect(away == 0, f"LayerScale is {away:.2g} away from 1")


def _branches(parts: Iterable[Part | None]) -> Iterator[AttentionParts | MlpParts]:
    """Each attention and each MLP, those of parallel sites too; what is unknown is left out."""
    for part in parts:
        if isinstance(part, ParallelParts):
            yield part.attention
            yield part.mlp
        elif part is not None:
            yield part


def _last(part: AttentionParts | MlpParts) -> list[tuple[Tensor, float]]:
    """What the branch's output is a multiple of, each with the number that makes it nothing."""
    norm = part.out_norm
    if norm is not None and norm.gain is not None:
        last = [(norm.gain, _nothing(norm)), (norm.bias, 0.0)]
    elif isinstance(part, AttentionParts):
        last = [(part.out, 0.0), (part.out_bias, 0.0)]
    else:
        last = [(part.down, 0.0), (part.down_bias, 0.0)]
    return [(tensor, value) for tensor, value in last if tensor is not None]


def _nothing(norm: NormParts) -> float:
    """The stored gain under which a norm gives nothing. One that gives nothing now does not show how it stores it."""
    shut = norm.kind == "other" and norm.gain is not None and bool((norm.gain == -1).all())
    return -1.0 if shut else -norm.offset
