"""Frozen heads, so that a model without skips keeps a path that passes tokens on.

A carrying head of `skipless_(carry=...)` starts as an orthogonal map of each token. Training changes it, most in the
last blocks, and tokens become similar. Zero gradients would not prevent that: weight decay still acts, and SOAP mixes
the entries of a matrix. So these weights are restored after each optimizer step, or with a rate r partly:
w <- w + r (step(w) - w).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unskip._checks import number, whole
from unskip.anatomy import AttentionParts, MlpParts, example_for, named, trace_parts
from unskip.errors import InitError


def freeze_heads(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    heads: int,
    example: object = None,
    *,
    pairs: bool = False,
    rate: float = 0.0,
) -> Callable[[], None]:
    """Freezes W_Q, W_K, W_V and W_O of the first `heads` heads of every attention, and their biases.

    They are restored after each optimizer step to their values before the first step, so a checkpoint may be loaded
    until then. The output's bias is trained. `pairs` also freezes the mirrored units of `skipless_`: the first
    2 * width of every MLP. With a `rate` above 0 W_V, W_O and the units move by this fraction of each step instead.
    Returns a function that unfreezes all of them.
    """
    whole("freeze_heads", "heads", heads, low=1)
    number("freeze_heads", "rate", rate, high=1.0)
    parameters = {parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters()}
    frozen, slow = list[_Location](), list[_Location]()
    parts = trace_parts(model, example_for(model, example)).parts
    for part in parts.attentions():
        queries, values = _carrying(part, heads)
        frozen += [_locate(view, parameters, part) for view in queries]
        slow += [_locate(view, parameters, part) for view in values]
    if not frozen:
        raise InitError(f"{type(model).__name__}: no attention was found, so there are no heads to freeze")
    for mlp in parts.mlps() if pairs else ():
        units = 2 * mlp.up.shape[1]
        views = [mlp.up[:units], mlp.down[:, :units], *([] if mlp.up_bias is None else [mlp.up_bias[:units]])]
        slow += [_locate(view, parameters, mlp) for view in views]
    if rate == 0:
        frozen, slow = frozen + slow, []
    before: list[Tensor] = []  # values of frozen, then of slow

    def remember(*_: Any) -> None:
        if not before:
            before.extend(view.clone() for view in _views(frozen + slow))

    def restore(*_: Any) -> None:
        torch._foreach_copy_(_views(frozen), before[: len(frozen)])
        if slow:
            moved = _views(slow)
            torch._foreach_lerp_(moved, before[len(frozen) :], 1 - rate)
            torch._foreach_copy_(before[len(frozen) :], moved)

    hooks = [optimizer.register_step_pre_hook(remember), optimizer.register_step_post_hook(restore)]

    def unfreeze() -> None:
        for hook in hooks:
            hook.remove()

    return unfreeze


def _carrying(part: AttentionParts, heads: int) -> tuple[list[Tensor], list[Tensor]]:
    """The first heads of W_Q and W_K, and of W_V and W_O, each with their biases."""
    if not len(part.q) == len(part.k) == len(part.v) == part.heads >= heads:
        shared = "share keys and values" if part.heads >= heads else f"are {part.heads}"
        raise InitError(f"{named([part.site])}: its heads {shared}, so the first {heads} cannot be frozen")

    def first(*biases: Tensor | None) -> list[Tensor]:
        return [bias.view(part.heads, -1)[:heads] for bias in biases if bias is not None]

    queries = [part.q[:heads], part.k[:heads], *first(part.q_bias, part.k_bias)]
    return queries, [part.v[:heads], part.out[:, : heads * part.v.shape[1]], *first(part.v_bias)]


class _Location(NamedTuple):
    """The position of entries in a parameter, which stays valid if the parameter moves to other memory."""

    parameter: nn.Parameter
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _locate(view: Tensor, parameters: dict[int, nn.Parameter], part: AttentionParts | MlpParts) -> _Location:
    parameter = parameters.get(view.untyped_storage().data_ptr())
    if parameter is None:
        raise InitError(f"{named([part.site])}: its weights are computed, not stored, so it cannot be frozen")
    return _Location(
        parameter, tuple(view.size()), view.stride(), int(view.storage_offset() - parameter.storage_offset())
    )


def _views(locations: list[_Location]) -> list[Tensor]:
    return [
        parameter.detach().as_strided(size, stride, parameter.storage_offset() + offset)
        for parameter, size, stride, offset in locations
    ]
