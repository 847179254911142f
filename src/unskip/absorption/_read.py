"""Reads the activation of a traced MLP from the operators that compute it, and checks it on values.

Values alone do not distinguish Hardtanh(0, 1e7) from ReLU, nor silu(x) from silu(x) plus a narrow bump between two
points. Operators alone do not distinguish relu(x) from relu(x + 0.01). So both have to match: the values at points from
1e-6 to 1e6 of both signs, and the operators of one known formula (`x * sigmoid(1.702 * x)`). All other operators have
to be polynomial: one that is zero at every point would need more than MAX_POLYNOMIAL operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unskip.absorption._activations import resolve
from unskip.anatomy import GRID, Curve

ADVICE = "; register it with absorption.register and pass an absorption.Block"
Arguments = Sequence[object]  # of an operator, without its input; a weight is a tensor


class Unreadable(Exception):
    """The activation is not a known one; the message says why."""


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
        raise Unreadable(f"softplus with threshold {given[1]}; below 20 the threshold changes the function too much")
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
IGNORED = {"native_dropout", "dropout"}
POLYNOMIAL = {"add", "sub", "rsub", "mul", "neg", "square"}
MAX_POLYNOMIAL = 12  # the largest number of operators in a polynomial
# Other formulas for an activation: its operators that are not polynomial, each once.
FORMULAS: dict[str, tuple[str, ...]] = {
    "identity": ("",),
    "square": ("",),
    "abs": ("abs",),
    "relu": ("abs",),
    "relu2": ("relu", "clamp"),
    "silu": ("sigmoid", "tanh", "div exp", "exp reciprocal"),
    "quick_gelu": ("sigmoid", "silu", "div exp", "exp reciprocal"),
    "gelu": ("erf", "erfc"),
    "gelu_tanh": ("tanh", "sigmoid"),
    "mish": ("softplus tanh", "exp log1p tanh", "exp log tanh"),
    "softplus": ("exp log1p", "exp log"),
    "shifted_softplus": ("softplus", "exp log1p", "exp log"),
    "log_sigmoid": ("log sigmoid", "softplus"),
    "squareplus": ("sqrt",),
    "softsign": ("abs div",),
    "sigmoid": ("tanh", "div exp", "exp reciprocal"),
    "tanh": ("sigmoid",),
    "hardswish": ("hardtanh", "clamp", "hardsigmoid"),
    "hardsigmoid": ("hardtanh", "clamp"),
}


def read_activation(curve: Curve) -> str:
    """The name of an activation. Raises Unreadable."""
    operators = [(name, given) for name, given in curve.operators if name not in IGNORED]
    others = [(name, given) for name, given in operators if not _polynomial(name, given)]
    words = [OPERATORS[name](given) for name, given in others if name in OPERATORS]
    spelling = " ".join(sorted(name for name, _ in others))
    names = words if len(others) == 1 else []
    names += [name for name, ways in FORMULAS.items() if spelling in ways]
    if not names:
        raise Unreadable(f"computed with {spelling.replace(' ', ', ')}, which matches no known formula{ADVICE}")
    if len(operators) - len(others) > MAX_POLYNOMIAL:
        raise Unreadable(f"more than {MAX_POLYNOMIAL} additions and multiplications")
    for name in names:
        if torch.allclose(resolve(name)[0].function(GRID), curve.values, rtol=1e-6, atol=1e-9):
            return resolve(name)[0].name
    raise Unreadable(f"not a known one{ADVICE}")


def _polynomial(name: str, given: Arguments) -> bool:
    """Whether an operator maps polynomials to polynomials. A divisor or exponent has to be a number for that."""
    if name == "div":
        return isinstance(given[0], int | float)
    if name == "pow":
        return given[0] in (1, 2, 3, 4) and not isinstance(given[0], Tensor)
    return name in POLYNOMIAL
