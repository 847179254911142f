"""Disables the inference fast path of torch.nn's encoder layers, which fuses residuals into one kernel.

A rewired layer must not take it, nor get nested tensors from its encoder. Both are disabled by the flags that torch
checks, and restored when the wiring is undone.
"""

from __future__ import annotations

from torch import nn

_SAVED = "_unskip_fastpath"
_FLAGS = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)


def switch(model: nn.Module, rewired: set[nn.Module]) -> None:
    """Disables the fast path in the rewired modules and the encoders around them, and restores it in all others."""
    for module in model.modules():
        for cls, flag, off in _FLAGS:
            if isinstance(module, cls) and hasattr(module, flag):
                _set(module, flag, off, any(inner in rewired for inner in module.modules()))


def _set(module: nn.Module, flag: str, off: object, disable: bool) -> None:
    state = vars(module)
    if disable and _SAVED not in state:
        state[_SAVED] = getattr(module, flag)
        setattr(module, flag, off)
    elif not disable and _SAVED in state:
        setattr(module, flag, state.pop(_SAVED))


def original(module: nn.Module) -> dict[str, object]:
    """The original value of a disabled flag by name; empty if the module has none."""
    state = vars(module)
    return {flag: state[_SAVED] for cls, flag, _ in _FLAGS if isinstance(module, cls) and _SAVED in state}
