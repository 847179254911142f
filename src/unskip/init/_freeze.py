"""Heads that stay as they start, so that a model without skips keeps a path along which its tokens pass.

A head of `skipless_(carry=...)` starts near the identity. Trained like any other weight it loses that, most in the last
blocks, and tokens become alike. Gradients that are set to zero would not keep it: weight decay still acts, and SOAP
mixes the entries of a matrix. So the optimizer's step is taken as it is, and these weights are put back after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unskip._checks import whole
from unskip.anatomy import example_for, named, trace_parts
from unskip.errors import InitError


def freeze_heads(
    model: nn.Module, optimizer: torch.optim.Optimizer, heads: int, example: object = None
) -> Callable[[], None]:
    """Keeps W_Q, W_K, W_V and W_O of the first `heads` heads of every attention, and their biases, as they are.

    They are put back after each step of the optimizer; what is kept is what they are when its first step begins, so a
    checkpoint may be loaded before it. The output's bias is trained. Returns a function that trains them again.
    """
    whole("freeze_heads", "heads", heads, low=1)
    views: list[Tensor] = []
    parts = trace_parts(model, example_for(model, example)).parts
    for part in parts.attentions():
        if not len(part.q) == len(part.k) == len(part.v) == part.heads >= heads:
            shared = "share keys and values" if part.heads >= heads else f"are {part.heads}"
            raise InitError(f"{named([part.site])}: its heads {shared}, so the first {heads} cannot be frozen")
        views += [part.q[:heads], part.k[:heads], part.v[:heads], part.out[:, : heads * part.v.shape[1]]]
        biases = (part.q_bias, part.k_bias, part.v_bias)
        views += [bias.view(part.heads, -1)[:heads] for bias in biases if bias is not None]
    if not views:
        raise InitError(f"{type(model).__name__}: no attention was found, so there are no heads to freeze")
    kept: list[Tensor] = []

    def before(*_: Any) -> None:
        if not kept:
            kept.extend(view.detach().clone() for view in views)

    def after(*_: Any) -> None:
        with torch.no_grad():
            torch._foreach_copy_([view.detach() for view in views], kept)

    hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def unfreeze() -> None:
        for hook in hooks:
            hook.remove()

    return unfreeze
