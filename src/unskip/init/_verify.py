"""What `skipless_` sets, checked on the weights; and beside it what the example sees of it.

    value-output    W_V W_O = c^2 R, half of the scale in each factor      q, k    W_Q W_Q^T = W_K W_K^T
    mlp             W^T W = gain^2 I for each weight                       also    biases, LayerScale, drop path
    with pairs      the same for half of the pairs and for the other units; the other half mirrored exactly
    with carry      W_V W_O = c^2 R for the carrying heads alone           on the example    self-attention = target

Deviations are relative, and 1e-5 is allowed: float32 rounds far below that. Coarser weights are allowed 8 of their
roundings, and queries and keys 1e-4, since their factors come from a decomposition in float32. What is set and not
computed has to be exact: biases of 0, LayerScale of 1, drop path off.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from unskip._checks import number
from unskip.anatomy import (
    AttentionParts,
    MlpParts,
    Parts,
    PartsTrace,
    correlation_map,
    drop_paths,
    example_for,
    mean_output,
    named,
    trace_parts,
)
from unskip.errors import BadInput, InitError
from unskip.init._calibrate import targets
from unskip.init._check import Check, RowBuilder, same
from unskip.init._pairs import mirrored, split_pairs
from unskip.init._value_output import split
from unskip.wiring import Where, check_selector, picks

Name = Literal["value-output", "query-key", "mlp"]
PARTS: tuple[Name, ...] = get_args(Name)  # that `verify_skipless` checks
_TOKENS = 64  # that self-attention is computed among


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
    mix: float = 0.3,
    self_attention: float | Sequence[float] | None = None,
    parts: Sequence[Name] = PARTS,
    where: Where = None,
    check: bool = True,
    c: float | None = None,
) -> Check:
    """Checks what `skipless_` set. Raises InitError where it does not hold, unless `check` is off.

    The options are those that `skipless_` was given; `c` is `vo_gain` in the paper. By site: the condition number of
    W_V W_O on its range, its rank, its scale (expected: vo_gain^2), and the distance of its factors from vo_gain times
    an isometry, with `carry` of the carrying heads; self-attention among 64 independent tokens, the mean and the least
    over heads (expected: twice that of uniform attention), and how far queries and keys are from equal weight; with
    `self_attention`, that of the carrying heads on the example (expected: the target); how far an MLP's weights are
    from orthogonal with the gain of their shape, as a fraction; how far biases are from 0 or `mlp_bias`, or with
    `centre` from minus the activation's mean; how far LayerScale is from 1; the rate of drop path. Beside it, not
    checked: self-attention on the example in the model as it is wired, what uniform attention would give, and of each
    MLP the slope C'(1) of the correlation map and C(0), the cosine of outputs for unrelated tokens. qk_noise and
    qk_identity are not checked: only the distribution of the weights shows them.
    """
    vo_gain = renamed("vo_gain", vo_gain, 3.0, "c", c)
    refuse_number("vo_gain", vo_gain)
    refuse_parts(parts, centre, pairs, mlp_bias, carry, self_attention)
    check_selector(where)
    traced = trace_parts(model, example_for(model, example), weighted=True)
    rows, unknown = [], []
    picked = [each for each in zip(traced.parts.sites, traced.parts, strict=True) if picks(where, each[0])]
    chosen = Parts(traced.parts.model, [site for site, _ in picked], [part for _, part in picked], {})
    goals = dict.fromkeys(range(len(traced.parts)))
    if self_attention is not None:
        goals |= dict(zip((p.site.index for p in chosen.attentions()), targets(chosen, self_attention), strict=True))
    for site, part in picked:
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
        if row.values:  # else nothing of the site was initialised
            rates = [float(getattr(module, rate)) for module, rate in drop_paths(model, site)]
            row.values["drop path"] = rate = max(rates, default=0.0)
            row.expect(rate == 0, f"drop path is {rate:.2g}, expected off")
        rows.append(row.row(site))
    if not rows:
        raise InitError(f"{type(model).__name__}: no site to check")
    notes = (f"{named(unknown)}: parts unknown, not checked",) if unknown else ()
    found = Check(f"{type(model).__name__}: skipless initialisation, {len(rows)} sites", tuple(rows), notes)
    return found.raise_if_failed() if check else found


def refuse_number(name: str, value: float) -> None:
    """Raises BadInput for what cannot be one of the constants."""
    number("skipless_", name, value, zero=name not in ("vo_gain", "mlp_gain", "mix"))


def renamed(name: str, value: float, default: float, old: str, given: float | None) -> float:
    """The value of a number that may be given by its name in the paper instead. Raises BadInput for both."""
    if given is not None and value != default:
        raise BadInput(f"{old} is {name} of the paper: give one of them, not {old}={given!r} and {name}={value!r}")
    return value if given is None else given


def refuse_parts(
    parts: Sequence[Name], centre: bool, pairs: bool, mlp_bias: float, carry: int | None, self_attention: object
) -> None:
    """Raises BadInput for what names no parts, or not the one that an option is about; and for a bias of pairs."""
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
            raise BadInput(f"{option} is about {part}, and parts is {tuple(parts)!r}")
    if pairs and mlp_bias:
        raise BadInput(f"mirrored units have no bias: pairs, or mlp_bias={mlp_bias:g} (which the preset shaped has)")


def gain(weight: Tensor) -> float:
    """The size that an orthogonal weight of this shape starts with: it keeps the size of what it widens."""
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
    share = part.heads // len(part.v)  # what is written for queries of one value is split evenly
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
        for name, matrix, size, held in (
            ("W_V", v.flatten(0, 1), vo_gain, min(inner, v.shape[2])),
            ("W_O", out, written, min(inner, v.shape[2], len(out))),
        ):
            error = row.worst("factor error", _from_isometry(matrix, size, held))
            row.expect(error <= tolerance, f"{name} is {error:.2g} from {size:.3g} times an isometry")
    _check_biases([("value", part.v_bias)], row)
    if not any(same(part.out_bias, bias) for bias in centred):  # one bias for both ends belongs to the MLP
        _check_biases([("output", part.out_bias)], row)
    _check_scale(part, row)


def _from_isometry(matrix: Tensor, size: float, rank: int) -> float:
    """How far a matrix of a size is from orthonormal on its range."""
    unit = matrix.detach().double().cpu() / size
    gram = unit @ unit.T if unit.shape[0] <= unit.shape[1] else unit.T @ unit
    if len(gram) == rank:
        return float((gram - torch.eye(rank).double()).abs().max())
    error = (gram @ gram - gram).abs().max()  # a projection, and of this rank
    return float(torch.stack([error, (gram.trace() / rank - 1).abs()]).max())


def _check_query_key(
    traced: PartsTrace, part: AttentionParts, goal: float | None, carry: int | None, row: RowBuilder
) -> None:
    if not {"query-key norm", "score scale"} & {*part.extras}:  # else the size of the logits is not the weights'
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
    """W_Q W_Q^T against W_K W_K^T, both the singular values of a head's W_Q W_K^T; queries of one key add up."""
    q, k = (weight.detach().double().cpu() for weight in (part.q, part.k))
    grams = (q @ q.mT).unflatten(0, (part.kv_heads, -1)).sum(1)  # (kv_heads, head_dim, head_dim)
    expected = k @ k.mT
    size = expected.abs().amax((-2, -1))
    return float(((grams - expected).abs().amax((-2, -1)) / size.clamp(min=torch.finfo(torch.float64).tiny)).max())


