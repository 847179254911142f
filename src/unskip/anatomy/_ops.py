"""Classes of operators in a trace: those that move data, scale it, mix tokens, or apply a nonlinearity.

Operators are identified by their base name ("aten.add_.Tensor" is "add"), which covers overloads and in-place forms.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

# Rearranges or casts its first argument (`copy` its second) without changing values.
IDENTITY = frozenset(
    "view _unsafe_view reshape _reshape_alias permute transpose t mT expand expand_as squeeze unsqueeze alias detach "
    "clone contiguous _to_copy to roll flip flatten unflatten movedim lift_fresh lift_fresh_copy pixel_shuffle "
    "pixel_unshuffle rot90 as_strided view_as_real view_as_complex _conj resolve_conj positive copy".split()
)
# Members of IDENTITY and PART that share memory with their argument: the same view taken twice is the same tensor.
VIEW = frozenset(
    "view permute transpose t expand squeeze unsqueeze alias detach slice narrow select split "
    "split_with_sizes unbind chunk".split()
)
# Takes a part of its first argument.
PART = frozenset(
    "slice narrow select split split_with_sizes unbind chunk index index_select gather constant_pad_nd "
    "take_along_dim unfold".split()
)
TURN = frozenset({"permute", "transpose", "mT"})  # reorders axes
SCALE = frozenset({"mul", "div"})
POWERS = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}

# A new tensor that takes only shape and dtype from its arguments.
FRESH = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full "
    "new_empty_strided bernoulli zero fill".split()
)

ADD = frozenset({"add"})
STACK = frozenset({"stack", "cat"})
# Larger operators that may contain a residual addition; reported as unknown.
FUSED = frozenset("addcmul addcdiv lerp addmm addbmm baddbmm index_add scatter_add sub _foreach_add".split())

_MATMUL = re.compile(
    r"^(\w*mm|mv|addmv|dot|linear|bilinear|\w*convolution\w*|conv\w*|_trilinear|einsum|\w*lstm\w*|\w*gru\w*|\w*rnn\w*)$"
)
_POOL = re.compile(r"^(\w*avg_pool\w*|\w*max_pool\w*|_fft\w*|fft\w*|stft|cumsum|grid_sampler\w*)$")
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_SCAN = re.compile(r"selective_scan|chunk_scan|state_space", re.IGNORECASE)
_SOFTMAX = re.compile(r"softmax")
_NORM = re.compile(r"^(native_)?\w*norm\w*$")
ACTIVATION = frozenset(
    "relu gelu silu sigmoid tanh hardswish hardsigmoid hardtanh leaky_relu elu celu selu mish softplus prelu glu "
    "clamp_min erf softsign log_sigmoid logsigmoid threshold rrelu exp square pow".split()
)


def base_name(op: object) -> str:
    """ "add" for aten.add.Tensor and aten.add_.Tensor; other libraries' keep their namespace: "xformers.mha"."""
    namespace, _, name = str(op.name()).partition("::")  # type: ignore[attr-defined]
    if not name:  # an operator that takes functions, such as flex_attention
        return f"higher_order.{namespace}"
    name = name.partition(".")[0]
    if namespace != "aten":
        return f"{namespace}.{name}"
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def op_name(op: object, args: tuple[Any, ...]) -> str:
    """The base name of an operator, with distinctions by its arguments: adding the integer 0, with which `sum` begins,
    is "alias"; index_put may accumulate; a power is named by its exponent.
    """
    name = base_name(op)
    if name == "pow" and len(args) > 1 and not isinstance(args[1], Tensor):
        return POWERS.get(args[1], name)
    if name == "index_put" and len(args) > 3 and args[3]:
        return "index_add"
    return "alias" if name in ADD and len(args) > 1 and isinstance(args[1], int) and args[1] == 0 else name


def is_addition(op: object) -> bool:
    """Whether an operator adds two tensors."""
    return base_name(op) in ADD


def is_attention(name: str) -> bool:
    """One fused kernel from queries, keys and values to the attended values."""
    return bool(_ATTENTION.search(name)) and "mask" not in name


def is_softmax(name: str) -> bool:
    return bool(_SOFTMAX.search(name))


def is_scan(name: str) -> bool:
    """A kernel that carries a state along the sequence."""
    return "." in name and bool(_SCAN.search(name))


def is_sampler(name: str) -> bool:
    """Values sampled at computed positions."""
    return name.startswith("grid_sampler")


def is_matmul(name: str) -> bool:
    """A matrix product, convolution or recurrent kernel, of activations or with a weight."""
    return bool(_MATMUL.match(name))


def is_convolution(name: str) -> bool:
    return "conv" in name


def is_channels_first(name: str) -> bool:
    """Whether axis 1 of its argument has the channels."""
    return is_convolution(name) or "pool" in name or bool(re.search(r"(batch|group|instance)_norm", name))


def is_norm(name: str) -> bool:
    return bool(_NORM.match(name)) and "linalg" not in name


def is_transform(name: str) -> bool:
    """Whether g with this operator makes `stream + g(stream)` a residual, not the arithmetic of a formula.

    Operators of other libraries are opaque and count as transforms.
    """
    return "." in name or is_matmul(name) or is_attention(name) or bool(_POOL.match(name))
