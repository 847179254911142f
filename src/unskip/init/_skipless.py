"""Initialisation for transformers without skips: every sub-layer starts as a well-conditioned map.

    value-output    W_V W_O = vo_gain^2 R                     R orthogonal over the whole width, not head by head
    query-key       W_Q W_K^T ~ qk_noise Z + qk_identity I    Z_ij ~ N(0, 1/d); per head, the best approximation of
                                                              rank d_head
    mlp             W = max(sqrt(out / in), 1) R              R with orthonormal rows or columns

Without a skip the derivative of a block is the product of what its parts do. W_V W_O is a common factor of the
attention's derivative, so its condition number enters everything, and an attention that starts near the identity keeps
tokens apart. From "Cutting the Skip: Training Residual-Free Transformers" (arXiv 2510.00345), where qk_noise is alpha,
qk_identity beta and vo_gain c. How it splits one matrix over heads is not stated there; the default gives every head a
Z of its own.

Beyond the paper: keys and values that several queries share get the approximation of rank d_head that is best for all
of them together; both halves of a gated MLP start orthogonal; where the heads hold fewer dimensions than the stream,
W_V W_O is a partial isometry and a note says so; a head wider than the stream holds the matrix exactly, rotated into
its width. An activation such as GELU has a positive mean, which every MLP adds to all tokens alike and no skip dilutes;
with `centre` the output bias takes it out, -W_down E[phi(W_up z)] for a normalised z.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor, nn

from unskip._warn import warn
from unskip.anatomy import AttentionParts, MlpParts, Parts, drop_paths, example_for, named, trace_parts
from unskip.errors import BadInput, InitError
from unskip.init._check import Check, same, transaction
from unskip.init._verify import PARTS, Name, gain, mean_output, refuse_number, refuse_parts, renamed, verify_skipless
from unskip.wiring import Where, check_selector, picks

Heads = Literal["independent", "shared", "sliced"]


class Constants(TypedDict):
    """What `skipless_` takes as numbers."""

    qk_noise: float
    qk_identity: float
    vo_gain: float


# Constants of the paper, by the model they were used for.
PRESETS: dict[str, Constants] = {
    "vit-base": {"qk_noise": 2.0, "qk_identity": 0.6, "vo_gain": 3.0},
    "vit-small": {"qk_noise": 1.8, "qk_identity": 1.0, "vo_gain": 3.0},
}


def skipless_(
    model: nn.Module,
    example: object = None,
    *,
    qk_noise: float = 2.0,
    qk_identity: float = 0.6,
    vo_gain: float = 3.0,
    generator: torch.Generator | None = None,
    parts: Sequence[Name] = PARTS,
    heads: Heads = "independent",
    centre: bool = False,
    where: Where = None,
    alpha: float | None = None,
    beta: float | None = None,
    c: float | None = None,
) -> Check:
    """Initialises the branches of a model so that it trains without its skips. Returns what `verify_skipless` found.

    `example` is as for audit. `alpha`, `beta` and `c` are the paper's names of `qk_noise`, `qk_identity` and `vo_gain`,
    and are accepted instead. `parts` leaves some of the three out, `where` chooses sites as in `rewire`. `heads` is how
    one matrix becomes heads: "independent" (a Z for each), "shared" (one Z, all heads equal) or "sliced" (one Z, whose
    singular directions are dealt out in order: the last heads see almost nothing). Biases of what is initialised become
    0, but with `centre`, which is not the paper's, that of an MLP's output takes out the mean that its activation
    leaves in every token. LayerScale becomes 1 with "value-output" and "mlp"; drop path is switched off. The same
    generator gives the same weights on every device. The model is not rewired, and where something cannot be
    initialised nothing is changed.
    """
    qk_noise = renamed("qk_noise", qk_noise, 2.0, "alpha", alpha)
    qk_identity = renamed("qk_identity", qk_identity, 0.6, "beta", beta)
    vo_gain = renamed("vo_gain", vo_gain, 3.0, "c", c)
    _refuse_bad(qk_noise, qk_identity, vo_gain, heads, generator)
    refuse_parts(parts, centre)
    check_selector(where)
    whole = example_for(model, example)
    traced = trace_parts(model, whole)
    chosen = _chosen(model, traced.parts, where, parts)
    if centre:
        _refuse_to_centre(chosen)
    draw = _Draw(generator)
    with torch.no_grad(), transaction(model), _stilled(model, chosen) as stilled:
        for attention in chosen.attentions():
            if "value-output" in parts:
                _value_output_(attention, vo_gain, draw)
            if "query-key" in parts:
                _query_key_(attention, qk_noise, qk_identity, heads, draw)
        if "mlp" in parts:
            for mlp in chosen.mlps():
                _mlp_(mlp, draw)
                if centre:
                    _centre_(mlp)
        check = verify_skipless(model, whole, vo_gain=vo_gain, centre=centre, parts=parts, where=where)
    notes = [*check.notes, *_notes(chosen, parts), *_uniform(check), *stilled]
    for note in notes:
        warn(note)
    return Check(check.title, check.rows, tuple(notes))


class _Draw:
    """Random matrices in float64 on the CPU, whatever the model's device and dtype."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def normal(self, *shape: int) -> Tensor:
        device = "cpu" if self.generator is None else self.generator.device
        values = torch.randn(shape, generator=self.generator, device=device, dtype=torch.float64)
        return values.cpu()

    def orthogonal(self, rows: int, columns: int) -> Tensor:
        """Uniform among the matrices with orthonormal rows or columns, whichever are fewer."""
        tall = self.normal(max(rows, columns), min(rows, columns))
        q, r = torch.linalg.qr(tall)
        q = q * r.diagonal().sign()  # else the distribution would not be uniform
        return q.T if rows < columns else torch.as_tensor(q)


