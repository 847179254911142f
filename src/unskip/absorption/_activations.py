"""What is known about each activation: the facts that a verdict may be built on.

An activation phi has a linear odd part ("class O") when

    phi(z) - phi(-z) = c z,  c != 0        that is        phi(z) = (c / 2) z + e(z) with e even.

Then flipping the sign of a unit's row changes the block by a linear map, and nothing else does. The facts that make an
`impossible` sound (no relation among the e(u.x + b) beyond the obvious ones) are proved one activation at a time, so
only the activations of this file may lead to one. A word that a user registers can lead to `possible` or `undecided`.

The setting is that of "Can an MLP Absorb Its Own Skip Connection?" (arXiv 2604.23705).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from unskip._words import nearest
from unskip.anatomy import ACTIVATIONS
from unskip.errors import BadInput

Family = Literal["odd-linear", "linear", "bounded", "elu", "mish", "even", "power", "other"]


@dataclass(frozen=True)
class Activation:
    """A function on numbers and the facts about it. `trusted` is set by this module alone."""

    name: str
    function: Callable[[Tensor], Tensor]
    family: Family = "other"
    odd: Fraction | None = None  # c of class O
    homogeneous: bool = False  # phi(r z) = r phi(z) for r > 0
    degree: int | None = None  # phi(r z) = r ** degree phi(z) for r > 0
    analytic: bool = False  # on all of R
    at_zero: float = math.nan  # phi(0)
    lipschitz: float = math.inf  # |phi(y) - phi(z)| <= lipschitz |y - z|; inf where there is none
    note: str = ""
    trusted: bool = False


def _softplus(beta: float) -> Callable[[Tensor], Tensor]:
    # torch switches to the identity beyond 20 / beta, which costs the odd part 2e-9 / beta.
    return lambda x: torch.logaddexp(beta * x, torch.zeros_like(x)) / beta


def _shifted_softplus(x: Tensor) -> Tensor:
    """log((1 + e^x) / 2) = x / 2 + log cosh(x / 2), with nothing that cancels at 0: softplus(x) - log 2 is off by 1e-16
    there, which is all there is of it where the weights are tiny."""
    half = x / 2
    near = torch.log1p(2 * torch.sinh(half.clamp(-2, 2) / 2).square())
    far = half.abs() + torch.log1p(torch.exp(-2 * half.abs())) - math.log(2)
    return half + torch.where(half.abs() <= 1, near, far)


_THRESHOLD = "torch's softplus is the identity beyond its threshold, so its odd part is linear only up to 2e-9 / beta"


def _odd(name: str, analytic: bool = True, zero: float = 0.0, lipschitz: float = 1.2, note: str = "") -> Activation:
    function = ACTIVATIONS[name]
    if name in ("softplus", "shifted_softplus"):
        function, note = _softplus(1.0) if name == "softplus" else _shifted_softplus, _THRESHOLD
    return Activation(
        name, function, "odd-linear", Fraction(1), False, None, analytic, zero, lipschitz, note, trusted=True
    )


def _bounded(name: str, analytic: bool, zero: float) -> Activation:
    return Activation(name, ACTIVATIONS[name], "bounded", analytic=analytic, at_zero=zero, lipschitz=1.0, trusted=True)


def _leaky(slope: float) -> Activation:
    if not math.isfinite(slope):
        raise BadInput(f"activation leaky_relu:{slope}: the slope must be a finite number")
    name, function = f"leaky_relu:{slope:g}", lambda x: torch.where(x > 0, x, slope * x)
    base = Activation(
        name, function, homogeneous=True, degree=1, at_zero=0.0, lipschitz=max(1.0, abs(slope)), trusted=True
    )
    if slope == 1:
        return replace(base, family="linear", odd=Fraction(2), analytic=True)
    if slope == -1:
        return replace(base, family="even")
    return replace(base, family="odd-linear", odd=1 + Fraction(slope))


def _swish(beta: float) -> Activation:
    if not math.isfinite(beta):
        raise BadInput(f"activation silu:{beta}: beta must be a finite number")
    function = lambda x: x * torch.sigmoid(beta * x)  # noqa: E731
    base = replace(_odd("silu"), name=f"silu:{beta:g}", function=function)
    if beta == 0:  # z / 2
        return replace(base, family="linear", homogeneous=True, degree=1)
    return base


def _elu(alpha: float) -> Activation:
    if not math.isfinite(alpha):
        raise BadInput(f"activation elu:{alpha}: alpha must be a finite number")
    if alpha == 0:
        return replace(BUILT_IN["relu"], name="elu:0")
    lipschitz = max(1.0, abs(alpha))
    return Activation(
        f"elu:{alpha:g}", lambda x: F.elu(x, alpha), "elu", at_zero=0.0, lipschitz=lipschitz, trusted=True
    )


def _soft(beta: float) -> Activation:
    if not (math.isfinite(beta) and beta > 0):
        raise BadInput(f"activation softplus:{beta}: beta must be a positive number")
    return replace(
        _odd("softplus", zero=math.log(2) / beta), name=f"softplus:{beta:g}", function=_softplus(beta), note=_THRESHOLD
    )


BUILT_IN: dict[str, Activation] = {
    "identity": Activation(
        "identity", ACTIVATIONS["identity"], "linear", Fraction(2), True, 1, True, 0.0, 1.0, trusted=True
    ),
    "relu": Activation("relu", ACTIVATIONS["relu"], "odd-linear", Fraction(1), True, 1, False, 0.0, 1.0, trusted=True),
    "leaky_relu": replace(_leaky(0.01), name="leaky_relu"),
    "gelu": _odd("gelu"),
    "gelu_tanh": _odd("gelu_tanh"),
    "quick_gelu": _odd("quick_gelu"),
    "silu": _odd("silu"),
    "softplus": _odd("softplus", zero=math.log(2), lipschitz=1.0),
    "shifted_softplus": _odd("shifted_softplus", lipschitz=1.0),
    "squareplus": _odd("squareplus", zero=1.0, lipschitz=1.0),
    "log_sigmoid": _odd("log_sigmoid", zero=-math.log(2), lipschitz=1.0),
    "hardswish": _odd("hardswish", analytic=False, lipschitz=1.5),
    "tanh": _bounded("tanh", True, 0.0),
    "sigmoid": _bounded("sigmoid", True, 0.5),
    "sin": _bounded("sin", True, 0.0),
    "softsign": _bounded("softsign", False, 0.0),
    "relu6": _bounded("relu6", False, 0.0),
    "hardtanh": _bounded("hardtanh", False, 0.0),
    "hardsigmoid": _bounded("hardsigmoid", False, 0.5),
    "elu": Activation("elu", ACTIVATIONS["elu"], "elu", at_zero=0.0, lipschitz=1.0, trusted=True),
    "selu": Activation("selu", ACTIVATIONS["selu"], "elu", at_zero=0.0, lipschitz=1.8, trusted=True),
    "celu": Activation("celu", F.celu, "elu", at_zero=0.0, lipschitz=1.0, trusted=True),
    "mish": Activation("mish", ACTIVATIONS["mish"], "mish", analytic=True, at_zero=0.0, lipschitz=1.2, trusted=True),
    "abs": Activation("abs", ACTIVATIONS["abs"], "even", None, True, 1, False, 0.0, 1.0, trusted=True),
    "relu2": Activation("relu2", ACTIVATIONS["relu2"], "power", degree=2, at_zero=0.0, trusted=True),
    "square": Activation("square", ACTIVATIONS["square"], "power", degree=2, analytic=True, at_zero=0.0, trusted=True),
}
# Where an activation that is not analytic is not; 0 for those that are not listed.
KINKS = {"hardswish": (-3.0, 3.0), "hardsigmoid": (-3.0, 3.0), "hardtanh": (-1.0, 1.0), "relu6": (0.0, 6.0)}
ALIASES = {"swish": "silu", "gelu_new": "gelu_tanh", "relu_squared": "relu2", "logsigmoid": "log_sigmoid"}
PARAMETRISED: dict[str, Callable[[float], Activation]] = {
    "leaky_relu": _leaky,
    "prelu": _leaky,
    "silu": _swish,
    "swish": _swish,
    "elu": _elu,
    "softplus": _soft,
}
# A gated word names the activation of its gate.
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
    """Adds a word of the user's. It can lead to `possible` or `undecided`; `impossible` is for words that are proved.

    With `odd` given, phi(z) - phi(-z) = odd * z is checked on a grid.
    """
    name = activation.name
    if not name or ":" in name or name in BUILT_IN or name in GATED or name in ALIASES or name in PARAMETRISED:
        raise BadInput(f"activation {name!r}: the word is taken or not a plain word; choose another")
    if activation.odd is not None:
        z = torch.linspace(-9.0, 9.0, 181, dtype=torch.float64)
        gap = activation.function(z) - activation.function(-z) - float(activation.odd) * z
        if not bool(gap.abs().max() <= 1e-8):
            raise BadInput(
                f"activation {name!r}: phi(z) - phi(-z) is not {activation.odd} z "
                f"(off by {float(gap.abs().max()):.3g}); "
                "leave odd out, or correct it"
            )
    family: Family = "odd-linear" if activation.odd else "other"
    _registered[name] = replace(activation, family=family, trusted=False)
    return _registered[name]


def names() -> list[str]:
    """Every word that `resolve` knows."""
    return sorted({*BUILT_IN, *GATED, *ALIASES, *_registered})


def resolve(word: str) -> tuple[Activation, bool]:
    """The activation that a word names, and whether it is a gate's: "gelu", "swiglu", "leaky_relu:0.2"."""
    if not isinstance(word, str):
        raise BadInput(f"the activation must be a word such as 'gelu', got {word!r}")
    name, colon, number = word.strip().lower().partition(":")
    if colon:
        if name not in PARAMETRISED:
            raise BadInput(f"activation {word!r}: only {', '.join(PARAMETRISED)} take a number after a colon")
        try:
            return PARAMETRISED[name](float(number)), False
        except ValueError as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"activation {word!r}: {number!r} is not a number; write {name}:0.5") from None
    if name in GATED:
        return BUILT_IN[GATED[name]], True
    name = ALIASES.get(name, name)
    found = BUILT_IN.get(name) or _registered.get(name) or _registered.get(word)
    if found is None:
        known = names()
        raise BadInput(
            f"no activation is called {word!r}{nearest(word, known)}; there are: {', '.join(known)}; "
            "absorption.register adds one"
        )
    return found, False
