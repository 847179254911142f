"""Bits per byte and perplexity of a language model, overall, by position and by context length.

    bits per byte = sum of losses in nats / (ln 2 * bytes of the text)      perplexity = exp(loss per token in nats)

Bits per byte are comparable between models with different tokenizers; perplexities are not. The token that ends a
document is predicted too, and has no bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy

from unskip.evals._predictions import Numbers, Predictions
from unskip.evals._registry import register
from unskip.evals._split import Split

_Number = tuple[float, float, float]


@register(
    "bits-per-byte-v1",
    needs="predictions",
    about="Bits per byte of the text, perplexity and loss per token, with intervals over documents.",
    train=False,
)
def evaluate_bits(train: Split, test: Split) -> dict[str, Any]:
    loss, bits = _numbers(test.predictions)
    return {"bits_per_byte": bits, "perplexity": _exp(loss), "loss": loss}


@register(
    "bits-per-byte-by-context-v1",
    needs="predictions",
    about="Bits per byte and perplexity by position in the sequence, and by the number of preceding tokens of the "
    "same document.",
    train=False,
)
def evaluate_by_context(train: Split, test: Split) -> dict[str, Any]:
    """In ranges that double: `position_8` covers tokens with 8 to 15 tokens before them, `context_8` those with 8 to
    15 before them in their document.
    """
    predictions: Predictions = test.predictions
    before = numpy.broadcast_to(numpy.arange(predictions.feed.context) + 1, predictions.own_context.shape)
    result: dict[str, _Number] = {}
    for name, counts in (("position", before), ("context", predictions.own_context)):
        for low in (0, *(2**power for power in range(predictions.feed.context.bit_length()))):
            chosen = (counts >= low) & (counts < max(1, 2 * low))
            if chosen.any():
                loss, bits = _numbers(predictions, chosen)
                result[f"bits_per_byte_{name}_{low}"] = bits
                result[f"perplexity_{name}_{low}"] = _exp(loss)
    return result


def _numbers(predictions: Predictions, chosen: Any = None) -> tuple[_Number, _Number]:
    """The loss per token and the bits per byte, each with its interval."""
    nats: Numbers = predictions.nats.double().numpy()
    bits, low, high = (each / math.log(2) for each in predictions.ratio(nats, predictions.bytes, chosen))
    return predictions.ratio(nats, numpy.ones_like(nats), chosen), (bits, low, high)


def _exp(loss: _Number) -> _Number:
    """Perplexity; infinite if exp would overflow."""
    value, low, high = (math.exp(each) if each < 700 else math.inf for each in loss)
    return value, low, high