def _value_output_(part: AttentionParts, gain: float, draw: _Draw) -> None:
    groups, width, columns = part.v.shape
    inner, rows = groups * width, part.out.shape[0]
    value = draw.orthogonal(inner, columns)
    if inner >= columns:
        out = draw.orthogonal(rows, columns) @ value.T  # so that out @ value is the first factor
    else:
        out = draw.orthogonal(rows, inner)
    part.v.copy_((gain * value).reshape(part.v.shape))
    share = part.heads // groups  # queries that read the same values also share what they write
    out = out.reshape(rows, groups, 1, width).expand(rows, groups, share, width) / share
    part.out.copy_((gain * out).reshape(part.out.shape))
    _zero(part.v_bias, part.out_bias)
    _unscale(part)


def _query_key_(part: AttentionParts, noise: float, identity: float, heads: Heads, draw: _Draw) -> None:
    groups, width, dim = part.k.shape
    share = part.heads // groups
    if heads == "sliced":
        if share > 1 or part.heads * width > dim:
            raise InitError(f"{part.site.name}: one matrix cannot be dealt out to grouped or wider heads")
        left, right = _factors(_target(draw, noise, identity, dim), dim)
        part.q.copy_(left.T[: part.heads * width].reshape(part.q.shape))
        part.k.copy_(right.T[: part.heads * width].reshape(part.k.shape))
    else:
        queries = part.q.unflatten(0, (groups, share))
        one = _target(draw, noise, identity, dim).repeat(share, 1) if heads == "shared" else None
        for group in range(groups):
            target = _target(draw, noise, identity, dim, share) if one is None else one
            left, right = _factors(target, min(width, dim))  # (share * dim, rank), (dim, rank)
            if width > dim:  # turned into all of the head's width: a row of zeros would get no gradient
                turn = draw.orthogonal(width, dim).float()
                left, right = left @ turn.T, right @ turn.T
            queries[group].copy_(left.reshape(share, dim, width).mT)
            part.k[group].copy_(right.T)
    _zero(part.q_bias, part.k_bias)


def _target(draw: _Draw, noise: float, identity: float, dim: int, count: int = 1) -> Tensor:
    """noise Z + identity I, for queries that share their keys one under the other."""
    blocks = [noise * draw.normal(dim, dim) / math.sqrt(dim) + identity * torch.eye(dim).double() for _ in range(count)]
    return torch.cat(blocks)


