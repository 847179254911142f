"""When each basis is refreshed: a calendar that spreads the work over the interval.

A refresh of an n x n basis costs about n^3, and mostly waits when few are done at once. So the bases are laid end to
end by size, cut into a third as many lots of equal cost as the interval has steps, and the lots placed evenly in it.
The calendar depends on nothing but the shapes, so it is the same on every rank and after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
    total = sum(face.rows * face.size**3 for face in order)
    done = 0
    for face in order:
        cost = face.size**3
        start = 0
        while start < face.rows:
            lot = min(lots * (2 * done + cost) // (2 * total), lots - 1)  # where the middle of this row falls
            stop = start
            while stop < face.rows and min(lots * (2 * done + cost) // (2 * total), lots - 1) == lot:
                done += cost
                stop += 1
            steps[lot * every // lots].append(Lot(face, start, stop))
            start = stop
    return steps
