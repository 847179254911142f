"""Calibrated attention: the weight b of the identity in W_Q W_K^T = noise Z + b I, solved block by block on one batch.

    mean over samples, tokens and heads of p_tt = target        p the attention of the model as it is wired

"Cutting the Skip" (arXiv 2510.00345) uses the same constants in all blocks; self-attention then falls with depth as
tokens become similar. Here each block has its target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unskip._checks import number, whole
from unskip._modes import quiet
from unskip.anatomy import AttentionParts, Example, Parts, Site, example_for, named, parts, trace_parts
from unskip.errors import BadInput, InitError
from unskip.init._check import select, transaction
from unskip.init._draw import Draw
from unskip.init._query_key import factors
from unskip.wiring import Where, check_selector, picks

_NEAR_UNIFORM = 0.1  # noise of near-uniform heads
_ELSE = "Nothing was changed; use no self_attention target, or exclude such sites with where=."
_MOST = 4.0  # largest weight of the identity
_STEPS = 10  # of the bisection, which gives b to about 1e-3


class Solved(NamedTuple):
    """One attention: the weight of the identity, and the self-attention that it reaches on the batch."""

    site: Site
    identity: float
    self_attention: float


def calibrate_(
    model: nn.Module,
    example: object = None,
    target: float | Sequence[float] = 0.9,
    *,
    qk_noise: float = 1.0,
    even: int = 0,
    where: Where = None,
    generator: torch.Generator | None = None,
) -> list[Solved]:
    """Fills W_Q and W_K so that mean self-attention on the example is `target`, one number or one per block.

    The last `even` heads of each block start near-uniform instead and do not count. The identity's weight is at most
    4, so the target may not be reached where tokens are very similar; the result has the value that was. Rewire first:
    the input of a block depends on the skips before it. `where` selects sites as in `rewire`.
    """
    number("calibrate_", "qk_noise", qk_noise)
    check_selector(where)
    chosen = select(parts(model, example), partial(picks, where))
    with torch.no_grad(), transaction(model):
        heads = {part.site.index: part.heads - whole("calibrate_", "even", even, low=0) for part in chosen.attentions()}
        draw = Draw(generator)
        goals = targets("calibrate_", "target", chosen, target)
        return [*solve_(model, example_for(model, example), chosen, goals, qk_noise, heads, draw)]


def solve_(
    model: nn.Module,
    example: Example,
    chosen: Parts,
    goals: Sequence[float],
    noise: float,
    heads: dict[int, int],
    draw: Draw,
) -> Iterator[Solved]:
    """Calibrates the first heads of each chosen attention, in order; `heads` has their number by site index."""
    for part, goal in zip(chosen.attentions(), goals, strict=True):
        count = heads[part.site.index]
        _refuse(part, count)
        tokens = _input(model, part, example)
        matrices = draw.normal(part.heads, tokens.shape[-1], tokens.shape[-1], dtype=torch.float32)
        matrices /= math.sqrt(tokens.shape[-1])
        _fill(part, _NEAR_UNIFORM * matrices)
        visible = None
        if "mask" in part.extras:  # for example causal: near-uniform attention is above 0 wherever it is not masked
            visible = _attention(model, example, part) > 0
        low, high, middle, reached = 0.0, _MOST, 0.0, math.nan
        for _ in range(_STEPS):
            middle = (low + high) / 2 if low > 1 else math.sqrt(max(low, 0.02) * high)
            _fill(part, noise * matrices[:count] + middle * torch.eye(tokens.shape[-1]))
            if "query-key positions" in part.extras:  # rotary: known from a run of the model alone
                own = _attention(model, example, part).diagonal(dim1=-2, dim2=-1).mean((0, 2))
            else:
                own = _self_attention(part, tokens, visible)
            reached = float(own[:count].mean())
            low, high = (middle, high) if reached < goal else (low, middle)
        yield Solved(part.site, middle, reached)


def targets(who: str, name: str, chosen: Parts, target: float | Sequence[float]) -> list[float]:
    """The target of each attention; `name` is the argument of the function `who` that has it."""
    count = len([*chosen.attentions()])
    goals = [*target] if isinstance(target, Sequence) and not isinstance(target, str) else [target] * count
    if not count:
        raise BadInput("self-attention has a target, but no attention is among the chosen sites; change where=")
    if len(goals) != count:
        raise BadInput(
            f"self-attention has {len(goals)} targets for {count} attentions; give one number, or one for each"
        )
    return [number(who, name, goal, zero=False, below=1) for goal in goals]


def _refuse(part: AttentionParts, heads: int) -> None:
    others = (extra for extra in part.extras if extra != "query-key positions")
    extras = [extra for extra in others if extra.startswith(("query-key", "score", "input"))]
    why = None
    if part.cross or part.kv_heads != part.heads:
        why = "its heads share keys, or its keys come from another sequence"
    elif extras:
        why = f"its attention does not depend on its weights alone ({', '.join(extras)})"
    elif part.head_dim > part.q.shape[2]:
        why = "its heads are wider than the stream"
    elif part.site.runs > 1:
        why = f"it runs {part.site.runs} times with the same weights, each time on other tokens"
    if why is not None:
        raise InitError(f"{named([part.site])}: not calibrated: {why}. {_ELSE}")
    if not 0 < heads <= part.heads:
        raise BadInput(f"{named([part.site])}: {heads} of {part.heads} heads to calibrate; use at least one")


def _fill(part: AttentionParts, matrices: Tensor) -> None:
    """Fills the first heads with factors of the best approximation of rank d_head."""
    left, right = factors(matrices, part.head_dim)
    part.q[: len(matrices)].copy_(left.mT)
    part.k[: len(matrices)].copy_(right.mT)
    for bias in (part.q_bias, part.k_bias):
        if bias is not None:
            bias.zero_()


def _attention(model: nn.Module, example: Example, part: AttentionParts) -> Tensor:
    """The attention probabilities of a run of the model, (samples, heads, queries, keys)."""
    return trace_parts(model, example, weighted=True).probabilities(part.site.index)


def _self_attention(part: AttentionParts, tokens: Tensor, visible: Tensor | None) -> Tensor:
    """(heads,) mean self-attention of tokens (samples, tokens, dim), among visible tokens."""
    q, k = (torch.einsum("bnd,hed->bhne", tokens, weight.float()) for weight in (part.q, part.k))
    scores = part.softmax_scale * q @ k.mT
    scores = scores if visible is None else scores.masked_fill(~visible.to(scores.device), -math.inf)
    return scores.softmax(-1).diagonal(dim1=-2, dim2=-1).mean((0, 2))


def _input(model: nn.Module, part: AttentionParts, example: Example) -> Tensor:
    """The input of the attention, (samples, tokens, dim): the output of the norm before it."""
    if part.norm is None or part.norm.place != "pre":
        raise InitError(f"{named([part.site])}: not calibrated: no norm before it. {_ELSE}")
    outputs: list[Tensor] = []
    norm = model.get_submodule(part.norm.path)
    hook = norm.register_forward_hook(lambda module, inputs, output: outputs.append(output.detach()))
    try:
        with quiet(model, training=False):
            example.copy().run(model)
    finally:
        hook.remove()
    if outputs[0].ndim != 3:
        shape = tuple(outputs[0].shape)
        raise InitError(f"{named([part.site])}: not calibrated: its input is {shape}, not a sequence. {_ELSE}")
    return outputs[0].float()
