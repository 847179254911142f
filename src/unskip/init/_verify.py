"""Checks the weights that `skipless_` set, and reports attention and correlation maps next to them.

    value-output    W_V W_O = c^2 R, half of the scale in each factor      q, k    W_Q W_Q^T = W_K W_K^T
    mlp             W^T W = gain^2 I for each weight                       also    biases, LayerScale, drop path
    with pairs      the same for half of the pairs and for the other units; the other half mirrored exactly
    with carry      W_V W_O = c^2 R for the carrying heads alone           on the example    self-attention = target

The relative tolerance is 1e-5, well above float32 rounding. Lower precisions get 8 roundings, and queries and keys
1e-4, since their factors come from an SVD in float32. Values that are set rather than computed must be exact: biases of
0, LayerScale of 1, drop path off.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from unskip._checks import number, whole
from unskip.anatomy import (
    AttentionParts,
    MlpParts,
    Parts,
    PartsTrace,
    Site,
    correlation_map,
    drop_paths,
    example_for,
    mean_output,
    named,
    trace_parts,
)
from unskip.errors import BadInput, InitError
from unskip.init._calibrate import targets
from unskip.init._check import Check, Row, RowBuilder, same, select
from unskip.init._pairs import mirrored, split_pairs
from unskip.init._position import PositionCode, check_position_code
from unskip.init._value_output import split
from unskip.wiring import Where, check_selector, picks

Name = Literal["value-output", "query-key", "mlp"]
PARTS: tuple[Name, ...] = get_args(Name)
MIX = 0.3  # what the heads and units beside `carry` and `pairs` write, by default
_TOKENS = 64  # independent tokens that self-attention is checked on


def verify_skipless(
    model: nn.Module,
    example: object = None,
    *,
    vo_gain: float = 3.0,
    mlp_gain: float = 1.0,
    mlp_bias: float = 0.0,
    centre: bool = False,
    pairs: bool = False,
    carry: int | None = None,
    mix: float = MIX,
    self_attention: float | Sequence[float] | None = None,
    position_code: PositionCode | None = None,
    parts: Sequence[Name] = PARTS,
    where: Where = None,
    check: bool = True,
    c: float | None = None,
) -> Check:
    """Checks what `skipless_` set. Raises InitError where a check fails, unless `check` is off.

    Pass the options of `skipless_`; `c` is `vo_gain` in the paper. Checked by site: the condition number of W_V W_O on
    its range, its rank, its scale (expected: vo_gain^2), and the distance of its factors from vo_gain times an
    isometry, with `carry` of the carrying heads; self-attention among 64 independent tokens, mean and minimum over
    heads (expected: twice that of uniform attention), and the distance of queries and keys from equal norm; with
    `self_attention`, that of the carrying heads on the example (expected: the target); the relative distance of an
    MLP's weights from orthogonal with the gain of their shape; the distance of biases from 0 or `mlp_bias`, or with
    `centre` from minus the activation's mean; the distance of LayerScale from 1; the rate of drop path; in the first
    row, with `position_code`, the norm of the position embeddings over that of the tokens on the example (expected: 1)
    and their distance from the code. Reported, not
    checked: self-attention on the example in the model as it is wired, its value for uniform attention, and for each
    MLP the slope C'(1) of the correlation map and C(0), the cosine of outputs for unrelated tokens. qk_noise and
    qk_identity are not checked: only the distribution of the weights shows them.
    """
    vo_gain = renamed("vo_gain", vo_gain, 3.0, "c", c)
    for name, value in {"vo_gain": vo_gain, "mlp_gain": mlp_gain, "mlp_bias": mlp_bias, "mix": mix}.items():
        refuse_number("verify_skipless", name, value)
    if carry is not None:
        whole("verify_skipless", "carry", carry, low=1)
    refuse_parts(parts, centre, pairs, mlp_bias, carry, self_attention, mix)
    check_selector(where)
    traced = trace_parts(model, example_for(model, example), weighted=True)
    rows: list[Row] = []
    unknown: list[Site] = []
    chosen = select(traced.parts, partial(picks, where))
    goals = dict.fromkeys(range(len(traced.parts)))
    if self_attention is not None:
        wanted = targets("verify_skipless", "self_attention", chosen, self_attention)
        goals |= dict(zip((p.site.index for p in chosen.attentions()), wanted, strict=True))
    for site, part in zip(chosen.sites, chosen, strict=True):
        if part is None:
            unknown.append(site)
            continue
        row = RowBuilder()
        only = Parts(traced.parts.model, [site], [part], {})
        centred = [mlp.down_bias for mlp in only.mlps()] if centre else []
        for attention in only.attentions():
            if "value-output" in parts:
                _check_value_output(attention, vo_gain, carry, mix, centred, row)
            if "query-key" in parts:
                _check_query_key(traced, attention, goals[site.index], carry, row)
        for mlp in only.mlps():
            if "mlp" in parts:
                _check_mlp(mlp, mlp_gain, mlp_bias, centre, mix if pairs else None, row)
        if row.values:  # else the site was not initialised
            rates = [float(getattr(module, rate)) for module, rate in drop_paths(model, site)]
            row.values["drop path"] = rate = max(rates, default=0.0)
            row.expect(rate == 0, f"drop path is {rate:.2g}, expected off")
        if position_code is not None and not rows:
            check_position_code(model, example, position_code, row)
        rows.append(row.row(site))
    if not rows:
        raise InitError(f"{type(model).__name__}: no site to check")
    notes = (f"{named(unknown)}: parts unknown, not checked",) if unknown else ()
    result = Check(f"{type(model).__name__}: skipless initialisation, {len(rows)} sites", tuple(rows), notes)
    return result.raise_if_failed() if check else result


def refuse_number(who: str, name: str, value: float) -> None:
    """Raises BadInput for a value that a constant cannot have."""
    number(who, name, value, zero=name not in ("vo_gain", "mlp_gain", "mix"), negative=name == "mlp_bias")


def renamed(name: str, value: float, default: float, old: str, given: float | None) -> float:
    """The value of a constant under its own name or the paper's. Raises BadInput if both are set."""
    if given is not None and value != default:
        raise BadInput(f"{old} is {name} of the paper: give one of them, not {old}={given!r} and {name}={value!r}")
    return value if given is None else given


