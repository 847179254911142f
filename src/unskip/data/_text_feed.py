"""Batches of packed sequences: windows of `context` tokens out of one long row, and for each token the one after it.

    window i of epoch e begins at (shift_e + i context) mod N,   shift_e drawn from (seed, e)

Documents follow one another inside a window, each after the token that ends the one before it. The order of the windows
is that of images (`_order`): a function of (seed, step) alone. In an evaluation windows begin at 0, so every token but
the first is predicted once, up to the last whole window; or some windows, evenly spread, are taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import torch
from torch import Tensor

from unskip.data._device import put
from unskip.data._order import GEOMETRY, Order, Rows, check_world, evaluation_batches, share, stream
from unskip.data._text import TextSet
from unskip.errors import BadInput

Batch = tuple[Tensor, Tensor]


class TextFeed:
    """Batches of `batch` sequences over all processes: ids (n, context) and the ids that follow them, int64.

    `most` limits an evaluation to so many sequences.
    """

    def __init__(
        self,
        text: TextSet,
        batch: int,
        context: int,
        *,
        seed: int = 0,
        device: str | torch.device = "cpu",
        most: int | None = None,
    ) -> None:
        if not isinstance(context, int) or context < 1:
            raise BadInput(f"context is {context!r}; it is a whole number of tokens, 1 or more")
        windows = (len(text) - 1) // context
        if windows < 1:
            raise BadInput(
                f"{text.name}: its {text.split} split has {len(text)} tokens, and a context of {context} needs one "
                f"more; take a context of at most {max(1, len(text) - 1)}, or more text"
            )
        self.text, self.batch, self.context, self.seed = text, batch, context, seed
        self.device = torch.device(device)
        self.order = Order(windows, batch, seed, unit="sequences")
        count = windows if most is None else min(most, windows)
        self.starts = numpy.arange(count) * windows // count * context  # of the windows of an evaluation

    def __len__(self) -> int:
        """Sequences of an evaluation."""
        return len(self.starts)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the text."""
        return self.order.steps_per_epoch

    def iterate(
        self, start_step: int, stop_step: int, rank: int = 0, world: int = 1, parts: int = 1
    ) -> Iterator[Batch]:
        """The batches of the steps from `start_step` up to but without `stop_step`: this process's part of each, in so
        many `parts` one after the other."""
        check_world(self.batch, rank * parts, world * parts)
        assert self.steps_per_epoch  # raises now, not at the first batch, where there is too little text
        return self._training(start_step, stop_step, rank, world, parts)

    def evaluate(self, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Every window once, in order; of several processes each has a consecutive share."""
        for part in evaluation_batches(len(self), self.batch, rank, world):
            yield self._windows(self.starts[part.start : part.stop])

    def _training(self, start_step: int, stop_step: int, rank: int, world: int, parts: int) -> Iterator[Batch]:
        for place in range(start_step * parts, stop_step * parts):
            step, turn = divmod(place, parts)
            rows = self.order.rows(step)
            mine = share(len(rows), rank * parts + turn, world * parts)
            shift = stream(GEOMETRY, self.seed, step // self.steps_per_epoch).integers(len(self.text))
            yield self._windows(shift + rows[mine.start : mine.stop] * self.context)

    def _windows(self, starts: Rows) -> Batch:
        places = (starts[:, None] + numpy.arange(self.context + 1)) % len(self.text)
        ids = put(self.text.tokens[places].astype(numpy.int64), self.device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
