"""When each basis is refreshed: a calendar that spreads the work over the interval.

A refresh of an n x n basis costs about n^3, and waiting that grows with n however many are done at once. So the bases
are laid end to end by size, cut into a third as many lots of equal cost as the interval has steps, and the lots placed
evenly in it. The calendar depends on nothing but the shapes, so it is the same on every rank and after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WAIT = 2 * 10**7  # the waiting, in units of n^2, on an H200
STEPS_PER_LOT = 3  # fewer lots are faster on the whole, and make the slowest step slower


class Face(NamedTuple):
    """One side of a stack: bases of one size."""

    stack: int
    side: str
    size: int
    rows: int


class Lot(NamedTuple):
    """Rows start to stop of a face."""

    face: Face
    start: int
    stop: int


def calendar(faces: Sequence[Face], every: int, stagger: bool = True) -> list[list[Lot]]:
    """For each step of the interval, the lots that are refreshed in it; all in the first unless staggered."""
    steps: list[list[Lot]] = [[] for _ in range(every)]
    order = sorted(faces, key=lambda face: -face.size)
    lots = max(1, every // STEPS_PER_LOT) if stagger else 1
    waits = [WAIT * size for size in sorted({face.size for face in order}, reverse=True)]
    total = sum(face.rows * face.size**3 for face in order) + sum(waits) + (lots - 1) * max(waits, default=0)
    lot, spent, seen = 0, 0, 0
    for face in order:
        start = 0
        for row in range(face.rows):
            cost = face.size**3 + (WAIT * face.size if face.size != seen else 0)
            if lot < lots - 1 and spent and lots * (2 * spent + cost) > 2 * total:
                if row > start:
                    steps[lot * every // lots].append(Lot(face, start, row))
                lot, spent, start = lot + 1, 0, row
                cost = face.size**3 + WAIT * face.size
            spent, seen = spent + cost, face.size
        steps[lot * every // lots].append(Lot(face, start, face.rows))
    return steps
