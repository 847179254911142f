"""torch.nn's encoder layers fuse their residuals into one inference kernel: no addition is left to weigh. A weighed
layer must not take that path, nor may its encoder hand it nested tensors. Both are switched off by the flags that torch
itself asks, and back on when the wiring goes.
"""

from __future__ import annotations

from torch import nn

_SAVED = "_unskip_fastpath"
_FLAGS = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)


def switch(model: nn.Module, weighed: set[nn.Module]) -> None:
    """Off for the weighed layers and the encoders around them, on (as it was) for all others."""
    for module in model.modules():
        for cls, flag, off in _FLAGS:
            if isinstance(module, cls) and hasattr(module, flag):
                _set(module, flag, off, any(inner in weighed for inner in module.modules()))


def _set(module: nn.Module, flag: str, off: object, switched: bool) -> None:
    state = vars(module)
    if switched and _SAVED not in state:
        state[_SAVED] = getattr(module, flag)
        setattr(module, flag, off)
    elif not switched and _SAVED in state:
        setattr(module, flag, state.pop(_SAVED))


def original(module: nn.Module) -> dict[str, object]:
    """The flag of a module as it was before it was switched off; empty where it was not."""
    state = vars(module)
    return {flag: state[_SAVED] for cls, flag, _ in _FLAGS if isinstance(module, cls) and _SAVED in state}
