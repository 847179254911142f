"""Bits per byte of a language model after post-training quantisation of weights and activations to few bits.

The rounding is that of `quantised-accuracy-v1`. If the head is tied to the embedding, both are rounded.
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
    about="Bits per byte with weights and activations rounded after training, per tensor and per channel, with the "
    "whole range or the best part of it.",
    whole=True,
    positive=("bits", "calibration"),
    bits=(8, 4),
    calibration=64,  # training sequences
)
def evaluate_quantised_text(
    model: nn.Module, train: Split, test: Split, bits: tuple[int, ...], calibration: int
) -> dict[str, float]:
    """The bits per byte of a copy of the model, rounded in each way."""
    result = {}
    for name, rounded_model in rounded_copies(model, train, bits, calibration):
        predictions = predict(rounded_model, test)
        nats = predictions.nats.double().numpy()
        result[f"bits_per_byte{name}"] = predictions.ratio(nats, predictions.bytes)[0] / math.log(2)
    return result