def _self_attention(part: AttentionParts) -> Tensor:
    """The attention a token pays to itself among independent ones of unit variance, by head."""
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
    """With `mix` that of an MLP with pairs."""
    tolerance, whole = _tolerance(part.up), (("up", part.up), ("gate", part.gate), ("down", part.down))
    sizes = {"up": 1.0, "gate": 1.0, "down": mlp_gain}
    weights = [(name, weight, sizes[name] * gain(weight)) for name, weight in whole if weight is not None]
    if mix is not None:
        row.expect(mirrored(part), "the first units of the MLP are no mirrored pairs")
        weights = [each for each in split_pairs(part, mlp_gain, mix) if each[1].numel()]
    for name, weight, expected in weights:
        rank = min(weight.shape)
        size = float(weight.detach().double().norm()) / math.sqrt(rank)
        away = row.worst("mlp error", abs(size / expected - 1))
        row.expect(away <= tolerance, f"the MLP's {name} has gain {size:.5g}, expected {expected:.5g}")
        error = row.worst("mlp error", _from_isometry(weight, size, rank) if size else math.inf)
        row.expect(error <= tolerance, f"the MLP's {name} is {error:.2g} from orthogonal")
    _check_biases([("up", part.up_bias)], row, mlp_bias)
    _check_biases([("gate", part.gate_bias)], row)
    if centre:
        _check_mean(part, row)
    else:
        _check_biases([("down", part.down_bias)], row)
    _check_scale(part, row)
    if (found := correlation_map(part)) is not None:
        row.values["C'(1)"], row.values["C(0)"] = found


def _check_mean(part: MlpParts, row: RowBuilder) -> None:
    """With `centre`: the output bias is minus the mean that the activation leaves."""
    mean = mean_output(part)
    size = float(mean.abs().max())
    if part.gate is None and part.function is None:
        row.expect(False, "the mean of an unknown activation is not known, expected taken out")
    elif part.gate is not None or size == 0:
        _check_biases([("down", part.down_bias)], row)
    elif part.down_bias is None:
        row.expect(False, "the MLP has no output bias to take the mean out with, expected centred")
    else:
        error = row.worst("bias", float((part.down_bias.detach().double().cpu() + mean).abs().max()) / size)
        row.expect(
            error <= _tolerance(part.down_bias), f"the bias of down leaves {error:.2g} of the mean, expected centred"
        )


def _check_biases(biases: Iterable[tuple[str, Tensor | None]], row: RowBuilder, expected: float = 0.0) -> None:
    for name, bias in biases:
        if bias is not None:
            away = row.worst("bias", float((bias.detach() - expected).abs().max()))
            off = f"{away:.2g}" if expected == 0 else f"{away:.2g} away"
            row.expect(away == 0, f"the bias of {name} reaches {off}, expected {expected:g}")


def _check_scale(part: AttentionParts | MlpParts, row: RowBuilder) -> None:
    if part.scale is not None:
        away = row.worst("layer scale error", float((part.scale.detach().double() - 1).abs().max()))
        row.expect(away == 0, f"LayerScale is {away:.2g} away from 1")
