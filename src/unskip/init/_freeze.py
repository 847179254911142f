"""Weights that stay as they start, so that a model without skips keeps a path along which its tokens pass.

A head of `skipless_(carry=...)` starts near the identity. Trained like any other weight it loses that, most in the last
blocks, and tokens become alike. Gradients that are set to zero would not keep it: weight decay still acts, and SOAP
mixes the entries of a matrix. So the optimizer's step is taken as it is, and these weights are put back after it, or
with a rate r most of the way: w <- w + r (step(w) - w).
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
    """Keeps W_Q, W_K, W_V and W_O of the first `heads` heads of every attention, and their biases, as they are.

    They are put back after each step of the optimizer; what is kept is what they are when its first step begins, so a
    checkpoint may be loaded before it. The output's bias is trained. With `pairs` the mirrored units of `skipless_` are
    kept, too: the first 2 * width of every MLP. With a `rate` above 0 W_V, W_O and the units move by this share of
    each step instead. Returns a function that trains all of them again.
    """
    whole("freeze_heads", "heads", heads, low=1)
    number("freeze_heads", "rate", rate, high=1.0)
    parameters = {parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters()}
    kept, slow = list[_Place](), list[_Place]()
    parts = trace_parts(model, example_for(model, example)).parts
    for part in parts.attentions():
        queries, values = _carrying(part, heads)
        kept += [_place(view, parameters, part) for view in queries]
        slow += [_place(view, parameters, part) for view in values]
    if not kept:
        raise InitError(f"{type(model).__name__}: no attention was found, so there are no heads to freeze")
    for mlp in parts.mlps() if pairs else ():
        units = 2 * mlp.up.shape[1]
        views = [mlp.up[:units], mlp.down[:, :units], *([] if mlp.up_bias is None else [mlp.up_bias[:units]])]
        slow += [_place(view, parameters, mlp) for view in views]
    if rate == 0:
        kept, slow = kept + slow, []
    before: list[Tensor] = []  # what is kept, then what moves slowly

    def hold(*_: Any) -> None:
        if not before:
            before.extend(view.clone() for view in _views(kept + slow))

    def put_back(*_: Any) -> None:
        torch._foreach_copy_(_views(kept), before[: len(kept)])
        if slow:
            moved = _views(slow)
            torch._foreach_lerp_(moved, before[len(kept) :], 1 - rate)
            torch._foreach_copy_(before[len(kept) :], moved)

    hooks = [optimizer.register_step_pre_hook(hold), optimizer.register_step_post_hook(put_back)]

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


class _Place(NamedTuple):
    """Where entries lie in a parameter, whatever memory it is moved to."""

    parameter: nn.Parameter
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _place(view: Tensor, parameters: dict[int, nn.Parameter], part: AttentionParts | MlpParts) -> _Place:
    parameter = parameters.get(view.untyped_storage().data_ptr())
    if parameter is None:
        raise InitError(f"{named([part.site])}: its weights are computed, not stored, so it cannot be frozen")
    return _Place(parameter, tuple(view.size()), view.stride(), int(view.storage_offset() - parameter.storage_offset()))


def _views(places: list[_Place]) -> list[Tensor]:
    found = []
    for parameter, size, stride, offset in places:
        data = parameter.detach()
        found.append(data.as_strided(size, stride, data.storage_offset() + offset))
    return found
