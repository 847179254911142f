"""Activations by name. A function is recognised by its values, so the model's implementation does not matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {  # names as in `Block(activation="gelu")`
    "identity": lambda x: x,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "log_sigmoid": F.logsigmoid,
    "square": torch.square,
    "abs": torch.abs,
    "sin": torch.sin,
    "squareplus": lambda x: (x + (x.square() + 4).sqrt()) / 2,
    "shifted_softplus": lambda x: F.softplus(x) - math.log(2),
}

FAR = torch.logspace(-6, 6, 49).double()
# Points at which activations are compared. A dense asymmetric part covers the nonlinear range, so no two activations
# agree on all of it; magnitudes from 1e-6 to 1e6 of both signs tell a clamp at 50 from a ReLU.
GRID = torch.cat([torch.linspace(-7.9, 8.3, 90).double(), -1.03 * FAR, FAR])


@dataclass(frozen=True, eq=False, repr=False)
class Curve:
    """An elementwise function: its values on GRID, and the operators that compute it."""

    values: Tensor  # float64
    operators: tuple[tuple[str, tuple[object, ...]], ...]  # (base name, arguments after the first)

    def __repr__(self) -> str:
        return f"Curve({', '.join(name for name, _ in self.operators) or 'nothing'})"

    @property
    def name(self) -> str | None:
        """The name of the activation with these values, or None."""
        for name, function in ACTIVATIONS.items():
            if torch.allclose(self.values, function(GRID), rtol=1e-5, atol=1e-7):
                return name
        return None