def _factors(target: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Left and right factor of the best approximation of a rank, of equal weight. float32: no check needs more."""
    u, s, v = torch.linalg.svd(target.float(), full_matrices=False)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, v[:rank].T * root


def _mlp_(part: MlpParts, draw: _Draw) -> None:
    for weight in (part.up, part.gate, part.down):
        if weight is not None:
            weight.copy_(gain(weight) * draw.orthogonal(*weight.shape))
    _zero(part.up_bias, part.gate_bias, part.down_bias)
    _unscale(part)


def _centre_(part: MlpParts) -> None:
    if part.down_bias is not None:
        part.down_bias.copy_(0 - mean_output(part))


def _refuse_to_centre(chosen: Parts) -> None:
    without = [part.site for part in chosen.mlps() if part.gate is None and part.down_bias is None]
    if without:
        raise InitError(
            f"{named(without)}: the MLP has no output bias to take a mean out with. Nothing was changed; leave centre "
            "out, or such sites by where=."
        )
    unknown = [part.site for part in chosen.mlps() if part.gate is None and part.function is None]
    if unknown:
        raise InitError(f"{named(unknown)}: the mean of an unknown activation is not known. Nothing was changed.")


def _unscale(part: AttentionParts | MlpParts) -> None:
    """LayerScale would undo the size that the last weight was given."""
    if part.scale is not None:
        part.scale.fill_(1)


def _zero(*biases: Tensor | None) -> None:
    for bias in biases:
        if bias is not None:
            bias.zero_()


def _refuse_bad(qk_noise: float, qk_identity: float, vo_gain: float, heads: str, generator: object) -> None:
    for name, value in (("qk_noise", qk_noise), ("qk_identity", qk_identity), ("vo_gain", vo_gain)):
        refuse_number(name, value)
    if heads not in get_args(Heads):
        raise BadInput(f"heads is {heads!r}; it can be {', '.join(get_args(Heads))}")
    if not isinstance(generator, torch.Generator | None):
        raise BadInput(f"generator is {generator!r}; write torch.Generator().manual_seed({generator!r})")


def _chosen(model: nn.Module, found: Parts, where: Where, parts: Sequence[Name]) -> Parts:
    """The parts of the chosen sites. Raises where one of them cannot be initialised."""
    pairs = [(site, part) for site, part in zip(found.sites, found, strict=True) if picks(where, site)]
    kinds = {"mlp"} if set(parts) == {"mlp"} else {"attention"} if "mlp" not in parts else {"attention", "mlp", "conv"}
    pairs = [(site, part) for site, part in pairs if site.kind in kinds | {"parallel", "other"}]
    if not pairs:
        raise InitError(f"{type(model).__name__}: no site to initialise")
    chosen = Parts(found.model, [site for site, _ in pairs], [part for _, part in pairs], {})
    unknown = [site for site, part in pairs if part is None]
    if unknown:
        raise InitError(
            f"{named(unknown)}: {found.reasons[unknown[0].index]}. Nothing was changed; leave such sites out by where=."
        )
    crossed = [part.site for part in chosen.attentions() if part.cross and "query-key" in parts]
    if crossed:
        raise InitError(
            f"{named(crossed)}: keys come from another sequence, where no attention is the identity. Nothing was "
            "changed; leave such sites out by where=, or 'query-key' out of parts."
        )
    tied = [part.site for part in chosen.attentions() if same(part.q, part.k) and "query-key" in parts]
    if tied:
        raise InitError(
            f"{named(tied)}: queries and keys are one weight, and then W_Q W_K^T is symmetric and holds no Z. Nothing "
            "was changed; leave such sites out by where=, or 'query-key' out of parts."
        )
    branches = [*chosen.attentions(), *chosen.mlps()]
    computed = [part.site for part in branches if "computed bias" in part.extras]
    if computed:
        raise InitError(
            f"{named(computed)}: a bias that is computed and not stored cannot be set to 0. Nothing was changed; leave "
            "such sites out by where=."
        )
    weights = [p for part in branches for p in part.parameters]
    if any(not p.is_floating_point() or p.device.type == "meta" for p in weights):
        raise InitError(f"{type(model).__name__}: its weights are on the meta device or not floating: nothing to fill")
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
                f"{named([p.site for p in more])}: between values and stream stands more than W_V W_O "
                f"({', '.join(_between(more[0]))}), so its condition is not that of what tokens see"
            )
    sized = [p.site for p in chosen.attentions() if {"query-key norm", "score scale"} & {*p.extras}]
    if "query-key" in parts and sized:
        notes.append(
            f"{named(sized)}: the model normalises or scales its queries and keys, so their weights do not decide how "
            "near attention starts to the identity, and self-attention is not checked"
        )
    factors = [p.site for p in branches if {"output factor", "computed scale"} & {*p.extras}]
    if factors:
        notes.append(f"{named(factors)}: the branch is multiplied by a factor of the model's own, which stays")
    gated = [p.site for p in branches if p.closed]
    if gated:
        notes.append(
            f"{named(gated)}: the branch is multiplied by a gate that starts at zero (adaLN). Cut, nothing would pass."
        )
    return notes


def _between(part: AttentionParts) -> list[str]:
    return [extra for extra in part.extras if extra.startswith(("value ", "output ")) and extra != "output factor"]


def _uniform(check: Check) -> list[str]:
    """A note where attention on the example is near uniform, as it is once tokens have become alike (rank collapse)."""
    rows = [row for row in check.rows if row.values.get("on example") is not None]
    uniform = [row.site for row in rows if (row.values["on example"] or 0) < 1.5 * (row.values["uniform"] or 0)]
    if not uniform:
        return []
    return [
        f"{named(uniform)}: near-uniform attention on the example. Tokens are almost equal there (rank collapse): the "
        "model starts ill-conditioned from that depth on."
    ]


@contextmanager
def _stilled(model: nn.Module, chosen: Parts) -> Iterator[list[str]]:
    """Switches drop path off at the chosen sites, and on again where what is inside raises."""
    before = []
    try:
        for site in chosen.sites:
            for module, rate in drop_paths(model, site):
                before.append((module, rate, getattr(module, rate)))
                setattr(module, rate, 0.0)
        count = len(before)
        note = f"drop path was switched off in {count} modules: a dropped branch has no skip to live on"
        yield [note] if count else []
    except BaseException:
        for module, rate, value in before:
            setattr(module, rate, value)
        raise
