"""Batches of packed sequences: windows of `context` tokens, and the next token of each.

    window i of epoch e begins at (shift_e + i context) mod N,   shift_e drawn from (seed, e)

A window may contain several documents, separated by end-of-text tokens. The windows are ordered like images (`_order`),
by (seed, step). An evaluation uses windows from 0 on, so every token but the first is predicted once, up to the last
whole window; or a limited number of evenly spaced windows.
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

    `most` limits the number of sequences of an evaluation.
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
            raise BadInput(f"context is {context!r}; it must be a whole number of tokens, 1 or more")
        windows = (len(text) - 1) // context
        if windows < 1:
            raise BadInput(
                f"{text.name}: the {text.split} split has {len(text)} tokens, but context {context} needs at least "
                f"{context + 1}; use a context of at most {max(1, len(text) - 1)}, or more text"
            )
        self.text, self.batch, self.context, self.seed = text, batch, context, seed
        self.device = torch.device(device)
        self.order = Order(windows, batch, seed, unit="sequences")
        count = windows if most is None else min(most, windows)
        self.starts = numpy.arange(count) * windows // count * context  # of the evaluation windows

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
        """This process's share of each batch of steps `start_step` to `stop_step` (exclusive), in `parts` pieces."""
        check_world(self.batch, rank * parts, world * parts)
        assert self.steps_per_epoch  # if there is too little text, raises now rather than at the first batch
        return self._training(start_step, stop_step, rank, world, parts)

    def evaluate(self, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Every window once, in order; each process gets a consecutive share."""
        for part in evaluation_batches(len(self), self.batch, rank, world):
            yield self._windows(self.starts[part.start : part.stop])

    def _training(self, start_step: int, stop_step: int, rank: int, world: int, parts: int) -> Iterator[Batch]:
        for step in range(start_step, stop_step):
            rows = self.order.rows(step)
            shift = stream(GEOMETRY, self.seed, step // self.steps_per_epoch).integers(len(self.text))
            for part in range(parts):
                own = share(len(rows), rank * parts + part, world * parts)
                yield self._windows(shift + rows[own.start : own.stop] * self.context)

    def _windows(self, starts: Rows) -> Batch:
        positions = (starts[:, None] + numpy.arange(self.context + 1)) % len(self.text)
        ids = put(self.text.tokens[positions].astype(numpy.int64), self.device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
