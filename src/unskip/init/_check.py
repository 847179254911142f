"""Checks of an initialisation: a table with one row per site, which can raise if an expectation failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unskip._table import table
from unskip.anatomy import Parts, Site, named
from unskip.errors import InitError


@dataclass(frozen=True)
class Row:
    """One site: its numbers by name, and the expectations that failed."""

    site: Site
    values: dict[str, float | None]
    failed: tuple[str, ...] = ()


def select(parts: Parts, chooses: Callable[[Site], bool]) -> Parts:
    """The parts of the chosen sites alone; None where unknown."""
    pairs = [(site, part) for site, part in zip(parts.sites, parts, strict=True) if chooses(site)]
    return Parts(parts.model, [site for site, _ in pairs], [part for _, part in pairs], {})


def chosen_parts(all_parts: Parts, chooses: Callable[[Site], bool]) -> Parts:
    """The parts of the chosen sites. Raises InitError if there is none, or if one is unknown."""
    chosen = select(all_parts, chooses)
    if not chosen.sites:
        raise InitError(f"{all_parts.model}: no site to initialise")
    unknown = [site for site, part in zip(chosen.sites, chosen, strict=True) if part is None]
    if unknown:
        refuse(unknown, all_parts.reasons[unknown[0].index])
    return chosen


def refuse(sites: Sequence[Site], why: str, instead: str = "") -> None:
    """Raises InitError if there are sites that cannot be initialised; `instead` is another way than `where`."""
    if sites:
        raise InitError(f"{named(sites)}: {why}. Nothing was changed; exclude such sites with where={instead}.")


class RowBuilder:
    """Collects the numbers of one site and the expectations that failed."""

    def __init__(self) -> None:
        self.values: dict[str, float | None] = {}
        self.failed: list[str] = []

    def expect(self, holds: bool, otherwise: str) -> None:
        """Records the message of an expectation that does not hold."""
        if not holds:
            self.failed.append(otherwise)

    def worst(self, name: str, value: float) -> float:
        """Keeps the largest value of a column; a NaN stays. Returns `value`."""
        before = self.values.get(name)
        if before is None or not value <= before:
            self.values[name] = value if before is None or not math.isnan(before) else before
        return value

    def row(self, site: Site) -> Row:
        return Row(site, self.values, tuple(self.failed))


@dataclass(frozen=True)
class Check:
    """The rows of all sites, and notes on what else was changed."""

    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Row, ...]:
        """The rows of sites where an expectation failed."""
        return tuple(row for row in self.rows if row.failed)

    def raise_if_failed(self) -> Check:
        """Returns the check, or raises InitError with the table."""
        if self.failed:
            names = ", ".join(row.site.name for row in self.failed[:3])
            raise InitError(f"{self.title}: {len(self.failed)} of {len(self.rows)} sites fail ({names}).\n{self}")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "title": self.title,
            "rows": [
                {"site": row.site.index, "path": row.site.path, "kind": row.site.kind, **row.values}
                | {"failed": list(row.failed)}
                for row in self.rows
            ],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for row in self.rows for name in row.values))
        header = ("site", "path", "kind", *names, "holds")
        cells = [
            [row.site.index, row.site.path or "(model)", row.site.kind]
            + [row.values.get(name) for name in names]
            + ["; ".join(row.failed) or ("yes" if row.values else "not checked")]
            for row in self.rows
        ]
        return "\n".join([self.title, "", table(header, cells), *(f"note: {note}" for note in self.notes)])


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two views start at the same element of one storage."""
    if a is None or b is None:
        return False
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset())


@contextmanager
def transaction(model: nn.Module) -> Iterator[None]:
    """Restores the parameters if the body raises."""
    before: dict[str, Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
        raise