def refuse_parts(
    parts: Sequence[Name],
    centre: bool,
    pairs: bool,
    mlp_bias: float,
    carry: int | None,
    self_attention: object,
    mix: float,
) -> None:
    """Raises BadInput for unknown parts, an option without effect, and pairs with a bias."""
    names = parts if isinstance(parts, Collection) and not isinstance(parts, str) else ()
    if not names or any(name not in PARTS for name in names):
        raise BadInput(f"parts is {parts!r}; it is a sequence of some of {', '.join(PARTS)}")
    for option, given, part in (
        ("centre", centre, "mlp"),
        ("pairs", pairs, "mlp"),
        ("mlp_bias", mlp_bias, "mlp"),
        ("carry", carry is not None, "value-output"),
        ("self_attention", self_attention is not None, "query-key"),
    ):
        if given and part not in parts:
            raise BadInput(f"{option} applies to {part}, but parts is {tuple(parts)!r}")
    if mix != MIX and carry is None and not pairs:
        raise BadInput(f"mix={mix:g} applies to the other heads or units of carry or pairs; give one of these, too")
    if pairs and mlp_bias:
        raise BadInput(f"mirrored units have no bias: use pairs or mlp_bias={mlp_bias:g} (set by the preset shaped)")


def gain(weight: Tensor) -> float:
    """The gain of an orthogonal weight of this shape: a layer that widens keeps the mean square."""
    out, into = weight.shape
    return max(math.sqrt(out / into), 1.0)


def _tolerance(weight: Tensor) -> float:
    return max(1e-5, 8 * torch.finfo(weight.dtype).eps)


