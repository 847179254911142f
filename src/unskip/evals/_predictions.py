"""Predictions of a language model: the loss of every next token, and whether it was the likeliest.

The model maps token ids (n, context) to logits (n, context, vocabulary), or to an output with `logits`. One pass over
a text feed (`unskip.data.TextFeed`) serves all protocols that need predictions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._checks import kind_of
from unskip._modes import evaluating
from unskip.data import TextFeed
from unskip.errors import BadInput
from unskip.evals._extract import autocast
from unskip.evals._registry import Z
from unskip.evals._split import Split

_LOGITS = 2**27  # logits to convert to float32 at a time
_FEW = 30  # with fewer documents the interval is over sequences
Numbers = NDArray[numpy.float64]


@dataclass(frozen=True, eq=False)
class Predictions:
    """The loss of every next token in nats, and whether it was the likeliest, both (sequences, context)."""

    nats: Tensor
    right: Tensor
    feed: TextFeed

    @cached_property
    def places(self) -> NDArray[numpy.int64]:
        """(sequences, context): the position of every predicted token in the text."""
        return self.feed.starts[:, None] + numpy.arange(self.feed.context) + 1

    @cached_property
    def document(self) -> NDArray[numpy.int64]:
        """(sequences, context): the document index of every predicted token."""
        return self.feed.text.document(self.places)

    @cached_property
    def bytes(self) -> Numbers:
        """(sequences, context): the mean bytes per token of each token's document."""
        text = self.feed.text
        tokens = numpy.diff(text.ends, prepend=0)
        share: Numbers = (text.bytes / tokens)[self.document]
        return share

    @cached_property
    def own_context(self) -> NDArray[numpy.int64]:
        """(sequences, context): the number of preceding tokens of the same document in the context."""
        text = self.feed.text
        start = (text.ends - numpy.diff(text.ends, prepend=0))[self.document]
        own_context: NDArray[numpy.int64] = numpy.minimum(self.places - start, numpy.arange(self.feed.context) + 1)
        return own_context

    def ratio(self, above: Numbers, below: Numbers, chosen: Any = None) -> tuple[float, float, float]:
        """sum(above) / sum(below) over all or the chosen tokens, with its 95% interval.

        Tokens of one document are not independent, so the interval is that of a ratio of sums over documents (Cochran
        1977, section 2.11), or over sequences if there are few documents.
        """
        units = self.document
        if len(numpy.unique(units)) < _FEW:
            units = numpy.broadcast_to(numpy.arange(len(above))[:, None], above.shape)
        if chosen is not None:
            above, below, units = above[chosen], below[chosen], units[chosen]
        _, index = numpy.unique(units, return_inverse=True)
        y, x = (numpy.bincount(index.ravel(), each.ravel()) for each in (above, below))
        total, count = x.sum(), len(x)
        if not total:
            return math.nan, math.nan, math.nan
        value = float(y.sum() / total)
        if count < 2:
            return value, math.nan, math.nan
        half = Z * math.sqrt(float(((y - value * x) ** 2).sum()) * count / (count - 1)) / float(total)
        return value, value - half, value + half


@torch.no_grad()
def predict(model: nn.Module, part: Split) -> Predictions:
    """The predictions of a model on a split of text, gathered from all processes."""
    if not isinstance(part.feed, TextFeed):
        raise BadInput("predictions need text; pass an unskip.data.TextFeed, or evaluate a run of lm")
    nats, right = list[Tensor](), list[Tensor]()
    with evaluating(model):
        for ids, following in part.share():
            with autocast(ids.device, part.options.precision):
                logits = token_logits(model, model(ids))
            if int(following.max()) >= logits.shape[-1]:
                raise BadInput(
                    f"{type(model).__name__}: its vocabulary is {logits.shape[-1]}, but the text has token "
                    f"{int(following.max())}; use the model's tokenizer"
                )
            rows = max(1, _LOGITS // logits[0].numel())
            for chunk, true in zip(logits.split(rows), following.split(rows), strict=True):
                loss = F.cross_entropy(chunk.float().flatten(0, 1), true.flatten(), reduction="none")
                nats.append(loss.view_as(true))
                right.append(chunk.argmax(-1) == true)
    return Predictions(part.gathered(torch.cat(nats)).cpu(), part.gathered(torch.cat(right)).cpu(), part.feed)


def token_logits(model: nn.Module, output: Any) -> Tensor:
    """The logits (n, tokens, vocabulary) of an output. Raises BadInput if it has none."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise BadInput(
            f"{type(model).__name__} must return logits (sequences, tokens, vocabulary), got {kind_of(logits)}; use a "
            "language model with its head, such as GPT2LMHeadModel"
        )
    return logits
