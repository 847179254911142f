"""Mirrored pairs of units: they pass every token through an MLP, and the other units compute.

    W_up = [R; -R; S]    W_down = [gain / k Q, -gain / k Q, mix gain T]    phi(z) - phi(-z) = k z

R, Q and T are orthogonal, and S with the gain of its shape. The pairs write gain Q R x exactly, for ReLU, GELU, SiLU
and every activation with a linear odd part, as the heads of `skipless_(carry=...)` do. Not from a paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unskip.anatomy import MlpParts, Parts
from unskip.init._check import refuse
from unskip.init._draw import Draw


def pair_(part: MlpParts, gain: float, mix: float, draw: Draw) -> None:
    """Fills W_up and W_down of an MLP that `refuse_to_pair` accepts; the biases are not changed."""
    width = part.up.shape[1]
    for _, weight, size in split_pairs(part, gain, mix):
        if weight.numel():
            weight.copy_(size * draw.orthogonal(*weight.shape))
    part.up[width : 2 * width] = -part.up[:width]
    part.down[:, width : 2 * width] = -part.down[:, :width]


def split_pairs(part: MlpParts, gain: float, mix: float) -> list[tuple[str, Tensor, float]]:
    """(name, weight, size) of the drawn weights: the first half of the pairs, then the other units."""
    width, rest = part.up.shape[1], 2 * part.up.shape[1]
    wide = max((len(part.up) - rest) / width, 1.0) ** 0.5
    return [
        ("paired up", part.up[:width], 1.0),
        ("paired down", part.down[:, :width], gain / (odd_slope(part) or 1.0)),
        ("up", part.up[rest:], wide),
        ("down", part.down[:, rest:], mix * gain),
    ]


def mirrored(part: MlpParts) -> bool:
    """Whether the first 2 * width units are pairs of opposite signs."""
    width = part.up.shape[1]
    halves = [(weight[:width], weight[width : 2 * width]) for weight in (part.up, part.down.mT)]
    return all(one.shape == other.shape and torch.equal(one, -other) for one, other in halves)


def odd_slope(part: MlpParts) -> float | None:
    """k in phi(z) - phi(-z) = k z; None if the odd part of the activation is not linear."""
    if part.function is None or part.gate is not None:
        return None
    z = torch.logspace(-3, 3, 61, dtype=torch.float64)
    slopes = (part.function(z) - part.function(-z)) / z
    slope = float(slopes[-1])
    return slope if slope and bool((slopes - slope).abs().max() <= 1e-6 * abs(slope)) else None


def refuse_to_pair(chosen: Parts) -> None:
    """Raises InitError if an MLP cannot have pairs."""
    for part in chosen.mlps():
        (hidden, width), outputs = part.up.shape, len(part.down)
        if odd_slope(part) is None:
            kind = "is gated" if part.gate is not None else f"has the activation {part.activation or 'unknown'}"
            needed = "phi(z) - phi(-z) to be linear, as for ReLU, GELU and SiLU"
            refuse([part.site], f"the MLP {kind}, but mirrored units need {needed}")
        if hidden < 2 * width or outputs != width:
            needed = "twice the width and as many outputs as inputs"
            refuse([part.site], f"an MLP of widths {width}, {hidden}, {outputs} cannot have pairs, which need {needed}")
