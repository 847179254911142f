"""The order of the samples: a function of (seed, step) alone, whatever the number of processes and workers.

    epoch e = step // steps_per_epoch      permutation p_e drawn from (seed, e)
    step s takes p_e[k b : (k + 1) b]      with k = s mod steps_per_epoch and b the global batch

Process r of w takes the rows from r n / w to (r + 1) n / w of those n, so the processes together see what one would.
There is no state: any step can be asked for at any time, which is what makes a resumed run exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
from numpy.typing import NDArray

from unskip.errors import BadInput

Rows = NDArray[numpy.int64]

# What a stream of random numbers is for. Streams of different purposes never meet.
ORDER, GEOMETRY, MIXING, PIXELS, HOLD_OUT, VIEWS = range(6)


def stream(purpose: int, seed: int, *where: int) -> numpy.random.Generator:
    """Random numbers of their own for each purpose, seed and place (an epoch, a step, a position)."""
    # A seed sequence pads with zeros and cuts large numbers into words: told how many there are, and given two words of
    # each, it cannot take one place for another.
    words = [word for number in (seed, *where) for word in (number % 2**32, number >> 32)]
    return numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence([purpose, len(words), *words])))


@dataclass(frozen=True)
class Order:
    """Which of `total` samples each step takes, in batches of `batch` over all processes."""

    total: int
    batch: int
    seed: int = 0
    drop_last: bool = True

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
                f"{self.total} images do not fill one batch of {self.batch}; take a batch of at most {self.total}, "
                "or drop_last=False"
            )
        return steps

    def rows(self, step: int) -> Rows:
        """The samples of a step over all processes, (batch,) or fewer in the last step of an epoch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return _permutation(self.seed, epoch, self.total)[place * self.batch : (place + 1) * self.batch]


def share(count: int, rank: int, world: int) -> range:
    """The positions of one process among `count`."""
    return range(rank * count // world, (rank + 1) * count // world)


def check_world(batch: int, rank: int, world: int) -> None:
    """A batch is divided evenly, so that the mean over processes is the mean over the batch."""
    if world < 1 or not 0 <= rank < world:
        raise BadInput(f"rank {rank} of {world} processes; ranks go from 0 to world - 1")
    if batch % world:
        raise BadInput(f"a batch of {batch} over all processes cannot be divided evenly among {world}; take a multiple")


@lru_cache(maxsize=4)  # asked again at every step of the epoch
def _permutation(seed: int, epoch: int, total: int) -> Rows:
    rows = stream(ORDER, seed, epoch).permutation(total)
    rows.flags.writeable = False
    return rows
