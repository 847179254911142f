"""The order of the samples: a function of (seed, step), independent of the number of processes and workers.

    epoch e = step // steps_per_epoch      permutation p_e drawn from (seed, e)
    step s uses p_e[k b : (k + 1) b]       with k = s mod steps_per_epoch and b the global batch

Parquet files are read by the row group. For them the groups are permuted, concatenated and cut into windows of WINDOW
bytes. The rows of a group are permuted and spread over their window: the i-th of n at time (i + u) / n, u uniform in
[0, 1). p_e sorts the rows by window and time. The rows of a step are then sorted by the position of their group in its
window, so a process, which has a contiguous part of every batch, reads its own groups of a window and few others.

Process r of w has the rows from r n / w to (r + 1) n / w of the n rows of a step, so all processes together have the
rows that one would have. There is no state: any step can be computed at any time, so a resumed run is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
from numpy.typing import NDArray

from unskip.errors import BadInput

Rows = NDArray[numpy.int64]

# Purposes of random streams. Streams of different purposes are independent.
ORDER, GEOMETRY, MIXING, PIXELS, HOLD_OUT, VIEWS, REPLACED = range(7)

WINDOW = 2**26  # bytes of encoded images among which grouped rows are permuted, over all processes


def stream(purpose: int, seed: int, *where: int) -> numpy.random.Generator:
    """An independent generator for each purpose, seed and index (such as an epoch, or a step and a position)."""
    # SeedSequence pads with zeros and splits large numbers into words. With two words per number, and their count in
    # front, different arguments cannot collide.
    words = [word for number in (seed, *where) for word in (number % 2**32, number >> 32)]
    return numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence([purpose, len(words), *words])))


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows that are read together: the group of each row, and the bytes of each group."""

    of: NDArray[numpy.int32]  # (rows,)
    bytes: Rows  # (groups,)


@dataclass(frozen=True)
class Order:
    """The samples of each step, out of `total`, in batches of `batch` over all processes."""

    total: int
    batch: int
    seed: int = 0
    drop_last: bool = True
    groups: Groups | None = None
    unit: str = "images"  # the word for samples in messages

    def __post_init__(self) -> None:
        for name, low in (("batch", 1), ("seed", 0)):
            value: Any = getattr(self, name)
            if not isinstance(value, int) or not low <= value < 2**64:
                raise BadInput(f"{name} is {value!r}; it must be a whole number of {low} or more, below 2**64")

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the set; a short last batch counts unless drop_last."""
        steps = self.total // self.batch if self.drop_last else -(-self.total // self.batch)
        if not steps:
            raise BadInput(
                f"{self.total} {self.unit} do not fill one batch of {self.batch}; take a batch of at most "
                f"{self.total}{'' if self.unit == 'images' else ', or a shorter context'}"
            )
        return steps

    def rows(self, step: int) -> Rows:
        """The samples of a step over all processes, (batch,) or fewer in the last step of an epoch."""
        epoch, index = divmod(step, self.steps_per_epoch)
        rows, before = _permutation(self.seed, epoch, self.total, self.groups)
        chosen = rows[index * self.batch : (index + 1) * self.batch]
        if self.groups is None:
            return chosen
        return chosen[numpy.argsort(before[self.groups.of[chosen]] % WINDOW, kind="stable")]


def share(count: int, rank: int, world: int) -> range:
    """The positions of one process among `count`."""
    return range(rank * count // world, (rank + 1) * count // world)


def evaluation_batches(count: int, batch: int, rank: int, world: int) -> list[range]:
    """The consecutive positions of one process among `count`, in batches of about batch / world.

    A sharded model is evaluated by all processes together, so all have the same number of batches; none is empty.
    """
    check_world(world, rank, world)
    if world == 1:
        return [range(start, min(start + batch, count)) for start in range(0, count, batch)]
    own, least = share(count, rank, world), count // world
    parts = max(1, min(math.ceil(count / world / max(1, batch // world)), least))
    pieces = [share(len(own), part, parts) for part in range(parts)]
    return [own[piece.start : piece.stop] for piece in pieces if len(piece)]


def check_world(batch: int, rank: int, world: int) -> None:
    """Raises unless `batch` divides evenly among the processes: then the mean over processes is that of the batch."""
    if world < 1 or not 0 <= rank < world:
        raise BadInput(f"rank {rank} of {world} processes; ranks go from 0 to world - 1")
    if batch % world:
        raise BadInput(f"a batch of {batch} over all processes cannot be divided evenly among {world}; use a multiple")


@lru_cache(maxsize=4)  # called at every step of an epoch
def _permutation(seed: int, epoch: int, total: int, groups: Groups | None) -> tuple[Rows, Rows]:
    """The rows of an epoch, and for each group the bytes of the groups before it."""
    random = stream(ORDER, seed, epoch)
    if groups is None:
        rows, before = random.permutation(total), numpy.zeros(0, numpy.int64)
    else:
        before = numpy.empty(len(groups.bytes), numpy.int64)
        order = random.permutation(len(before))
        before[order] = numpy.cumsum(groups.bytes[order]) - groups.bytes[order]
        rows = random.permutation(total)
        of = groups.of[rows]
        counts = numpy.bincount(of, minlength=len(before))
        # In place, to save memory: every array has 8 bytes per image.
        time = numpy.empty(total)
        time[numpy.argsort(of, kind="stable")] = numpy.arange(total)
        time -= (counts.cumsum() - counts)[of]  # the rank of the row in its group
        time += random.random(total)
        time /= counts[of]
        time += (before // WINDOW)[of]
        rows = rows[numpy.argsort(time, kind="stable")]
    rows.flags.writeable = False
    return rows, before
