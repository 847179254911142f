"""Heads that stay as they start, so that a model without skips keeps a path along which its tokens pass.

A head of `skipless_(carry=...)` starts near the identity. Trained like any other weight it loses that, most in the last
blocks, and tokens become alike. Gradients that are set to zero would not keep it: weight decay still acts, and SOAP
mixes the entries of a matrix. So the optimizer's step is taken as it is, and these weights are put back after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unskip._checks import whole
from unskip.anatomy import AttentionParts, example_for, named, trace_parts
from unskip.errors import InitError


def freeze_heads(
    model: nn.Module, optimizer: torch.optim.Optimizer, heads: int, example: object = None
) -> Callable[[], None]:
    """Keeps W_Q, W_K, W_V and W_O of the first `heads` heads of every attention, and their biases, as they are.

    They are put back after each step of the optimizer; what is kept is what they are when its first step begins, so a
    checkpoint may be loaded before it. The output's bias is trained. Returns a function that trains them again.
    """
    whole("freeze_heads", "heads", heads, low=1)
    places: list[_Place] = []
    parameters = {parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters()}
    for part in trace_parts(model, example_for(model, example)).parts.attentions():
        if not len(part.q) == len(part.k) == len(part.v) == part.heads >= heads:
            shared = "share keys and values" if part.heads >= heads else f"are {part.heads}"
            raise InitError(f"{named([part.site])}: its heads {shared}, so the first {heads} cannot be frozen")
        views = [part.q[:heads], part.k[:heads], part.v[:heads], part.out[:, : heads * part.v.shape[1]]]
        biases = (part.q_bias, part.k_bias, part.v_bias)
        views += [bias.view(part.heads, -1)[:heads] for bias in biases if bias is not None]
        places += [_place(view, parameters, part) for view in views]
    if not places:
        raise InitError(f"{type(model).__name__}: no attention was found, so there are no heads to freeze")
    kept: list[Tensor] = []

    def before(*_: Any) -> None:
        if not kept:
            kept.extend(view.clone() for view in _views(places))

    def after(*_: Any) -> None:
        torch._foreach_copy_(_views(places), kept)

    hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def unfreeze() -> None:
        for hook in hooks:
            hook.remove()

    return unfreeze


class _Place(NamedTuple):
    """Where entries lie in a parameter, whatever memory it is moved to."""

    parameter: nn.Parameter
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _place(view: Tensor, parameters: dict[int, nn.Parameter], part: AttentionParts) -> _Place:
    parameter = parameters.get(view.untyped_storage().data_ptr())
    if parameter is None:
        raise InitError(f"{named([part.site])}: its weights are computed, not stored, so heads cannot be frozen")
    return _Place(parameter, tuple(view.size()), view.stride(), int(view.storage_offset() - parameter.storage_offset()))


def _views(places: list[_Place]) -> list[Tensor]:
    found = []
    for parameter, size, stride, offset in places:
        data = parameter.detach()
        found.append(data.as_strided(size, stride, data.storage_offset() + offset))
    return found
