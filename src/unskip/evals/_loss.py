"""The loss of a generative model on test images, with the same masks, times and noise each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unskip.evals._extract import autocast
from unskip.evals._registry import register
from unskip.evals._split import Split
from unskip.models import Flow, Interpolant, Target, normal

_GOLDEN = 0.6180339887498949  # multiples of the golden ratio, modulo 1, are evenly spread


@register(
    "reconstruction-v1",
    needs="model",
    about="The loss of a masked autoencoder, with fixed random masks.",
    whole=True,
    train=False,
)
def reconstruction_loss(model: Any, train: Split, test: Split) -> dict[str, float]:
    """The mean squared error of masked patches."""
    noise = torch.rand(len(test), model.grid.patches, generator=torch.Generator().manual_seed(0))

    def loss(images: Tensor, labels: Tensor, indices: Tensor) -> Tensor:
        mean: Tensor = model(images, noise[indices.cpu()].to(images.device)).loss
        return mean.double() * len(images)

    return _mean(test, loss)


@register(
    "flow-loss-v1",
    needs="model",
    about="The loss of a diffusion or flow model without label dropout, at evenly spread times, with fixed noise.",
    whole=True,
    train=False,
    interpolant="linear",
    target="velocity",
)
def flow_loss(model: Any, train: Split, test: Split, interpolant: Interpolant, target: Target) -> dict[str, float]:
    """The mean squared error of the predicted velocity, noise or data."""
    flow = Flow(interpolant, target, label_dropout=0.0)
    first, last = flow.ends

    def loss(values: Tensor, labels: Tensor, indices: Tensor) -> Tensor:
        time = first + (last - first) * ((indices * _GOLDEN + 0.5) % 1.0).float()
        noise = normal(0, indices, 0, values.shape[1:])
        return flow.loss(model, values, labels, 0, time=time, noise=noise).double()

    return _mean(test, loss)


def _mean(test: Split, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, float]:
    """The mean of loss(inputs, labels, indices in the split) over a split, across all processes."""
    position, total = test.start, torch.zeros((), dtype=torch.float64, device=test.options.device)
    for inputs, labels in test.share():
        indices = torch.arange(position, position + len(inputs), device=inputs.device)
        with autocast(inputs.device, test.options.precision):
            total += loss(inputs, labels, indices).sum()
        position += len(inputs)
    return {"loss": float(test.gathered(total[None]).sum()) / len(test)}
