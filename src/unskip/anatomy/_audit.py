"""The audit: a table of the residual sites of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

from torch import nn

from unskip._table import table
from unskip._words import count
from unskip.anatomy._example import example_for
from unskip.anatomy._guard import unwrapped
from unskip.anatomy._rewired import rewired_state
from unskip.anatomy._sites import Site, Survey, Unknown, survey


class Audit(Sequence[Site]):
    """The residual sites of a model in execution order, long skips included: `audit[i].index` is i, as in a wiring."""

    def __init__(self, model: str, survey: Survey) -> None:
        self.model = model
        self.sites = survey.sites
        self.unknown: tuple[Unknown, ...] = survey.unknown
        self.notes: tuple[str, ...] = survey.notes

    @property
    def long_skips(self) -> tuple[Site, ...]:
        """The sites that span other sites, as in a U-Net; rewiring keeps them by default."""
        return tuple(site for site in self.sites if site.long)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The paths of the blocks that contain the sites, in the order of `features` and `measure`: by last site."""
        last = {site.block: site.index for site in self.sites if site.regular}
        return tuple(sorted(last, key=lambda path: last[path]))

    @property
    def shown_blocks(self) -> str:
        """The blocks in one line."""
        shown = [path or "(model)" for path in self.blocks]
        return f"{count(len(shown), 'block')}: " + ", ".join(
            [*shown[:2], "...", shown[-1]] if len(shown) > 3 else shown
        )

    def __len__(self) -> int:
        return len(self.sites)

    @overload
    def __getitem__(self, index: int) -> Site: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Site]: ...
    def __getitem__(self, index: int | slice) -> Site | Sequence[Site]:
        return self.sites[index]

    def to_dict(self) -> dict[str, Any]:
        """JSON-serialisable data."""
        return {
            "model": self.model,
            "sites": [site.to_dict() for site in self.sites],
            "unknown": [vars(unknown) for unknown in self.unknown],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{self.model}: {count(len(self.sites), 'residual site')}", "", _rows(self.sites)]
        lines += ["", self.shown_blocks] if self.blocks else []
        if self.unknown:
            lines += ["", f"{count(len(self.unknown), 'addition')} not decided, and left alone:"]
            lines += [f"  {u.path or '(model)'} ({u.source}): {u.reason}" for u in self.unknown]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Audit of {self.model}: {len(self.sites)} sites, {len(self.unknown)} unknown>"


_REWIRED = "the model is rewired: |f|/|x| is from before rewiring; unskip.measure gives current values"
AUDIT_HEADER = ("site", "path", "kind", "norm", "runs", "|f|/|x|", "branch", "source", "note")


def audit_rows(sites: Sequence[Site]) -> list[list[object]]:
    """The rows of an audit's table, with the columns of AUDIT_HEADER."""
    return [
        [s.index, s.path or "(model)", s.kind, s.norm, s.runs, s.ratio, _modules(s), s.source, _remark(s)]
        for s in sites
    ]


def _rows(sites: Sequence[Site]) -> str:
    return table(AUDIT_HEADER, audit_rows(sites)) if sites else "none"


def _modules(site: Site) -> str:
    """The branch's modules, with paths relative to the module that adds."""
    prefix = site.path + "." if site.path else ""
    short = [name.removeprefix(prefix) for name in site.branch]
    return ", ".join(short[:4]) + (", ..." if len(short) > 4 else "")


def _remark(site: Site) -> str:
    remarks = ["projected"] if site.projected else []
    if site.cross:
        remarks.append("cross-attention")
    if site.long:
        remarks.append("long skip, kept by default")
    if site.copies:
        remarks.append("a gated or shifted copy of the stream, kept by default")
    for name, factor in (("stream", site.stream_factor), ("branch", site.branch_factor)):
        if abs(factor - 1) > 1e-3:
            remarks.append(f"the model's own factor on the {name}: {factor:.3g}")
    if site.doubled:
        remarks.append("its branch already contains the stream")
    if site.problem:
        remarks.append(f"cannot be rewired: {site.problem}")
    return "; ".join(remarks)


def audit(model: nn.Module, example: object = None) -> Audit:
    """Lists every residual addition of a model. The model runs once in eval and once in training mode, unchanged.

    `example` is a tensor, a tuple of arguments or a mapping of keyword arguments; None infers one from the model. A
    rewired model, also inside torch.compile, DistributedDataParallel, FSDP or peft, returns the sites found when it was
    rewired.
    """
    inside = unwrapped(model)
    state = rewired_state(inside)
    if state is None:
        return Audit(type(model).__name__, survey(model, example_for(model, example)))
    return Audit(type(inside).__name__, replace(state.survey, notes=(*state.survey.notes, _REWIRED)))
