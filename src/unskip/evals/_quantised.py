"""Accuracy of a classifier after post-training quantisation of weights and activations to few bits.

    x_q = d (clamp(round(x / d) + z, 0, 2^bits - 1) - z),   d = (high - low) / (2^bits - 1),   z = round(-low / d)

Every linear layer and convolution computes with rounded weights on rounded inputs; sums, norms, softmax and the
products of attention stay unchanged. Ranges [low, high] of the inputs are calibrated on training images. They are set

    tensor, channel    for a whole tensor, or for each output channel of a weight and each channel of an input
    minmax, clipped    to the smallest and largest value, or to the fraction of them with the least squared error

Hardware cannot multiply with a scale for each input channel; the comparison shows the cost of a few channels with
large values. arXiv 2605.25880 claims that models without residuals have fewer of them.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unskip._warn import warn
from unskip._words import some
from unskip.errors import BadInput
from unskip.evals._extract import logits_of
from unskip.evals._input import check_classes
from unskip.evals._registry import register
from unskip.evals._split import Split

_WIDEST = 16  # bits; beyond, values outside the calibrated ranges and float32 itself cost more than rounding
_ROWS = 1024  # rows of each layer's inputs for the search of clipped ranges
_FRACTIONS = [1 - 0.025 * step for step in range(33)]  # of the range, 1 to 0.2


@register(
    "quantised-accuracy-v1",
    needs="model",
    about="Accuracy and SQNR of the logits with weights and activations rounded after training, per tensor and per "
    "channel, with the whole range or the best part of it.",
    fractions=("accuracy*",),
    positive=("bits", "calibration"),
    bits=(8, 6, 4),
    calibration=512,  # training images
)
@torch.no_grad()
def evaluate_quantised(
    model: nn.Module, train: Split, test: Split, bits: tuple[int, ...], calibration: int
) -> dict[str, float]:
    """The accuracy of a copy of the model, rounded in each way."""
    check_classes("quantised-accuracy-v1", train.labels, test.labels)
    found, known = len(train.labels[:calibration].unique()), len(train.labels.unique())
    if 4 * found < min(known, calibration):
        warn(
            f"quantised-accuracy-v1: ranges are calibrated on the first {calibration} training images, which have "
            f"{found} of {known} classes; shuffle the training images, or change calibration to {len(train)} for all"
        )
    plain, result = torch.empty(0), dict[str, float]()
    for name, rounded_model in rounded_copies(model, train, bits, calibration):
        logits = torch.cat([logits_of(rounded_model, rounded_model(images)) for images, _ in test.batches()])
        correct = logits.argmax(-1) == test.labels.to(logits.device)
        result[f"accuracy{name}"] = float(correct.double().mean())
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
    """A copy of the model, first unchanged, named "", then rounded in each way, named "_8_tensor_minmax" etc."""
    wrong = [width for width in bits if not 2 <= width <= _WIDEST]
    if wrong:
        raise BadInput(f"{wrong[0]} bits: weights and activations can be rounded to 2 to {_WIDEST} bits")
    twin = copy.deepcopy(model).eval()
    layers = [*_layers(twin)]
    _calibrate(twin, layers, train, calibration)
    yield "", twin
    for width, scale, limits in itertools.product(bits, ("tensor", "channel"), ("minmax", "clipped")):
        hooks = [layer.round(width, scale == "channel", limits == "clipped") for layer in layers]
        yield f"_{width}_{scale}_{limits}", twin
        for hook in hooks:
            hook.remove()


class _Read(TorchDispatchMode):
    """Collects the ids of tensors that operators read."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ids = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ids |= {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class _Layer:
    name: str
    module: Any  # a linear layer or a convolution
    inputs: int  # the channel dimension of an input
    outputs: int  # the dimension of output channels in the weight
    weight: Tensor
    low: Tensor | None = None  # smallest input of each channel
    high: Tensor | None = None
    rows: list[Tensor] = field(default_factory=list)  # a sample of the inputs, (rows, channels)

    def observe(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """A hook that updates the ranges of the inputs and the sample of rows."""
        rows = arguments[0].detach().float().movedim(self.inputs, -1).flatten(0, -2)
        low, high = rows.amin(0), rows.amax(0)
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)
        missing = _ROWS - sum(len(each) for each in self.rows)
        if missing > 0:
            self.rows.append(rows[:: max(1, len(rows) // missing)][:missing].clone())

    def round(self, bits: int, channel: bool, clipped: bool) -> Any:
        """Rounds the weight, and the inputs until the returned hook is removed."""
        assert self.low is not None
        assert self.high is not None
        weight = self.weight.movedim(self.outputs, -1)
        rows = weight.flatten(0, -2)
        low, high = ranges(rows, rows.amin(0), rows.amax(0), bits, channel, clipped)
        self.module.weight.copy_(rounded(weight, low, high, bits).movedim(-1, self.outputs))
        low, high = ranges(torch.cat(self.rows), self.low, self.high, bits, channel, clipped)

        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = rounded(arguments[0].movedim(self.inputs, -1), low, high, bits).movedim(-1, self.inputs)
            return (x.to(arguments[0].dtype), *arguments[1:])

        return self.module.register_forward_pre_hook(hook)


def _layers(model: nn.Module) -> Iterator[_Layer]:
    """The linear layers and convolutions of a model."""
    module: Any
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            raise BadInput(
                f"{name} is an nn.MultiheadAttention, which does not call layers for its projections, so they cannot "
                "be rounded; use a model of timm or transformers"
            )
        if isinstance(module, nn.Linear):
            yield _Layer(name, module, -1, 0, module.weight.detach().clone())
        elif isinstance(module, nn.Conv2d):
            yield _Layer(name, module, 1, 0, module.weight.detach().clone())
        elif type(module).__name__ == "Conv1D" and module.weight.ndim == 2:  # transformers' transposed linear layer
            yield _Layer(name, module, -1, 1, module.weight.detach().clone())


def _calibrate(model: nn.Module, layers: list[_Layer], train: Split, count: int) -> None:
    """Observes the inputs of every layer on `count` training images, and drops layers that the model does not use."""
    hooks = [layer.module.register_forward_pre_hook(layer.observe) for layer in layers]
    used = 0
    read = _Read()
    for images, _ in train.batches():
        with read:
            model(images[: count - used])
        used += len(images)
        if used >= count:
            break
    for hook in hooks:
        hook.remove()
    around = [layer.name for layer in layers if layer.low is None and id(layer.module.weight) in read.ids]
    if around:
        raise BadInput(
            f"{some(around, 1)}: the model uses the weight without calling its layer, so it cannot be rounded; use a "
            "model whose attention calls its layers, such as a ViT of timm or transformers"
        )
    layers[:] = [layer for layer in layers if layer.low is not None]


def rounded(x: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    """x rounded to the nearest of 2^bits levels from low to high, one of which is 0."""
    most = 2**bits - 1
    step = ((high - low) / most).clamp_min(torch.finfo(torch.float32).tiny)
    zero = (-low / step).round().clamp(0, most)
    result: Tensor = step * (((x.float() / step).round() + zero).clamp(0, most) - zero)
    return result


def ranges(rows: Tensor, low: Tensor, high: Tensor, bits: int, channel: bool, clipped: bool) -> tuple[Tensor, Tensor]:
    """The range for rows (n, channels), from the smallest and largest value of each channel; it always includes 0."""
    low, high = low.clamp_max(0), high.clamp_min(0)
    if not channel:
        low, high = low.amin(), high.amax()
    if not clipped:
        return low, high
    errors = []
    for fraction in _FRACTIONS:
        error = (rows - rounded(rows, fraction * low, fraction * high, bits)).square()
        errors.append(error.sum(0) if channel else error.sum())
    best = torch.tensor(_FRACTIONS, device=rows.device)[torch.stack(errors).argmin(0)]
    return best * low, best * high