def _check_value_output(
    part: AttentionParts,
    vo_gain: float,
    carry: int | None,
    mix: float,
    centred: Sequence[Tensor | None],
    row: RowBuilder,
) -> None:
    share = part.heads // len(part.v)  # heads that share a value split its output evenly
    groups = [(part.v, part.out, vo_gain / math.sqrt(share))] if carry is None else split(part, carry, vo_gain, mix)
    (v, out, _), *_ = groups
    rank = min(v.shape[0] * v.shape[1], v.shape[2], len(out))
    product = (part.value_output() if carry is None else out.double() @ v.flatten(0, 1).double()).cpu()
    singular = torch.linalg.svdvals(product)[:rank] if product.isfinite().all() else torch.tensor([math.nan])
    row.values["cond(W_V W_O)"] = condition = float(singular[0] / singular[-1])
    row.values["rank"] = float(rank)
    row.values["scale"] = scale = float(singular.mean())
    tolerance = _tolerance(part.v)
    row.expect(condition - 1 <= tolerance, f"W_V W_O has condition {condition:.3g}, expected 1")
    row.expect(
        abs(scale / vo_gain**2 - 1) <= tolerance,
        f"W_V W_O has scale {scale:.5g}, expected vo_gain^2 = {vo_gain**2:.5g}",
    )
    for v, out, written in groups:
        inner = v.shape[0] * v.shape[1]
        for name, matrix, size, rank in (
            ("W_V", v.flatten(0, 1), vo_gain, min(inner, v.shape[2])),
            ("W_O", out, written, min(inner, v.shape[2], len(out))),
        ):
            error = row.worst("factor error", _from_isometry(matrix, size, rank))
            row.expect(error <= tolerance, f"{name} is {error:.2g} from {size:.3g} times an isometry")
    _check_biases([("value", part.v_bias)], row)
    if not any(same(part.out_bias, bias) for bias in centred):  # a bias shared with the MLP is checked there
        _check_biases([("output", part.out_bias)], row)
    _check_scale(part, row)


def _from_isometry(matrix: Tensor, size: float, rank: int) -> float:
    """How far matrix / size is from orthonormal on its range of the given rank."""
    unit = matrix.detach().double().cpu() / size
    gram = unit @ unit.T if unit.shape[0] <= unit.shape[1] else unit.T @ unit
    if len(gram) == rank:
        return float((gram - torch.eye(rank).double()).abs().max())
    error = (gram @ gram - gram).abs().max()  # a projection, and of this rank
    return float(torch.stack([error, (gram.trace() / rank - 1).abs()]).max())


def _check_query_key(
    traced: PartsTrace, part: AttentionParts, goal: float | None, carry: int | None, row: RowBuilder
) -> None:
    if not {"query-key norm", "query-key scale", "score scale"} & {
        *part.extras
    }:  # else the weights do not set the size of the logits
        mass = _self_attention(part)
        row.values["self-attention"], row.values["least"] = float(mass.mean()), float(mass.min())
        row.expect(
            float(mass.mean()) >= 2 / _TOKENS,
            f"self-attention is {float(mass.mean()):.2g}, uniform attention gives {1 / _TOKENS:.2g}",
        )
    row.values["q-k error"] = error = _from_equal_weight(part)
    row.expect(error <= max(1e-4, _tolerance(part.q)), f"W_Q and W_K are {error:.2g} from equal weight, expected 0")
    _check_biases([("query", part.q_bias), ("key", part.k_bias)], row)
    p = traced.probabilities(part.site.index).double()  # (samples, heads, queries, keys)
    if p.shape[-1] == p.shape[-2]:
        own = p.diagonal(dim1=-2, dim2=-1)  # (samples, heads, tokens)
        if goal is not None:
            row.values["calibrated"] = reached = float(own[:, :carry].mean())
            row.expect(
                abs(reached - goal) <= max(0.02, _tolerance(part.q)),
                f"self-attention on the example is {reached:.3g}, expected {goal:.3g}",
            )
        row.values["on example"] = float(own.mean())
        row.values["uniform"] = float((1 / (p > 0).sum(-1).clamp(min=1)).mean())  # a mask leaves some keys out


def _from_equal_weight(part: AttentionParts) -> float:
    """Relative distance of W_Q W_Q^T from W_K W_K^T, both the singular values of a head's W_Q W_K^T.

    Queries that share a key add up.
    """
    q, k = (weight.detach().double().cpu() for weight in (part.q, part.k))
    grams = (q @ q.mT).unflatten(0, (part.kv_heads, -1)).sum(1)  # (kv_heads, head_dim, head_dim)
    expected = k @ k.mT
    size = expected.abs().amax((-2, -1))
    return float(((grams - expected).abs().amax((-2, -1)) / size.clamp(min=torch.finfo(torch.float64).tiny)).max())


