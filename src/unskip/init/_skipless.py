"""Initialisation for transformers without skips: every sub-layer starts as a well-conditioned map.

    value-output    W_V W_O = vo_gain^2 R                     (_value_output.py)
    query-key       W_Q W_K^T ~ qk_noise Z + qk_identity I    (_query_key.py)
    mlp             W_up = max(sqrt(out / in), 1) R, b_up = mlp_bias, W_down = mlp_gain R
                    R with orthonormal rows or columns; with `pairs` in _pairs.py

Without a skip a block's derivative is the product of its parts' derivatives. W_V W_O is a factor of the attention's
derivative, so its condition number affects all of it, and attention that starts near the identity keeps tokens
distinct. From "Cutting the Skip: Training Residual-Free Transformers" (arXiv 2510.00345), where qk_noise is alpha,
qk_identity beta and vo_gain c.

Beyond the paper: keys and values shared by several queries get the best joint approximation of rank d_head; both halves
of a gated MLP start orthogonal; where the heads have fewer dimensions than the stream, W_V W_O is a partial isometry
and a note says so; a head wider than the stream stores the matrix exactly, rotated into its width. An activation such
as GELU has a positive mean, which every MLP adds to all tokens and no skip dilutes; `centre` removes it with the output
bias, -W_down E[phi(W_up z + b_up)] for a normalised z. `mlp_bias` moves units to where the activation is nearly linear,
so the MLP's correlation map has a slope near 1 at 1 (deep kernel shaping, arXiv 2110.01765, by biases instead of
another activation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypedDict

import torch
from torch import nn

from unskip._checks import whole
from unskip._warn import warn
from unskip.anatomy import (
    AttentionParts,
    MlpParts,
    Parts,
    drop_paths,
    example_for,
    mean_output,
    named,
    trace_parts,
)
from unskip.errors import InitError
from unskip.init._calibrate import Solved, solve_, targets
from unskip.init._check import Check, Row, chosen_parts, refuse, same, transaction
from unskip.init._draw import Draw
from unskip.init._pairs import pair_, refuse_to_pair
from unskip.init._position import PositionCode, position_code_
from unskip.init._query_key import query_key_
from unskip.init._value_output import carry_, refuse_to_carry, value_output_
from unskip.init._verify import MIX, PARTS, Name, gain, refuse_number, refuse_parts, renamed, verify_skipless
from unskip.wiring import Where, check_selector, picks


class Constants(TypedDict, total=False):
    """What a preset of `skipless_` sets."""

    qk_noise: float
    qk_identity: float
    vo_gain: float
    mlp_gain: float
    mlp_bias: float
    centre: bool
    pairs: bool


# The paper's constants by model; and, not from the paper, MLPs that keep angles between tokens (shaped) or pass tokens
# on (paired).
PRESETS: dict[str, Constants] = {
    "vit-base": {"qk_noise": 2.0, "qk_identity": 0.6, "vo_gain": 3.0},
    "vit-small": {"qk_noise": 1.8, "qk_identity": 1.0, "vo_gain": 3.0},
    "shaped": {"qk_noise": 1.0, "qk_identity": 1.0, "vo_gain": 9.0, "mlp_gain": 9.0, "mlp_bias": 1.5, "centre": True},
    "paired": {"qk_noise": 1.0, "qk_identity": 1.0, "vo_gain": 1.0, "mlp_gain": 1.0, "centre": True, "pairs": True},
}


def skipless_(
    model: nn.Module,
    example: object = None,
    *,
    qk_noise: float = 2.0,
    qk_identity: float = 0.6,
    vo_gain: float = 3.0,
    mlp_gain: float = 1.0,
    mlp_bias: float = 0.0,
    generator: torch.Generator | None = None,
    parts: Sequence[Name] = PARTS,
    centre: bool = False,
    pairs: bool = False,
    carry: int | None = None,
    mix: float = MIX,
    self_attention: float | Sequence[float] | None = None,
    position_code: PositionCode | None = None,
    where: Where = None,
    alpha: float | None = None,
    beta: float | None = None,
    c: float | None = None,
) -> Check:
    """Initialises the branches of a model to train without skips. Returns the result of `verify_skipless`.

    `example` is as for audit. `alpha`, `beta` and `c` are the paper's names for `qk_noise`, `qk_identity` and
    `vo_gain`; either is accepted. `parts` selects among the three, `where` selects sites as in `rewire`. Biases of
    initialised layers become 0. LayerScale becomes 1 with "value-output" and "mlp"; drop path is switched off. The same
    generator gives the same weights on every device. The model is not rewired. If a site cannot be initialised, nothing
    is changed.

    Not from the paper, and off by default (`PRESETS["shaped"]` has the first three, `PRESETS["paired"]` the pairs):
    `mlp_gain` and `mlp_bias` shape the MLPs; `centre` removes the mean of an MLP's activation with its output bias;
    with `pairs` the first 2 * width units of an MLP are mirrored pairs that pass tokens on, with `carry` the first
    `carry` heads of each attention do the same, and the other units and heads write `mix` times as much;
    `self_attention` is a target: the identity's weight is solved for on the example, in the model as it is wired
    (`calibrate_`; with `carry` the other heads start near-uniform); `position_code` is that of `position_code_`.
    """
    qk_noise = renamed("qk_noise", qk_noise, 2.0, "alpha", alpha)
    qk_identity = renamed("qk_identity", qk_identity, 0.6, "beta", beta)
    vo_gain = renamed("vo_gain", vo_gain, 3.0, "c", c)
    numbers = {"qk_noise": qk_noise, "qk_identity": qk_identity, "vo_gain": vo_gain, "mlp_gain": mlp_gain}
    for name, value in {**numbers, "mlp_bias": mlp_bias, "mix": mix}.items():
        refuse_number("skipless_", name, value)
    draw = Draw(generator)
    refuse_parts(parts, centre, pairs, mlp_bias, carry, self_attention, mix)
    check_selector(where)
    example = example_for(model, example)
    chosen = _chosen(trace_parts(model, example).parts, where, parts)
    if centre:
        _refuse_to_centre(chosen)
    if mlp_bias:
        _refuse_bias(chosen)
    if pairs:
        refuse_to_pair(chosen)
    if carry is not None:
        refuse_to_carry(chosen, whole("skipless_", "carry", carry, low=1))
    if self_attention is not None:
        self_attention = targets("skipless_", "self_attention", chosen, self_attention)
    with torch.no_grad(), transaction(model), _drop_path_off(model, chosen) as drop_path:
        if position_code is not None:
            position_code_(model, example, kind=position_code, generator=generator)
        for attention in chosen.attentions():
            if "value-output" in parts:
                value_output_(attention, vo_gain, draw)
            if "query-key" in parts:
                query_key_(attention, qk_noise, qk_identity, draw)
        if "mlp" in parts:
            for mlp in chosen.mlps():
                _mlp_(mlp, mlp_gain, mlp_bias, draw)
                if pairs:
                    pair_(mlp, mlp_gain, mix, draw)
                if centre and mlp.down_bias is not None:
                    mlp.down_bias.copy_(0 - mean_output(mlp))
        if carry is not None:  # drawn after the rest, which is the same with and without
            for attention in chosen.attentions():
                carry_(attention, carry, vo_gain, mix, draw)
        missed: list[Solved] = []
        if self_attention is not None:
            counts = {part.site.index: carry or part.heads for part in chosen.attentions()}
            solved = [*solve_(model, example, chosen, self_attention, qk_noise, counts, draw)]
            missed = [s for s, goal in zip(solved, self_attention, strict=True) if s.self_attention < goal - 0.02]
            self_attention = [min(goal, s.self_attention) for s, goal in zip(solved, self_attention, strict=True)]
        check = verify_skipless(
            model,
            example,
            vo_gain=vo_gain,
            mlp_gain=mlp_gain,
            mlp_bias=mlp_bias,
            centre=centre,
            pairs=pairs,
            carry=carry,
            mix=mix,
            self_attention=self_attention,
            position_code=position_code,
            parts=parts,
            where=where,
        )
    notes = [*check.notes, *_notes(chosen, parts), *_missed(missed), *_uniform(check), *drop_path]
    for note in notes:
        warn(note)
    return Check(check.title, check.rows, tuple(notes))


def _mlp_(part: MlpParts, down_gain: float, up_bias: float, draw: Draw) -> None:
    for weight in (part.up, part.gate, part.down):
        if weight is not None:
            weight.copy_(gain(weight) * draw.orthogonal(*weight.shape))
    part.down.mul_(down_gain)
    for bias, value in ((part.up_bias, up_bias), (part.gate_bias, 0.0), (part.down_bias, 0.0)):
        if bias is not None:
            bias.fill_(value)
    if part.scale is not None:
        part.scale.fill_(1)  # it would undo the scale of the last weight


def _refuse_bias(chosen: Parts) -> None:
    without = [part.site for part in chosen.mlps() if part.gate is not None or part.up_bias is None]
    refuse(without, "the MLP is gated, or has no bias before its activation, so it has no mlp_bias")


def _refuse_to_centre(chosen: Parts) -> None:
    without = [part.site for part in chosen.mlps() if part.gate is None and part.down_bias is None]
    refuse(without, "the MLP has no output bias, which centre needs", ", or drop centre")
    unknown = [part.site for part in chosen.mlps() if part.gate is None and part.function is None]
    refuse(unknown, "the mean of an unknown activation is not known", ", or drop centre")


def _chosen(all_parts: Parts, where: Where, parts: Sequence[Name]) -> Parts:
    """The parts of the chosen sites. Raises if one of them cannot be initialised."""
    kinds = {"mlp"} if set(parts) == {"mlp"} else {"attention"} if "mlp" not in parts else {"attention", "mlp", "conv"}
    kinds |= {"parallel", "other"}
    chosen = chosen_parts(all_parts, lambda site: site.kind in kinds and picks(where, site))
    if "query-key" in parts:
        drop = ", or drop 'query-key' from parts"
        crossed = [part.site for part in chosen.attentions() if part.cross]
        refuse(crossed, "keys come from another sequence, so cross-attention cannot start near the identity", drop)
        tied = [part.site for part in chosen.attentions() if same(part.q, part.k)]
        refuse(tied, "queries and keys share one weight, so W_Q W_K^T is symmetric and cannot contain Z", drop)
    branches = [*chosen.attentions(), *chosen.mlps()]
    computed = [part.site for part in branches if "computed bias" in part.extras]
    refuse(computed, "a bias that is computed and not stored cannot be set to 0")
    weights = [p for part in branches for p in part.parameters]
    if any(not p.is_floating_point() or p.device.type == "meta" for p in weights):
        raise InitError(f"{all_parts.model}: its weights are on the meta device or not floating point; load them first")
    return chosen


def _notes(chosen: Parts, parts: Sequence[Name]) -> list[str]:
    notes = []
    branches = [*chosen.attentions(), *chosen.mlps()]
    if "value-output" in parts:
        narrow = [p for p in chosen.attentions() if p.v.shape[0] * p.v.shape[1] < min(p.v.shape[2], len(p.out))]
        if narrow:
            rank = narrow[0].v.shape[0] * narrow[0].v.shape[1]
            notes.append(
                f"{named([p.site for p in narrow])}: values of {rank} dimensions cannot carry a stream of "
                f"{len(narrow[0].out)}. W_V W_O is an isometry on {rank} of them and loses the rest; keep this skip, "
                "or give the attention more value heads."
            )
        more = [p for p in chosen.attentions() if _between(p)]
        if more:
            notes.append(
                f"{named([p.site for p in more])}: the path from values to the stream has more than W_V W_O "
                f"({', '.join(_between(more[0]))}), so the condition of W_V W_O is not that of the path"
            )
    sized = [p.site for p in chosen.attentions() if {"query-key norm", "query-key scale", "score scale"} & {*p.extras}]
    if "query-key" in parts and sized:
        notes.append(
            f"{named(sized)}: the model normalises or scales its queries and keys, so their weights alone do not set "
            "how near attention starts to the identity, and self-attention is not checked"
        )
    turned = [p.site for p in chosen.attentions() if "query-key positions" in p.extras]
    if "query-key" in parts and turned:
        notes.append(
            f"{named(turned)}: rotary positions turn queries against keys by their distance, so W_Q W_K^T is the "
            "chosen matrix only between a token and itself; self-attention and W_V W_O are as set"
        )
    factors = [p.site for p in branches if {"output factor", "computed scale"} & {*p.extras}]
    if factors:
        notes.append(f"{named(factors)}: the model multiplies the branch by a factor of its own, which is not changed")
    gated = [p.site for p in branches if p.closed]
    if gated:
        notes.append(
            f"{named(gated)}: the branch is multiplied by a gate that starts at zero (adaLN). Without its skip "
            "nothing would pass."
        )
    return notes


def _between(part: AttentionParts) -> list[str]:
    return [extra for extra in part.extras if extra.startswith(("value ", "output ")) and extra != "output factor"]


def _missed(missed: list[Solved]) -> list[str]:
    """A note on attentions that did not reach their target."""
    if not missed:
        return []
    least = min(solved.self_attention for solved in missed)
    return [
        f"{named([solved.site for solved in missed])}: self-attention reaches {least:.2f}, below its target, with the "
        f"identity at a weight of {missed[0].identity:.3g}: tokens are too similar there for more"
    ]


def _uniform(check: Check) -> list[str]:
    """A note where attention on the example is near-uniform, which rank collapse causes."""
    uniform = [row.site for row in check.rows if _is_uniform(row)]
    if not uniform:
        return []
    return [
        f"{named(uniform)}: near-uniform attention on the example. Tokens are almost equal there (rank collapse): the "
        "model starts ill-conditioned from that depth on. A position code, PRESETS['shaped'] or the skips of attention "
        "keep them apart."
    ]


def _is_uniform(row: Row) -> bool:
    """Whether self-attention is less than 1.5 times that of uniform attention or, with few keys, than halfway to 1."""
    own, uniform = row.values.get("on example"), row.values.get("uniform")
    return own is not None and uniform is not None and own < min(1.5 * uniform, (1 + uniform) / 2)


@contextmanager
def _drop_path_off(model: nn.Module, chosen: Parts) -> Iterator[list[str]]:
    """Switches drop path off at the chosen sites; restores it if the body raises."""
    before = []
    try:
        for site in chosen.sites:
            for module, rate in drop_paths(model, site):
                before.append((module, rate, getattr(module, rate)))
                setattr(module, rate, 0.0)
        count = len(before)
        note = f"drop path was switched off in {count} modules: without a skip a dropped branch outputs zeros"
        yield [note] if count else []
    except BaseException:
        for module, rate, value in before:
            setattr(module, rate, value)
        raise
