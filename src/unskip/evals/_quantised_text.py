"""Bits per byte of a language model whose weights and activations are rounded to few bits, without any training.

How, and what the ways mean, is that of `quantised-accuracy-v1`. A head that is tied to the embedding is one weight with
it: both are rounded.
"""

from __future__ import annotations

import copy
import itertools
import math

import torch
from torch import nn

from unskip.errors import BadInput
from unskip.evals._predictions import predict
from unskip.evals._quantised import calibrate, layers_of
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
    if min(bits) < 2:
        raise BadInput(f"quantised-bits-per-byte-v1: {min(bits)} bits; give 2 at least")
    twin = copy.deepcopy(model).eval()
    layers = [*layers_of(twin)]
    with torch.no_grad():
        calibrate(twin, layers, train, calibration)
        result = {"bits_per_byte": _bits(twin, test)}
        for width, each, way in itertools.product(bits, ("tensor", "channel"), ("minmax", "clipped")):
            hooks = [layer.round(width, each == "channel", way == "clipped") for layer in layers]
            result[f"bits_per_byte_{width}_{each}_{way}"] = _bits(twin, test)
            for hook in hooks:
                hook.remove()
    return result


def _bits(model: nn.Module, test: Split) -> float:
    found = predict(model, test)
    return found.ratio(found.nats.double().numpy(), found.bytes)[0] / math.log(2)