def _self_attention(part: AttentionParts) -> Tensor:
    """(heads,) mean attention of a token to itself among independent normalised tokens."""
    dim = part.q.shape[2]
    tokens = torch.randn(_TOKENS, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = nn.functional.layer_norm(tokens, (dim,))
    q = torch.einsum("hed,nd->hne", part.q.detach().double().cpu(), tokens)
    k = torch.einsum("hed,nd->hne", part.k.detach().double().cpu(), tokens)
    k = k.repeat_interleave(part.heads // part.kv_heads, 0)
    scores = part.softmax_scale * (q @ k.mT)
    return scores.softmax(-1).diagonal(dim1=-2, dim2=-1).mean(-1)


def _check_mlp(
    part: MlpParts, mlp_gain: float, mlp_bias: float, centre: bool, mix: float | None, row: RowBuilder
) -> None:
    """Checks an MLP; `mix` is None without pairs."""
    tolerance = _tolerance(part.up)
    if mix is None:
        stored = (("up", part.up, 1.0), ("gate", part.gate, 1.0), ("down", part.down, mlp_gain))
        weights = [(name, weight, size * gain(weight)) for name, weight, size in stored if weight is not None]
    else:
        row.expect(mirrored(part), "the first units of the MLP are not mirrored pairs")
        weights = [drawn for drawn in split_pairs(part, mlp_gain, mix) if drawn[1].numel()]
    for name, weight, expected in weights:
        rank = min(weight.shape)
        size = float(weight.detach().double().norm()) / math.sqrt(rank)
        error = row.worst("mlp error", abs(size / expected - 1))
        row.expect(error <= tolerance, f"the MLP's {name} has gain {size:.5g}, expected {expected:.5g}")
        error = row.worst("mlp error", _from_isometry(weight, size, rank) if size else math.inf)
        row.expect(error <= tolerance, f"the MLP's {name} is {error:.2g} from orthogonal")
    _check_biases([("up", part.up_bias)], row, mlp_bias)
    _check_biases([("gate", part.gate_bias)], row)
    if centre:
        _check_mean(part, row)
    else:
        _check_biases([("down", part.down_bias)], row)
    _check_scale(part, row)
    if (slope_and_value := correlation_map(part)) is not None:
        row.values["C'(1)"], row.values["C(0)"] = slope_and_value


def _check_mean(part: MlpParts, row: RowBuilder) -> None:
    """With `centre`: the output bias is minus the mean of W_down phi."""
    mean = mean_output(part)
    size = float(mean.abs().max())
    if part.gate is None and part.function is None:
        row.expect(False, "the mean of an unknown activation is not known, expected it removed")
    elif part.gate is not None or size == 0:
        _check_biases([("down", part.down_bias)], row)
    elif part.down_bias is None:
        row.expect(False, "the MLP has no output bias to remove the mean with, expected centred")
    else:
        error = row.worst("bias", float((part.down_bias.detach().double().cpu() + mean).abs().max()) / size)
        row.expect(
            error <= _tolerance(part.down_bias), f"the bias of down leaves {error:.2g} of the mean, expected centred"
        )


def _check_biases(biases: Iterable[tuple[str, Tensor | None]], row: RowBuilder, expected: float = 0.0) -> None:
    for name, bias in biases:
        if bias is not None:
            error = row.worst("bias", float((bias.detach() - expected).abs().max()))
            off = f"{error:.2g}" if expected == 0 else f"{error:.2g} away"
            row.expect(error == 0, f"the bias of {name} reaches {off}, expected {expected:g}")


def _check_scale(part: AttentionParts | MlpParts, row: RowBuilder) -> None:
    if part.scale is not None:
        error = row.worst("layer scale error", float((part.scale.detach().double() - 1).abs().max()))
        row.expect(error == 0, f"LayerScale is {error:.2g} away from 1")
