"""The correlation map of an MLP: the cosine similarity of two output tokens as a function of that of the inputs.

    y = W_down phi(W_up z + b) + c        z, z' standard normal with correlation rho
    C(rho) = E<y, y'> / E|y|^2            C(1) = 1
    C(0)   = |E y|^2 / E|y|^2             share of the output that all tokens have in common
    C'(1)  = E|J|^2 / (E|y - E y|^2 + |E y|^2)        J the Jacobian of the MLP

With independent units, E|J|^2 = sum_i w_i^2 s_i^2 E[phi'(h_i)^2] and E|y - E y|^2 = sum_i w_i^2 Var phi(h_i), where
h_i = s_i x + b_i is the input of unit i, s_i the norm of its row in W_up, and w_i that of its column in W_down: sums
over a grid. Products of different units, which cancel in mirrored pairs, are added from sampled tokens. All in float64.
A linear map has C'(1) = 1 and C(0) = 0 and preserves all angles. Deep kernel shaping (arXiv 2110.01765) chooses
activations by this map.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unskip.anatomy._parts import MlpParts

_NUMBERS = 2**17  # entries of all sampled tokens together: an error of about 0.3%
_STEP = 1e-4  # of finite differences


class CorrelationMap(NamedTuple):
    """Two values of a correlation map."""

    slope: float  # C'(1)
    at_zero: float  # C(0)


def mean_output(part: MlpParts) -> Tensor:
    """W_down E[phi(W_up z + b)], float64: what an MLP without output bias adds to all tokens in common.

    At initialisation it is zero for a gated MLP: the two halves are independent and one has mean zero.
    """
    down = part.down.detach().double().cpu()
    if part.gate is not None or part.function is None:
        return down.new_zeros(len(down))
    up, biases = _units(part)
    sizes = up.norm(dim=1)
    points, weights = _grid()
    return torch.mv(down, part.function(sizes[:, None] * points + biases[:, None]) @ weights)


def correlation_map(part: MlpParts) -> CorrelationMap | None:
    """The correlation map of an MLP with its input norm; None if it is gated or its activation is unknown."""
    if part.gate is not None or part.function is None:
        return None
    down, (up, biases), (points, weights) = part.down.detach().double().cpu(), _units(part), _grid()
    outputs = part.function(up.norm(dim=1)[:, None] * points + biases[:, None])  # (hidden, points)
    slopes = outputs.diff() / (points[1] - points[0])  # s phi'(h), between points
    between = (-((points[1:] + points[:-1]) / 2).square() / 2).exp()
    means, columns = outputs @ weights, down.square().sum(0)
    mean = down @ means
    if part.down_bias is not None:
        mean = mean + part.down_bias.detach().double().cpu()
    shared = mean.square().sum()

    width = up.shape[1]
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(max(64, _NUMBERS // width), width, generator=draw, dtype=torch.float64) @ up.mT
    turned, inputs = _STEP * inputs.roll(1, 0), inputs + biases  # the direction of a derivative is another token
    sampled = (part.function(inputs + turned) - part.function(inputs - turned)) / (2 * _STEP)
    jacobian = columns @ (slopes.square() @ (between / between.sum())) + _products(sampled, down)
    deviations = (outputs - means[:, None]).square() @ weights
    total = columns @ deviations + _products(part.function(inputs) - means, down) + shared
    return CorrelationMap(float(jacobian / total), float(shared / total))


def _products(units: Tensor, down: Tensor) -> Tensor:
    """The mean of sum_{i != j} u_i u_j <w_i, w_j> over samples u (samples, hidden), w the columns of W_down."""
    return (units @ down.mT).square().sum(1).mean() - down.square().sum(0) @ units.square().mean(0)


def _grid() -> tuple[Tensor, Tensor]:
    """Quadrature points and weights of a standard normal variable, fine enough for kinks such as ReLU's."""
    points = torch.linspace(-8, 8, 1025, dtype=torch.float64)
    weights = (-points.square() / 2).exp()
    return points, weights / weights.sum()


def _units(part: MlpParts) -> tuple[Tensor, Tensor]:
    """W_up (hidden, width) and the bias of each unit, both with the norm's gain and bias."""
    up, norm = part.up.detach().double().cpu(), part.norm
    biases = up.new_zeros(len(up)) if part.up_bias is None else part.up_bias.detach().double().cpu()
    if norm is not None and norm.place == "pre" and norm.gain is not None and norm.gain.shape == up.shape[1:]:
        if norm.bias is not None:
            biases = biases + up @ norm.bias.detach().double().cpu()
        up = up * (norm.offset + norm.gain.detach().double().cpu())
    return up, biases
