"""What `skipless_` promises, measured on the weights, and beside it what the example sees of it.

cond(W_V W_O) = 1 on its range        self-attention well above even        W^T W = gain^2 I for each MLP weight
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from unskip.anatomy._example import example_for
from unskip.anatomy._parts import AttentionParts, MlpParts, Opened, Parts, lay_open
from unskip.errors import BadInput, InitError
from unskip.init._check import Check, Row, named
from unskip.wiring._select import Where, picks, selector

Name = Literal["value-output", "query-key", "mlp"]
PARTS: tuple[Name, ...] = get_args(Name)
_TOKENS = 64  # that attention is judged among


def verify_skipless(
    model: nn.Module,
    example: object = None,
    *,
    parts: Sequence[Name] = PARTS,
    where: Where = None,
    check: bool = True,
) -> Check:
    """What `skipless_` promises, measured. Raises InitError where it does not hold, unless `check` is off.

    By site: the condition number of W_V W_O on its range and the rank it has; the share of attention that a token pays
    to itself among 64 independent tokens, over heads the mean and the least (the promise: twice what even attention
    would pay); how far an MLP's weights are from orthogonal, as a fraction. Beside it, what tokens of the example pay
    to themselves in the model as it is wired, and what would be even: no promise, since tokens may grow alike.
    """
    refuse_parts(parts)
    selector(where)
    opened = lay_open(model, example_for(model, example), weighted=True)
    rows, unknown = [], []
    for site, part in zip(opened.parts.sites, opened.parts, strict=True):
        if not picks(where, site):
            continue
        if part is None:
            unknown.append(site)
            continue
        values: dict[str, float | None] = {}
        failed: list[str] = []
        only = Parts(opened.parts.model, [site], [part], {})
        for attention in only.attentions():
            if "value-output" in parts:
                _judge_value_output(attention, values, failed)
            if "query-key" in parts:
                _judge_query_key(opened, attention, values, failed)
        for mlp in only.mlps():
            if "mlp" in parts:
                _judge_mlp(mlp, values, failed)
        rows.append(Row(site, values, tuple(failed)))
    if not rows:
        raise InitError(f"{type(model).__name__}: no site to judge")
    notes = (f"{named(unknown)}: parts unknown, not judged",) if unknown else ()
    found = Check(f"{type(model).__name__}: skipless initialisation, {len(rows)} sites", tuple(rows), notes)
    return found.raise_if_failed() if check else found


def refuse_parts(parts: Sequence[Name]) -> None:
    names = parts if isinstance(parts, Collection) and not isinstance(parts, str) else ()
    if not names or any(name not in PARTS for name in names):
        raise BadInput(f"parts is {parts!r}; it is a sequence of some of {', '.join(PARTS)}")


def gain(weight: Tensor) -> float:
    out, into = weight.shape
    return max(math.sqrt(out / into), 1.0)


def _judge_value_output(part: AttentionParts, values: dict[str, float | None], failed: list[str]) -> None:
    rank = min(part.v.shape[0] * part.v.shape[1], *part.v.shape[2:], part.out.shape[0])
    product = part.value_output().cpu()
    singular = torch.linalg.svdvals(product)[:rank] if product.isfinite().all() else torch.tensor([math.nan])
    values["cond(W_V W_O)"] = condition = float(singular[0] / singular[-1])
    values["rank"] = float(rank)
    tolerance = max(1e-5, 8 * torch.finfo(part.v.dtype).eps)
    if not condition - 1 <= tolerance:
        failed.append(f"W_V W_O has condition {condition:.3g}, promised 1")


def _judge_query_key(opened: Opened, part: AttentionParts, values: dict[str, float | None], failed: list[str]) -> None:
    if not {"query-key norm", "score scale"} & {*part.extras}:  # else the size of the logits is not the weights'
        mass = _self_attention(part)
        values["self-attention"], values["least"] = float(mass.mean()), float(mass.min())
        if not float(mass.mean()) >= 2 / _TOKENS:
            failed.append(f"a token pays {float(mass.mean()):.2g} of its attention to itself, evenly {1 / _TOKENS:.2g}")
    p = opened.probabilities(part.site.index).double()  # (samples, heads, queries, keys)
    if p.shape[-1] == p.shape[-2]:
        values["on example"] = float(p.diagonal(dim1=-2, dim2=-1).mean())
        values["evenly"] = float((1 / (p > 0).sum(-1).clamp(min=1)).mean())  # a mask leaves some keys out


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


def _judge_mlp(part: MlpParts, values: dict[str, float | None], failed: list[str]) -> None:
    errors = []
    for weight in (part.up, part.gate, part.down):
        if weight is not None:
            unit = weight.detach().double().cpu() / gain(weight)
            gram = unit @ unit.T if unit.shape[0] <= unit.shape[1] else unit.T @ unit
            errors.append((gram - torch.eye(len(gram)).double()).abs().max())
    values["mlp error"] = worst = float(torch.stack(errors).max())  # NaN where one is
    if not worst <= max(1e-5, 8 * torch.finfo(part.up.dtype).eps):
        failed.append(f"the MLP's weights are {worst:.2g} from orthogonal")
