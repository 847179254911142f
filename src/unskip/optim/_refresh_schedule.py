"""The refresh schedule of the bases, which spreads the work over the interval.

A refresh of an n x n basis costs about n^3, plus a latency that grows with n and not with the number of bases in the
batch. So bases of one size stay together as far as the load can be balanced over a third of the steps of an interval.
The schedule depends only on the shapes, so it is the same on every rank and after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

WAIT = 2 * 10**7  # latency per vector of a basis, in operations of an H200
STEPS_PER_CHUNK = 3  # more: faster on average, but the slowest step is slower


class Side(NamedTuple):
    """One side of a stack of matrices, left or right: bases of one size."""

    stack: int
    name: str
    size: int
    rows: int


class Chunk(NamedTuple):
    """Rows start to stop of a side."""

    side: Side
    start: int
    stop: int


def refresh_schedule(sides: Sequence[Side], every: int, stagger: bool = True) -> list[list[Chunk]]:
    """The chunks to refresh in each step of the interval; all in the first step unless staggered."""
    steps: list[list[Chunk]] = [[] for _ in range(every)]
    sizes = sorted({side.size for side in sides}, reverse=True)
    rows = {size: [(side, row) for side in sides if side.size == size for row in range(side.rows)] for size in sizes}
    slots = max(1, every // STEPS_PER_CHUNK) if stagger else 1
    share = sum(_cost(size, len(rows[size])) for size in sizes) / slots
    load = [0] * slots
    for size in sizes:
        # Equal parts of about one share each, the largest size first, into the slot with the least load.
        parts = min(max(1, round(_cost(size, len(rows[size])) / share)), len(rows[size]))
        for part in range(parts):
            members = rows[size][part * len(rows[size]) // parts : (part + 1) * len(rows[size]) // parts]
            slot = load.index(min(load))
            load[slot] += _cost(size, len(members))
            for side, group in groupby(members, key=lambda pair: pair[0]):
                numbers = [row for _, row in group]
                steps[slot * every // slots].append(Chunk(side, numbers[0], numbers[-1] + 1))
    return steps


def _cost(size: int, rows: int) -> int:
    return rows * size**3 + WAIT * size
