"""Calibrated attention: the weight b of the identity in W_Q W_K^T = noise Z + b I, solved block by block on one batch.

    mean over samples, tokens and heads of p_tt = target        p the attention of the model as it is wired

The constants of "Cutting the Skip" (arXiv 2510.00345) are the same for all blocks, and how much a token attends to
itself then falls with depth as tokens become alike. Here it is the same in all blocks, or what is asked for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unskip._checks import number, whole
from unskip._modes import quiet
from unskip.anatomy import AttentionParts, Example, Parts, Site, example_for, named, parts, trace_parts
from unskip.errors import BadInput, InitError
from unskip.init._check import transaction
from unskip.init._draw import Draw
from unskip.init._query_key import factors
from unskip.wiring import Where, check_selector, picks

_EVEN = 0.1  # noise of near-uniform heads
_STEPS = 10  # of the bisection: b to a thousandth or so


class Solved(NamedTuple):
    """One attention: the weight of the identity, and the self-attention that it gives on the batch."""

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
    most: float = 4.0,
    where: Where = None,
    generator: torch.Generator | None = None,
) -> list[Solved]:
    """Fills W_Q and W_K so that a token's attention to itself is `target` on the example, one number or one a block.

    The last `even` heads of each block start near-uniform instead and do not count. The identity has a weight of at
    most `most`, so where tokens are very alike the target may not be reached; the result says what was. Rewire first:
    what a block sees depends on the skips before it. `where` chooses sites as in `rewire`.
    """
    check_selector(where)
    all_parts = parts(model, example)
    pairs = [(site, part) for site, part in zip(all_parts.sites, all_parts, strict=True) if picks(where, site)]
    chosen = Parts(all_parts.model, [site for site, _ in pairs], [part for _, part in pairs], {})
    with torch.no_grad(), transaction(model):
        heads = {part.site.index: part.heads - whole("calibrate_", "even", even, low=0) for part in chosen.attentions()}
        whole_example = example_for(model, example)
        return [*solve_(model, whole_example, chosen, target, qk_noise, heads, Draw(generator), most)]


def solve_(
    model: nn.Module,
    example: Example,
    chosen: Parts,
    target: float | Sequence[float],
    noise: float,
    heads: dict[int, int],
    draw: Draw,
    most: float = 4.0,
) -> Iterator[Solved]:
    """Calibrates the first `heads` (by site index) of each chosen attention, in order."""
    number("calibrate_", "most", most, zero=False)
    for part, goal in zip(chosen.attentions(), targets(chosen, target), strict=True):
        count = heads[part.site.index]
        _refuse(part, count)
        tokens = _input(model, part, example)
        seen = None
        if "mask" in part.extras:  # such as a causal one: what it leaves has a weight above 0
            seen = trace_parts(model, example, weighted=True).probabilities(part.site.index) > 0
        matrices = draw.normal(part.heads, tokens.shape[-1], tokens.shape[-1], dtype=torch.float32)
        matrices /= math.sqrt(tokens.shape[-1])
        _fill(part, _EVEN * matrices)
        low, high, middle, reached = 0.0, most, 0.0, math.nan
        for _ in range(_STEPS):
            middle = (low + high) / 2 if low > 1 else math.sqrt(max(low, 0.02) * high)
            _fill(part, noise * matrices[:count] + middle * torch.eye(tokens.shape[-1]))
            reached = float(_self_attention(part, tokens, seen)[:count].mean())
            low, high = (middle, high) if reached < goal else (low, middle)
        yield Solved(part.site, middle, reached)


def targets(chosen: Parts, target: float | Sequence[float]) -> list[float]:
    """The target of each attention."""
    count = len([*chosen.attentions()])
    goals = [*target] if isinstance(target, Sequence) else [target] * count
    if len(goals) != count or not count:
        raise BadInput(f"self-attention has {len(goals)} targets for {count} attentions; give one number, or one each")
    return [number("calibrate_", "target", goal, zero=False, below=1) for goal in goals]


def _refuse(part: AttentionParts, heads: int) -> None:
    other = [each for each in part.extras if each.startswith(("query-key", "score", "input"))]
    why = None
    if part.cross or part.kv_heads != part.heads:
        why = "its queries and keys are not of one head and one sequence"
    elif other:
        why = f"its weights alone do not decide about its attention ({', '.join(other)})"
    elif part.head_dim > part.q.shape[2]:
        why = "its heads are wider than the stream"
    if why is not None:
        raise InitError(f"{named([part.site])}: not calibrated: {why}. Leave such sites out by where=.")
    if not 0 < heads <= part.heads:
        raise BadInput(f"{named([part.site])}: {heads} of {part.heads} heads to calibrate; take one at least")


def _fill(part: AttentionParts, matrices: Tensor) -> None:
    """The first heads: factors of the best approximation of rank d_head."""
    left, right = factors(matrices, part.head_dim)
    part.q[: len(matrices)].copy_(left.mT)
    part.k[: len(matrices)].copy_(right.mT)
    for bias in (part.q_bias, part.k_bias):
        if bias is not None:
            bias.zero_()


def _self_attention(part: AttentionParts, tokens: Tensor, seen: Tensor | None) -> Tensor:
    """(heads,): what tokens (samples, tokens, dim) pay to themselves among those that are seen, in the mean."""
    q, k = (torch.einsum("bnd,hed->bhne", tokens, weight.float()) for weight in (part.q, part.k))
    scores = part.softmax_scale * q @ k.mT
    scores = scores if seen is None else scores.masked_fill(~seen.to(scores.device), -math.inf)
    return scores.softmax(-1).diagonal(dim1=-2, dim2=-1).mean((0, 2))


def _input(model: nn.Module, part: AttentionParts, example: Example) -> Tensor:
    """What the attention reads, (samples, tokens, dim): the output of the norm before it."""
    if part.norm is None or part.norm.place != "pre":
        raise InitError(
            f"{named([part.site])}: not calibrated: no norm stands before it. Leave such sites out by where=."
        )
    held: list[Tensor] = []
    norm = model.get_submodule(part.norm.path)
    hook = norm.register_forward_hook(lambda module, inputs, output: held.append(output.detach()))
    try:
        with quiet(model, training=False):
            example.copy().run(model)
    finally:
        hook.remove()
    if held[0].ndim != 3:
        raise InitError(f"{named([part.site])}: not calibrated: its tokens are {tuple(held[0].shape)}, not a sequence")
    return held[0].float()
