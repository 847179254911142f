"""`unskip audit MODEL`: every residual of a model, its weights where it is rewired, and what a rule would give it."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from typing import Annotated

import torch
import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

import unskip
from unskip._table import cell
from unskip._words import count
from unskip.anatomy import AUDIT_HEADER, Audit, Site, audit_rows
from unskip.cli._model import FORMS, Shape, by_input, inputs, opened, shapes_of
from unskip.cli._options import Inputs, Json, told
from unskip.cli._say import busy, print_json
from unskip.errors import ForwardError
from unskip.wiring import Shortcut, Wiring, band, find_wiring, parse

_MODEL = f"What to audit: {FORMS}. Of a named model weights are random; none are needed."
_SHORTCUT = (
    "Show what a rule would give each site: keep, cut, decay:0.6, decay:0.6,cosine, decay:product=5e-3, "
    "scale:0.7,0.7, learn:1.0 or anneal:keep>cut@10000."
)


def audit(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=_MODEL, metavar="MODEL")],
    shortcut: Annotated[str | None, told(_SHORTCUT, "RULE")] = None,
    input: Inputs = (),  # noqa: A002
    json: Json = False,
) -> int:
    """List every residual addition of a model, in execution order.

    Example: unskip audit timm:vit_base_patch16_224 --shortcut decay:0.6
    """
    rule = parse(shortcut) if shortcut is not None else None
    shapes = shapes_of(input)
    # Whatever the model prints while it is built and run is no part of the result.
    with contextlib.redirect_stdout(sys.stderr), busy(f"auditing {model}"):
        found, wiring = _look(model, rule, shapes)
    last = rule.steps if rule is not None else None
    if json:
        _write_json(model, found, wiring, last)
        return 0
    if sys.stdout.isatty():
        _draw(found, wiring)
    else:
        print(found if wiring is None else f"{found}\n\n{wiring}")
    if wiring is not None and last is not None:
        wiring.step(last)
        print(f"after step {last}: {_decay(wiring)}")
    return 0


def _look(name: str, rule: Shortcut | None, shapes: list[Shape]) -> tuple[Audit, Wiring | None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # random weights, but the same ones each time
        model = opened(name, light=True)
        if not _is_meta(model):
            return _survey(model, rule, shapes)
        try:
            result = _survey(model, rule, shapes)
        except ForwardError:  # a forward that needs values
            return _survey(opened(name), rule, shapes)
    print(
        "note: a large model, built without values: |f|/|x| is not measured, nor is what depends on it", file=sys.stderr
    )
    return result


def _survey(model: nn.Module, rule: Shortcut | None, shapes: list[Shape]) -> tuple[Audit, Wiring | None]:
    example = inputs(model, shapes)
    with by_input():
        if rule is None:
            return unskip.audit(model, example), find_wiring(model)
        saved = None if find_wiring(model) is None else unskip.audit(model)
        wiring = unskip.rewire(model, rule, example, verify=False)  # its one trace serves both
        return saved if saved is not None else Audit(type(model).__name__, wiring.survey), wiring


def _is_meta(model: nn.Module) -> bool:
    return any(parameter.device.type == "meta" for parameter in model.parameters())


# --- What is shown ----------------------------------------------------------------------------------------------------


def _write_json(name: str, found: Audit, wiring: Wiring | None, last: int | None) -> None:
    data = {"spec": name, **found.to_dict()}
    if wiring is not None:
        data["shortcut"] = wiring.to_dict() | {"band": _band(wiring)}
        if last is not None:
            wiring.step(last)
            data["shortcut"]["end"] = wiring.to_dict() | {"band": _band(wiring)}
    print_json(data)


def _draw(found: Audit, wiring: Wiring | None) -> None:
    """The same for a terminal: the weights stand in the table, and columns that are empty or do not fit go."""
    console = Console(highlight=False)
    console.print(f"{found.model}: {count(len(found), 'residual site')}", markup=False, style="bold")
    _draw_table(console, found.sites, wiring)
    if found.long_skips:
        console.print(f"{count(len(found.long_skips), 'long skip')}, kept unless asked for")
        _draw_table(console, found.long_skips, wiring)
    if found.unknown:
        console.print(f"{count(len(found.unknown), 'addition')} not decided, and left alone:", style="yellow")
    for unknown in found.unknown:
        console.print(f"  {unknown.path or '(model)'} ({unknown.source}): {unknown.reason}", markup=False)
    for note in found.notes:
        console.print(f"note: {note}", markup=False)
    if wiring is not None:
        console.print(_decay(wiring), markup=False)


def _draw_table(console: Console, sites: Sequence[Site], wiring: Wiring | None) -> None:
    header, cells = list(AUDIT_HEADER), audit_rows(sites)
    if wiring is not None:
        header[5:5] = ["alpha", "beta"]
        alphas, betas = wiring.alphas, wiring.betas
        for row, site in zip(cells, sites, strict=True):
            row[5:5] = [alphas[site.index], betas[site.index]]
    plain = {"runs": 1}  # what goes without saying
    shown = [name for i, name in enumerate(header) if any(row[i] not in (None, "", plain.get(name)) for row in cells)]
    table = _table(header, cells, shown)
    endless = console.options.update_width(10_000)  # else it would measure the table as cut to the terminal
    gone = []
    for name in ("source", "branch"):
        if name in shown and console.measure(table, options=endless).maximum > console.width:
            shown.remove(name)
            gone.append(name)
            table = _table(header, cells, shown)
    if shown:
        console.print(table)
    if gone:
        console.print(
            f"too wide for the terminal: {' and '.join(gone)} not shown; add | cat for all columns", style="dim"
        )


def _table(header: Sequence[str], cells: Sequence[Sequence[object]], shown: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    indices = [header.index(name) for name in shown]
    for i in indices:
        numbers = all(isinstance(row[i], int | float | None) for row in cells)
        short = header[i] not in ("path", "branch", "source", "note")
        table.add_column(escape(header[i]), justify="right" if numbers else "left", no_wrap=short, overflow="fold")
    for row in cells:
        table.add_row(*(escape(cell(row[i])) for i in indices))
    return table


def _decay(wiring: Wiring) -> str:
    place = _band(wiring)
    return f"effective decay {wiring.effective_decay:.3g}" + (f", {place}" if place else "")


def _band(wiring: Wiring) -> str | None:
    """Where the effective decay lies; nowhere once a learnt weight has diverged."""
    return band(wiring.effective_decay) if math.isfinite(wiring.effective_decay) else None
