"""Activations by name. A function is recognised by its values, so it does not matter how a model spells it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {  # by name, as in `Block(activation="gelu")`
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
# Where activations are compared: spread over where they bend, and not symmetric, so that no two of them agree on all of
# it; and from 1e-6 to 1e6 on both sides, so that a clamp at 50 is not taken for a ReLU.
GRID = torch.cat([torch.linspace(-7.9, 8.3, 90).double(), -1.03 * FAR, FAR])


@dataclass(frozen=True, eq=False, repr=False)
class Curve:
    """A function of each entry alone: its values on GRID, and the operators that compute it."""

    values: Tensor  # float64
    operators: tuple[tuple[str, tuple[object, ...]], ...]  # by base name, with their arguments but the first

    def __repr__(self) -> str:
        return f"Curve({', '.join(name for name, _ in self.operators) or 'nothing'})"

    @property
    def name(self) -> str | None:
        """The name of the activation that takes these values, or None."""
        return name_of(self.values)


def name_of(values: Tensor) -> str | None:
    """The name of the activation that takes these values on GRID, or None."""
    for name, function in ACTIVATIONS.items():
        if torch.allclose(values, function(GRID), rtol=1e-5, atol=1e-7):
            return name
    return None
