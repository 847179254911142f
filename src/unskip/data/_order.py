"""The order of the samples: a function of (seed, step) alone, whatever the number of processes and workers.

    epoch e = step // steps_per_epoch      permutation p_e drawn from (seed, e)
    step s takes p_e[k b : (k + 1) b]      with k = s mod steps_per_epoch and b the global batch

Rows of parquet files can only be read by the group. There the groups are permuted, laid end to end and cut into windows
of WINDOW bytes. The rows of a group are permuted and spread over their window: the i-th of n at time (i + u) / n, u
uniform in [0, 1). p_e is the rows by window and time. The rows of a step are then sorted by the place of their group in
its window: a process, which takes a contiguous part of every batch, reads its own groups of a window and few others.

Process r of w takes the rows from r n / w to (r + 1) n / w of those n, so the processes together see what one would.
There is no state: any step can be asked for at any time, which is what makes a resumed run exact.
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

# What a stream of random numbers is for. Streams of different purposes never meet.
ORDER, GEOMETRY, MIXING, PIXELS, HOLD_OUT, VIEWS, REPLACED = range(7)

WINDOW = 2**26  # bytes of encoded images that rows in groups are permuted among, over all processes


def stream(purpose: int, seed: int, *where: int) -> numpy.random.Generator:
    """Random numbers of their own for each purpose, seed and place (an epoch, a step, a position)."""
    # A seed sequence pads with zeros and cuts large numbers into words: told how many there are, and given two words of
    # each, it cannot take one place for another.
    words = [word for number in (seed, *where) for word in (number % 2**32, number >> 32)]
    return numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence([purpose, len(words), *words])))


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows that are read together: the group of each row, and the bytes of each group."""

    of: NDArray[numpy.int32]  # (rows,)
    bytes: Rows  # (groups,)


@dataclass(frozen=True)
class Order:
    """Which of `total` samples each step takes, in batches of `batch` over all processes."""

    total: int
    batch: int
    seed: int = 0
    drop_last: bool = True
    groups: Groups | None = None
    unit: str = "images"  # what the samples are, for messages

    def __post_init__(self) -> None:
        for name, low in (("batch", 1), ("seed", 0)):
            value: Any = getattr(self, name)
            if not isinstance(value, int) or not low <= value < 2**64:
                raise BadInput(f"{name} is {value!r}; it is a whole number of {low} or more, below 2**64")

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the set; a last short one counts unless drop_last."""
        steps = self.total // self.batch if self.drop_last else -(-self.total // self.batch)
        if not steps:
            raise BadInput(
                f"{self.total} {self.unit} do not fill one batch of {self.batch}; take a batch of at most "
                f"{self.total}{'' if self.unit == 'images' else ', or a shorter context'}"
            )
        return steps

    def rows(self, step: int) -> Rows:
        """The samples of a step over all processes, (batch,) or fewer in the last step of an epoch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        rows, before = _permutation(self.seed, epoch, self.total, self.groups)
        chosen = rows[place * self.batch : (place + 1) * self.batch]
        if self.groups is None:
            return chosen
        return chosen[numpy.argsort(before[self.groups.of[chosen]] % WINDOW, kind="stable")]


def share(count: int, rank: int, world: int) -> range:
    """The positions of one process among `count`."""
    return range(rank * count // world, (rank + 1) * count // world)


def evaluation_batches(count: int, batch: int, rank: int, world: int) -> list[range]:
    """The consecutive positions of one process among `count`, in batches of about batch / world.

    Every process has as many batches, because a sharded model is evaluated by all of them together; none is empty.
    """
    check_world(world, rank, world)
    if world == 1:
        return [range(start, min(start + batch, count)) for start in range(0, count, batch)]
    mine, least = share(count, rank, world), count // world
    parts = max(1, min(math.ceil(count / world / max(1, batch // world)), least))
    found = [share(len(mine), part, parts) for part in range(parts)]
    return [mine[part.start : part.stop] for part in found if len(part)]


def check_world(batch: int, rank: int, world: int) -> None:
    """A batch is divided evenly, so that the mean over processes is the mean over the batch."""
    if world < 1 or not 0 <= rank < world:
        raise BadInput(f"rank {rank} of {world} processes; ranks go from 0 to world - 1")
    if batch % world:
        raise BadInput(f"a batch of {batch} over all processes cannot be divided evenly among {world}; take a multiple")


@lru_cache(maxsize=4)  # asked again at every step of the epoch
def _permutation(seed: int, epoch: int, total: int, groups: Groups | None) -> tuple[Rows, Rows]:
    """The rows of an epoch, and for each group the bytes of the groups before it."""
    random = stream(ORDER, seed, epoch)
    before = numpy.zeros(0 if groups is None else len(groups.bytes), numpy.int64)
    if groups is not None:
        turns = random.permutation(len(before))
        before[turns] = numpy.cumsum(groups.bytes[turns]) - groups.bytes[turns]
    rows = random.permutation(total)
    if groups is not None:
        # In few arrays at a time: each has 8 bytes for every image.
        of = groups.of[rows]
        counts = numpy.bincount(of, minlength=len(before))
        time = numpy.empty(total)
        time[numpy.argsort(of, kind="stable")] = numpy.arange(total)
        time -= (counts.cumsum() - counts)[of]  # how many of its group come before
        time += random.random(total)
        time /= counts[of]
        time += (before // WINDOW)[of]
        rows = rows[numpy.argsort(time, kind="stable")]
    rows.flags.writeable = False
    return rows, before
