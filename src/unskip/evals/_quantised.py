"""Accuracy of a classifier whose weights and activations are rounded to few bits, without any training.

    x_q = d (clamp(round(x / d) + z, 0, 2^bits - 1) - z),   d = (high - low) / (2^bits - 1),   z = round(-low / d)

Every linear layer and convolution computes with rounded weights on rounded inputs; sums, norms, softmax and the
products of attention stay as they are. Ranges [low, high] of the inputs come from training images. They are set

    tensor, channel    for a whole tensor, or for each output channel of a weight and each channel of an input
    minmax, clipped    as the smallest and largest value, or as the share of those with the least squared error

A scale for each channel of an input is no format that hardware multiplies in: beside the other it shows what a few
channels with large values cost. That models without residuals have fewer of them is the claim of arXiv 2605.25880.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unskip.errors import BadInput
from unskip.evals._extract import logits_of
from unskip.evals._input import check_classes
from unskip.evals._registry import register
from unskip.evals._split import Split

_ROWS = 1024  # of each layer's inputs, on which clipped ranges are searched
_SHARES = [1 - 0.025 * step for step in range(33)]  # 1 to 0.2 of the range


@register(
    "quantised-accuracy-v1",
    needs="model",
    about="Accuracy and SQNR of the logits with weights and activations rounded after training, per tensor and per "
    "channel, by the whole range and by the best part of it.",
    fractions=("accuracy*",),
    positive=("bits", "calibration"),
    bits=(8, 6, 4),
    calibration=512,  # training images
)
@torch.no_grad()
def evaluate_quantised(
    model: nn.Module, train: Split, test: Split, bits: tuple[int, ...], calibration: int
) -> dict[str, float]:
    """Rounds a copy of the model in each way."""
    check_classes("quantised-accuracy-v1", train.labels, test.labels)
    plain, result = torch.empty(0), dict[str, float]()
    for name, twin in rounded_copies(model, train, bits, calibration):
        logits = torch.cat([logits_of(twin, twin(images)).float() for images, _ in test.batches()])
        right = logits.argmax(-1) == test.labels.to(logits.device)
        result[f"accuracy{name}"] = float(right.double().mean())
        if not name:
            plain = logits.double()
            continue
        noise, signal = (float(each.square().sum()) for each in (logits.double() - plain, plain))
        result[f"sqnr{name}"] = 10 * math.log10(signal / noise) if noise else math.inf
    return result


@torch.no_grad()
def rounded_copies(
    model: nn.Module, train: Split, bits: tuple[int, ...], calibration: int
) -> Iterator[tuple[str, nn.Module]]:
    """A copy of the model as it is, "", and then rounded in each way, "_8_tensor_minmax" and so on."""
    if min(bits) < 2:
        raise BadInput(f"{min(bits)} bits: a rounded weight has 2 at least")
    twin = copy.deepcopy(model).eval()
    layers = [*_layers(twin)]
    _calibrate(twin, layers, train, calibration)
    yield "", twin
    for width, each, way in itertools.product(bits, ("tensor", "channel"), ("minmax", "clipped")):
        hooks = [layer.round(width, each == "channel", way == "clipped") for layer in layers]
        yield f"_{width}_{each}_{way}", twin
        for hook in hooks:
            hook.remove()


@dataclass(eq=False)
class _Layer:
    module: Any  # a linear layer or a convolution
    inputs: int  # the dimension of the channels of an input
    outputs: int  # the dimension of the weight that holds the channels of an output
    weight: Tensor
    low: Tensor | None = None  # of the inputs, by channel
    high: Tensor | None = None
    rows: list[Tensor] = field(default_factory=list)  # some inputs, (rows, channels)

    def watch(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        """Takes the ranges of an input, and some of its rows, into account."""
        rows = given[0].detach().float().movedim(self.inputs, -1).flatten(0, -2)
        low, high = rows.amin(0), rows.amax(0)
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        room = _ROWS - sum(len(each) for each in self.rows)
        if room > 0:
            self.rows.append(rows[:: max(1, len(rows) // room)][:room].clone())

    def round(self, bits: int, channel: bool, clipped: bool) -> Any:
        """Rounds the weight, and the inputs until the hook that this returns is removed."""
        assert self.low is not None
        assert self.high is not None
        weight = self.weight.movedim(self.outputs, -1)
        rows = weight.flatten(0, -2)
        low, high = ranges(rows, rows.amin(0), rows.amax(0), bits, channel, clipped)
        self.module.weight.copy_(rounded(weight, low, high, bits).movedim(-1, self.outputs))
        low, high = ranges(torch.cat(self.rows), self.low, self.high, bits, channel, clipped)

        def hook(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = rounded(given[0].movedim(self.inputs, -1), low, high, bits).movedim(-1, self.inputs)
            return (x.to(given[0].dtype), *given[1:])

        return self.module.register_forward_pre_hook(hook)


def _layers(model: nn.Module) -> Iterator[_Layer]:
    """The layers of a model that compute with weights."""
    for name, module in model.named_modules():
        kind: Any = module
        if isinstance(module, nn.MultiheadAttention):
            raise BadInput(
                f"{name} is an nn.MultiheadAttention, which computes its projections without "
                "layers that could be rounded; take a model of timm or transformers"
            )
        if isinstance(module, nn.Linear):
            yield _Layer(module, -1, 0, module.weight.detach().clone())
        elif isinstance(module, nn.Conv2d):
            yield _Layer(module, 1, 0, module.weight.detach().clone())
        elif type(module).__name__ == "Conv1D" and kind.weight.ndim == 2:  # of transformers, a transposed linear layer
            yield _Layer(module, -1, 1, kind.weight.detach().clone())


def _calibrate(model: nn.Module, layers: list[_Layer], train: Split, count: int) -> None:
    """Takes the ranges of every layer's inputs on `count` training images."""
    hooks = [layer.module.register_forward_pre_hook(layer.watch) for layer in layers]
    used = 0
    for images, _ in train.batches():
        model(images[: count - used])
        used += len(images)
        if used >= count:
            break
    for hook in hooks:
        hook.remove()
    layers[:] = [layer for layer in layers if layer.low is not None]  # some are not used in a forward


def rounded(x: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    """x at the nearest of 2^bits levels from low to high, one of which is 0."""
    most = 2**bits - 1
    step = ((high - low) / most).clamp_min(torch.finfo(torch.float32).tiny)
    zero = (-low / step).round().clamp(0, most)
    result: Tensor = step * (((x.float() / step).round() + zero).clamp(0, most) - zero)
    return result


def ranges(rows: Tensor, low: Tensor, high: Tensor, bits: int, channel: bool, clipped: bool) -> tuple[Tensor, Tensor]:
    """The range of rows (n, channels) from the least and largest value of each channel; 0 always lies in it."""
    low, high = low.clamp_max(0), high.clamp_min(0)
    if not channel:
        low, high = low.amin(), high.amax()
    if not clipped:
        return low, high
    errors = []
    for share in _SHARES:
        error = (rows - rounded(rows, share * low, share * high, bits)).square()
        errors.append(error.sum(0) if channel else error.sum())
    best = torch.tensor(_SHARES, device=rows.device)[torch.stack(errors).argmin(0)]
    return best * low, best * high
