"""Whether a language model is causal: the logits of a token depend on it and on earlier tokens only.

Two sequences share the ids before a position and differ from there on. A causal model has the same logits before it for
both, up to rounding; any other model sees the tokens that it is trained to predict.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from unskip._modes import quiet
from unskip.errors import BadInput
from unskip.evals import token_logits

# Of the largest logit, in units of the floating-point precision. At 64 tokens and random weights, causal kinds of
# transformers differ by at most 3 units (their experts get other numbers of tokens), encoders by 2,700 or more.
_ROUNDING = 100


def check_causal(model: nn.Module, name: str, ids: Tensor, vocabulary: int) -> None:
    """Raises BadInput if logits depend on later tokens of ids (1, tokens)."""
    tokens = ids.shape[1]
    places = sorted({1, tokens // 2, tokens - 1} - {0})  # the first positions that differ
    if tokens < 2 or vocabulary < 2:
        return
    generator = torch.Generator().manual_seed(0)
    offsets = torch.randint(1, vocabulary, (len(places), tokens), generator=generator).to(ids.device)
    later = torch.arange(tokens, device=ids.device) >= torch.tensor(places, device=ids.device)[:, None]
    first = ids.repeat(len(places), 1)
    second = torch.where(later, (first + offsets) % vocabulary, first)
    with quiet(model, training=False), _without_zeros(model, generator):
        logits, changed = (token_logits(model, model(each)) for each in (first, second))
    precision = torch.finfo(logits.dtype).eps if logits.is_floating_point() else 0.0
    logits, changed = (each.double().nan_to_num(0.0, 0.0, 0.0) for each in (logits, changed))
    change = (changed - logits).abs().amax(-1).masked_fill(later, 0)  # (places, tokens)
    bound = _ROUNDING * max(precision, torch.finfo(torch.float32).eps) * float(logits.abs().max())
    leaks = change.amax(1) > bound
    if not leaks.any():
        return
    row = int(leaks.nonzero()[-1])  # the fewest changed tokens
    position = int(change[row].argmax())
    raise BadInput(
        f"{name}: {type(model).__name__} is not causal: its logits at token {position} change by "
        f"{float(change[row, position]):.2g} when the ids from token {places[row]} on change, so it sees the tokens "
        f"that it predicts; {_next_step(model)}"
    )


def _next_step(model: Any) -> str:
    if getattr(getattr(model, "config", None), "is_decoder", None) is False:
        return "add is_decoder=true to model_args, or take a decoder-only kind, such as gpt2 or llama"
    return "mask later tokens in attention, and pad convolutions over tokens on the left only"


@contextlib.contextmanager
def _without_zeros(model: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Fills weights that are zero, because branches, gates or heads that start at zero hide what they will pass on."""
    zero = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and not name.endswith("bias") and not parameter.any()
    ]
    try:
        with torch.no_grad():
            for parameter in zero:
                width = parameter[0].numel() if parameter.ndim > 1 else 1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * width**-0.5)
        yield
    finally:
        with torch.no_grad():
            for parameter in zero:
                parameter.zero_()
