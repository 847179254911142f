"""Activations, and the properties of each that a verdict may use.

An activation phi has a linear odd part ("class O") if

    phi(z) - phi(-z) = c z,  c != 0        that is        phi(z) = (c / 2) z + e(z) with e even.

Flipping the sign of a unit's row and bias then changes the block by an affine map only. The verdict `impossible` also
needs a proof that the functions e(u.x + b) satisfy no linear relations beyond the obvious ones. This is proved for each
activation in this file separately, so a registered one leads only to `possible` or `undecided`.

Paper: "Can an MLP Absorb Its Own Skip Connection?" (arXiv 2604.23705).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from unskip._words import nearest
from unskip.anatomy import ACTIVATIONS
from unskip.errors import BadInput

Family = Literal["odd-linear", "linear", "bounded", "elu", "mish", "even", "power", "other"]


@dataclass(frozen=True)
class Activation:
    """An elementwise function and its properties. Only this module sets `trusted`."""

    name: str
    function: Callable[[Tensor], Tensor]
    family: Family = "other"
    odd: Fraction | None = None  # c of class O
    homogeneous: bool = False  # phi(r z) = r phi(z) for r > 0
    analytic: bool = False  # on all of R
    at_zero: float = math.nan  # phi(0)
    note: str = ""
    trusted: bool = False


def _softplus(beta: float) -> Callable[[Tensor], Tensor]:
    # torch's own softplus is the identity beyond 20 / beta, an error of 2e-9 / beta in the odd part.
    return lambda x: x.clamp(min=0) + torch.log1p(torch.exp(-beta * x.abs())) / beta  # beta x may overflow


def _shifted_softplus(x: Tensor) -> Tensor:
    """log((1 + e^x) / 2) = x / 2 + log cosh(x / 2), without cancellation at 0.

    softplus(x) - log 2 has an error of 1e-16 there, as large as the value itself for tiny weights.
    """
    half = x / 2
    small = torch.log1p(2 * torch.sinh(half.clamp(-2, 2) / 2).square())
    large = half.abs() + torch.log1p(torch.exp(-2 * half.abs())) - math.log(2)
    return half + torch.where(half.abs() <= 1, small, large)


_THRESHOLD = "torch's softplus is the identity beyond its threshold, so its odd part is linear only up to 2e-9 / beta"


def _trusted(name: str, family: Family, at_zero: float = 0.0, **others: Any) -> Activation:
    facts = {"function": ACTIVATIONS.get(name), **others}
    return Activation(name, family=family, at_zero=at_zero, trusted=True, **facts)


def _class_o(name: str, at_zero: float = 0.0, **others: Any) -> Activation:
    return _trusted(name, "odd-linear", at_zero, **{"odd": Fraction(1), "analytic": True, **others})


def _number(name: str, value: float, positive: bool = False) -> float:
    if not math.isfinite(value) or (positive and value <= 0):
        raise BadInput(f"activation {name}:{value}: the number must be {'positive' if positive else 'finite'}")
    return value


def _number_text(value: float) -> str:
    return repr(float(value)).removesuffix(".0")


def _leaky(slope: float) -> Activation:
    name = f"leaky_relu:{_number_text(_number('leaky_relu', slope))}"
    base = Activation(name, lambda x: torch.where(x > 0, x, slope * x), homogeneous=True, at_zero=0.0, trusted=True)
    if slope == 1:
        return replace(base, family="linear", odd=Fraction(2), analytic=True)
    if slope == -1:
        return replace(base, family="even")
    return replace(base, family="odd-linear", odd=1 + Fraction(slope))


def _swish(beta: float) -> Activation:
    base = replace(
        _class_o("silu"),
        name=f"silu:{_number_text(_number('silu', beta))}",
        function=lambda x: x * torch.sigmoid(beta * x),
    )
    return replace(base, family="linear", homogeneous=True) if beta == 0 else base  # z / 2


def _elu(alpha: float) -> Activation:
    if _number("elu", alpha) == 0:
        return replace(BUILT_IN["relu"], name="elu:0")
    return _trusted(f"elu:{_number_text(alpha)}", "elu", function=lambda x: F.elu(x, alpha))


def _celu(alpha: float) -> Activation:
    _number("celu", alpha, positive=True)
    return replace(BUILT_IN["celu"], name=f"celu:{_number_text(alpha)}", function=lambda x: F.celu(x, alpha))


def _softplus_beta(beta: float) -> Activation:
    _number("softplus", beta, positive=True)
    base = replace(BUILT_IN["softplus"], name=f"softplus:{_number_text(beta)}", function=_softplus(beta))
    return replace(base, at_zero=math.log(2) / beta)


def _hardtanh(low: float, high: float) -> Activation:
    if not _number("hardtanh", low) < _number("hardtanh", high):
        raise BadInput(f"activation hardtanh:{low:g},{high:g}: the first number must be below the second")
    name = f"hardtanh:{_number_text(low)},{_number_text(high)}"
    return _trusted(name, "bounded", min(max(0.0, low), high), function=lambda x: x.clamp(low, high))


BUILT_IN: dict[str, Activation] = {
    "identity": replace(_leaky(1.0), name="identity", function=ACTIVATIONS["identity"]),
    "relu": replace(_leaky(0.0), name="relu", function=ACTIVATIONS["relu"]),
    "leaky_relu": replace(_leaky(0.01), name="leaky_relu"),
    "gelu": _class_o("gelu"),
    "gelu_tanh": _class_o("gelu_tanh"),
    "quick_gelu": _class_o("quick_gelu"),
    "silu": _class_o("silu"),
    "softplus": _class_o("softplus", math.log(2), function=_softplus(1.0), note=_THRESHOLD),
    "shifted_softplus": _class_o("shifted_softplus", function=_shifted_softplus, note=_THRESHOLD),
    "squareplus": _class_o("squareplus", 1.0),
    "log_sigmoid": _class_o("log_sigmoid", -math.log(2)),
    "hardswish": _class_o("hardswish", analytic=False),
    "tanh": _trusted("tanh", "bounded", analytic=True),
    "sigmoid": _trusted("sigmoid", "bounded", 0.5, analytic=True),
    "sin": _trusted("sin", "bounded", analytic=True),
    "softsign": _trusted("softsign", "bounded"),
    "relu6": _trusted("relu6", "bounded"),
    "hardtanh": _trusted("hardtanh", "bounded"),
    "hardsigmoid": _trusted("hardsigmoid", "bounded", 0.5),
    "elu": _trusted("elu", "elu"),
    "selu": _trusted("selu", "elu"),
    "celu": _trusted("celu", "elu", function=F.celu),
    "mish": _trusted("mish", "mish", analytic=True),
    "abs": replace(_leaky(-1.0), name="abs", function=ACTIVATIONS["abs"]),
    "relu2": _trusted("relu2", "power"),
    "square": _trusted("square", "power", analytic=True),
}
ALIASES = {"swish": "silu", "gelu_new": "gelu_tanh", "relu_squared": "relu2", "logsigmoid": "log_sigmoid"}
PARAMETRISED: dict[str, Callable[..., Activation]] = {  # "leaky_relu:0.2"
    "leaky_relu": _leaky,
    "prelu": _leaky,
    "silu": _swish,
    "swish": _swish,
    "elu": _elu,
    "celu": _celu,
    "softplus": _softplus_beta,
    "hardtanh": _hardtanh,
}
# Names of gated MLPs with the activation of the gate.
GATED = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "bilinear": "identity",
    "glu": "sigmoid",
    "tanh_glu": "tanh",
    "mish_glu": "mish",
}
_registered: dict[str, Activation] = {}


def register(activation: Activation) -> Activation:
    """Registers an activation. It can lead to `possible` or `undecided`; `impossible` needs a proof.

    If `odd` is given, phi(z) - phi(-z) = odd * z is checked on a grid.
    """
    name = activation.name
    if not name or ":" in name or name in BUILT_IN or name in GATED or name in ALIASES or name in PARAMETRISED:
        raise BadInput(f"activation {name!r}: the name is taken, empty or contains a colon; choose another")
    if activation.odd is not None:
        z = torch.linspace(-9.0, 9.0, 181, dtype=torch.float64)
        gap = activation.function(z) - activation.function(-z) - float(activation.odd) * z
        if not bool(gap.abs().max() <= 1e-8):
            wrong = f"phi(z) - phi(-z) is not {activation.odd} z (off by {float(gap.abs().max()):.3g})"
            raise BadInput(f"activation {name!r}: {wrong}; correct odd or leave it out")
    family: Family = "odd-linear" if activation.odd else "other"
    _registered[name] = replace(activation, family=family, trusted=False)
    return _registered[name]


def names() -> list[str]:
    """All names that `resolve` accepts."""
    return sorted({*BUILT_IN, *GATED, *ALIASES, *_registered})


def resolve(word: str) -> tuple[Activation, bool]:
    """The activation of a name such as "gelu", "swiglu" or "leaky_relu:0.2", and whether the MLP is gated."""
    if not isinstance(word, str):
        raise BadInput(f"the activation must be a name such as 'gelu', got {word!r}")
    name, colon, number = word.strip().lower().partition(":")
    if colon:
        if name not in PARAMETRISED:
            raise BadInput(f"activation {word!r}: only {', '.join(PARAMETRISED)} take a number after a colon")
        try:
            numbers = [float(part) for part in number.split(",")]
        except ValueError:
            raise BadInput(f"activation {word!r}: {number!r} is not a number; write {name}:0.5") from None
        expected = 2 if name == "hardtanh" else 1
        if len(numbers) != expected:
            raise BadInput(f"activation {word!r}: {name} takes {expected} numbers, got {len(numbers)}")
        return PARAMETRISED[name](*numbers), False
    if name in GATED:
        return BUILT_IN[GATED[name]], True
    name = ALIASES.get(name, name)
    found = BUILT_IN.get(name) or _registered.get(name) or _registered.get(word)
    if found is None:
        known = names()
        raise BadInput(
            f"unknown activation {word!r}{nearest(word, known)}; known: {', '.join(known)}; "
            "absorption.register adds one"
        )
    return found, False
