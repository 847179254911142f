"""When each basis is refreshed: a schedule that spreads the work over the interval.

A refresh of an n x n basis costs about n^3, and waiting that grows with n however many are done at once. So bases of
one size stay together as far as the load can be balanced over a third of the steps of an interval. The schedule depends
on nothing but the shapes, so it is the same on every rank and after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

WAIT = 2 * 10**7  # operations that an H200 could do while it waits, for each vector of a basis
STEPS_PER_CHUNK = 3  # fewer steps with refreshes are faster on the whole, and make the slowest step slower


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
    """For each step of the interval, the chunks that are refreshed in it; all in the first unless staggered."""
    steps: list[list[Chunk]] = [[] for _ in range(every)]
    sizes = sorted({side.size for side in sides}, reverse=True)
    rows = {size: [(side, row) for side in sides if side.size == size for row in range(side.rows)] for size in sizes}
    slots = max(1, every // STEPS_PER_CHUNK) if stagger else 1
    share = sum(_cost(size, len(rows[size])) for size in sizes) / slots
    load = [0] * slots
    for size in sizes:
        # As many equal parts as there are shares in it; the parts go where least has to be done yet, the heavy first.
        parts = min(max(1, round(_cost(size, len(rows[size])) / share)), len(rows[size]))
        for part in range(parts):
            mine = rows[size][part * len(rows[size]) // parts : (part + 1) * len(rows[size]) // parts]
            slot = load.index(min(load))
            load[slot] += _cost(size, len(mine))
            for side, group in groupby(mine, key=lambda pair: pair[0]):
                numbers = [row for _, row in group]
                steps[slot * every // slots].append(Chunk(side, numbers[0], numbers[-1] + 1))
    return steps


def _cost(size: int, rows: int) -> int:
    return rows * size**3 + WAIT * size
