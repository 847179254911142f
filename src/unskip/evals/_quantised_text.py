"""Bits per byte of a language model whose weights and activations are rounded to few bits, without any training.

How, and what the ways mean, is that of `quantised-accuracy-v1`. A head that is tied to the embedding is one weight with
it: both are rounded.
"""

from __future__ import annotations

import math

from torch import nn

from unskip.evals._predictions import predict
from unskip.evals._quantised import rounded_copies
from unskip.evals._registry import register
from unskip.evals._split import Split


@register(
    "quantised-bits-per-byte-v1",
    needs="model",
    about="Bits per byte with weights and activations rounded after training, per tensor and per channel, by the whole "
    "range and by the best part of it.",
    whole=True,
    positive=("bits", "calibration"),
    bits=(8, 4),
    calibration=64,  # training sequences
)
def evaluate_quantised_text(
    model: nn.Module, train: Split, test: Split, bits: tuple[int, ...], calibration: int
) -> dict[str, float]:
    """Rounds a copy of the model in each way."""
    result = {}
    for name, twin in rounded_copies(model, train, bits, calibration):
        predictions = predict(twin, test)
        nats = predictions.nats.double().numpy()
        result[f"bits_per_byte{name}"] = predictions.ratio(nats, predictions.bytes)[0] / math.log(2)
    return result
