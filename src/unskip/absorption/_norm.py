"""The weights of the norms of a block, and the check of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from unskip import _checks
from unskip._words import nearest
from unskip.anatomy import NormKind, NormParts
from unskip.errors import BadInput

Place = Literal["pre", "post", "out"]


@dataclass(frozen=True, eq=False)
class Norm:
    """LayerNorm or RMSNorm. `gain` is the effective gain; None means 1."""

    kind: NormKind = "layernorm"
    place: Place = "pre"
    eps: float | None = 1e-5
    gain: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        for name, value, known in (("kind", self.kind, NormKind), ("place", self.place, Place)):
            if value not in get_args(known):
                raise BadInput(f"Norm: no {name} {value!r}{nearest(str(value), get_args(known))}; {get_args(known)}")
        if self.eps is not None:
            _checks.number("Norm", "eps", self.eps)
        for name in ("gain", "bias"):
            value = getattr(self, name)
            if value is not None:
                check_weight(f"Norm: {name}", value, 1)

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "other":
            raise BadInput("Norm: a norm of kind 'other' cannot be computed")
        if self.kind == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + (self.eps or 0.0))
        if self.gain is not None:
            out = out * self.gain.to(x)
        return out if self.bias is None else out + self.bias.to(x)


def norm_of(part: Norm | NormParts) -> Norm:
    """Returns a Norm as it is; converts the NormParts of `unskip.parts`, with the offset added to the gain."""
    if isinstance(part, Norm):
        return part
    if not isinstance(part, NormParts):
        raise BadInput(f"norm: give an absorption.Norm, several as a tuple, or None, got {type(part).__name__}")
    gain, offset = part.gain, part.offset
    if gain is not None and offset:
        gain = gain.detach().double() + offset
    return Norm(part.kind, part.place, part.eps, gain, part.bias)


def check_weight(name: str, value: object, ndim: int) -> None:
    if not isinstance(value, Tensor):
        raise BadInput(f"{name} must be a tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise BadInput(f"{name} is stored as {value.layout}; give it as a dense tensor, with .to_dense()")
    if value.is_meta:
        raise BadInput(f"{name} is on the meta device and holds no numbers; load the weights first")
    if not value.is_floating_point():
        raise BadInput(
            f"{name} is {str(value.dtype).removeprefix('torch.')}: the decision is about real weights; "
            "dequantise or cast them to a floating dtype first"
        )
    if value.ndim != ndim or not value.numel():
        raise BadInput(f"{name} must have {ndim} dimension(s) and not be empty, got shape {tuple(value.shape)}")
    if value.element_size() == 1:
        name_of = str(value.dtype).removeprefix("torch.")
        raise BadInput(f"{name} is {name_of}: cast it to bfloat16, which holds float8 weights exactly")
    bad = int((~torch.isfinite(value.detach())).sum())
    if bad:
        raise BadInput(f"{name} has {bad} entries that are NaN or infinite; a verdict needs finite weights")
