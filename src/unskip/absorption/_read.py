"""The activation of a traced MLP, read from the operators that compute it and checked on values.

Values alone cannot tell Hardtanh(0, 1e7) from ReLU, and an operator alone not relu(x) from relu(x + 0.01). So the
operator and its arguments suggest a name, and the values of that name on points from 1e-6 to 1e6 of both signs have to
be those that were seen. Smooth functions that are put together (`x * sigmoid(1.702 * x)`) are named by their values,
`identity` only where nothing but arithmetic is (`x + 1e-7 * sin(x)` is not linear). What is made of operators that can
bend or jump anywhere, such as `where`, has no name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unskip.absorption._activations import resolve
from unskip.anatomy import GRID, Curve

Arguments = Sequence[object]  # of the operator, its input left out; a weight as a tensor


class Unreadable(Exception):
    """Why the activation is none that is known."""


def _plain(word: str) -> Callable[[Arguments], str]:
    return lambda given: word


def _slope(given: Arguments) -> str:
    return "leaky_relu" if not given or given[0] == 0.01 else f"leaky_relu:{given[0]}"


def _prelu(given: Arguments) -> str:
    weight = given[0]
    if not isinstance(weight, Tensor) or weight.numel() != 1:
        raise Unreadable("PReLU with a slope for each channel: the theory is about one activation for all units")
    return f"leaky_relu:{float(weight.detach())!r}"


def _elu(given: Arguments) -> str:
    alpha, scale, inner = (*given, 1.0, 1.0, 1.0)[:3] if given else (1.0, 1.0, 1.0)
    if (alpha, scale, inner) == (1.6732632423543772, 1.0507009873554805, 1.0):
        return "selu"
    if (scale, inner) != (1.0, 1.0):
        raise Unreadable(f"ELU with scales {scale} and {inner}")
    return "elu" if alpha == 1 else f"elu:{alpha}"


def _celu(given: Arguments) -> str:
    return "celu" if not given or given[0] == 1 else f"celu:{given[0]}"


def _softplus(given: Arguments) -> str:
    if len(given) > 1 and given[1] < 20:  # type: ignore[operator]
        raise Unreadable(f"softplus that is the identity beyond {given[1]}, which is not small enough to leave aside")
    return "softplus" if not given or given[0] == 1 else f"softplus:{given[0]}"


def _gelu(given: Arguments) -> str:
    return "gelu_tanh" if "tanh" in given else "gelu"


def _clamp(given: Arguments) -> str:
    low, high = (*given, None, None)[:2] if given else (-1.0, 1.0)
    if low == 0 and high is None:
        return "relu"
    if low is None or high is None or isinstance(low, Tensor) or isinstance(high, Tensor):
        raise Unreadable(f"a clamp between {low} and {high}")
    return {(-1.0, 1.0): "hardtanh", (0.0, 6.0): "relu6"}.get((low, high), f"hardtanh:{low},{high}")  # type: ignore[arg-type]


def _threshold(given: Arguments) -> str:
    if tuple(given[:2]) == (0, 0):
        return "relu"
    raise Unreadable(f"Threshold({given[0]}, {given[1]})")


def _unknown(name: str) -> Callable[[Arguments], str]:
    def refuse(given: Arguments) -> str:
        raise Unreadable(name)

    return refuse


OPERATORS: dict[str, Callable[[Arguments], str]] = {
    **{word: _plain(word) for word in ("relu", "silu", "mish", "hardswish", "hardsigmoid", "tanh", "sigmoid", "sin")},
    "log_sigmoid_forward": _plain("log_sigmoid"),
    "gelu": _gelu,
    "leaky_relu": _slope,
    "_prelu_kernel": _prelu,
    "elu": _elu,
    "celu": _celu,
    "softplus": _softplus,
    "hardtanh": _clamp,
    "clamp": _clamp,
    "threshold": _threshold,
    "hardshrink": _unknown("Hardshrink"),
    "softshrink": _unknown("Softshrink"),
    "rrelu_with_noise": _unknown("RReLU, which is random in training"),
}
ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "neg", "native_dropout", "dropout"}
SMOOTH = ARITHMETIC | {"reciprocal", "square", "pow", "sqrt", "rsqrt", "exp", "expm1", "log", "log1p", "erf", "erfc"}
SMOOTH |= {"sin", "cos", "tanh", "sigmoid", "silu", "gelu", "softplus", "mish", "log_sigmoid_forward"}


def read(curve: Curve) -> str:
    """The name of an activation. Raises Unreadable."""
    names = [name for name, _ in curve.operators]
    words = [OPERATORS[name](given) for name, given in curve.operators if name in OPERATORS]
    bent = [name for name in names if name not in SMOOTH]
    unknown = [name for name in bent if name not in OPERATORS and name != "abs"]
    if unknown or len(bent) > 1:
        raise Unreadable(f"made of {', '.join(sorted(set(unknown or bent)))}, which can bend or jump anywhere")
    for word in (*words, curve.name):
        if word is None or (word == "identity" and not ARITHMETIC.issuperset(names)):
            continue
        if torch.allclose(resolve(word)[0].function(GRID), curve.values, rtol=1e-6, atol=1e-9):
            return resolve(word)[0].name
    raise Unreadable("none that is known")
