"""The activation of a traced MLP, read from the operator that computes it and its arguments.

`unskip.parts` names an activation by its values between -30 and 31, which cannot tell Hardtanh(0, 50) from ReLU. Here
the operator itself decides. Where none is known (`x * sigmoid(1.702 * x)`) the name by values is taken, unless the
branch is made of operators that can have kinks anywhere, such as `where`: then there is no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from unskip.absorption._activations import resolve

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
# Operators that can make a kink off the grid. Without them what is seen on a grid is what there is.
ANYWHERE = {"where", "maximum", "minimum", "clamp_min", "clamp_max", "fmax", "fmin", "heaviside", "sign", "round"}
JOINED = {"mul", "square", "pow", "div", "add", "sub"}  # that may make another function of an activation


def read(found: Sequence[tuple[str, Arguments]], seen: str | None) -> str:
    """The name of the activation, from the branch's operators in order and the name by values. Raises Unreadable."""
    acts = [(name, given) for name, given in found if name in OPERATORS]
    others = {name for name, _ in found if name in ANYWHERE}
    if others:
        raise Unreadable(f"made of {', '.join(sorted(others))}, which can have kinks anywhere")
    names = [resolve(OPERATORS[name](given))[0].name for name, given in acts]
    # One activation and nothing that could make something else of it, or nothing that was recognised by values.
    joined = any(name in JOINED for name, _ in found)
    if len(names) == 1 and (seen is None or not joined or acts[0][0] in ("hardtanh", "clamp")):
        return names[0]
    if seen is None:
        raise Unreadable("none that is known")
    return seen
