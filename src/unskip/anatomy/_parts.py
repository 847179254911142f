"""Parts: typed views on the weights of every branch, whatever the model's layout.

An attention's q, k and v are (heads, head_dim, in), its output (out, heads * head_dim); an MLP's up and gate are
(hidden, in), its down (out, hidden), as nn.Linear stores them. They are detached and share memory with the model's
parameters: writing into them (`parts[0].q.mul_(2)`) changes the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, overload

import torch
from torch import Tensor, nn

from unskip._table import table
from unskip.anatomy._activations import ACTIVATIONS, Curve
from unskip.anatomy._sites import Site


class _ShapeRepr:
    """A repr with the shapes of tensors instead of their values."""

    def __repr__(self) -> str:
        named_values = {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={_brief(value)}' for name, value in named_values.items())})"


def _brief(value: object) -> str:
    if isinstance(value, Tensor):
        return f"<{', '.join(map(str, value.shape))}>"
    if isinstance(value, Site):
        return value.name
    return f"({', '.join(map(_brief, value))})" if isinstance(value, tuple) else repr(value)


@dataclass(frozen=True, eq=False, repr=False)
class NormParts(_ShapeRepr):
    """A normalisation; `path` is that of its module, "" without one."""

    path: str
    kind: Literal["layernorm", "rmsnorm", "other"]
    place: Literal["pre", "out", "post"]
    eps: float | None
    gain: Tensor | None
    bias: Tensor | None
    offset: float = 0.0  # the effective gain is offset + gain: Gemma stores gain - 1


@dataclass(frozen=True, eq=False, repr=False)
class _Branch(_ShapeRepr):
    site: Site
    norm: NormParts | None  # before the branch, or else after it or after the sum
    out_norm: NormParts | None  # at the end of the branch, before the sum
    scale: Tensor | None  # LayerScale: a stored vector that multiplies the branch's output
    gated: bool  # a factor that depends on the input multiplies the branch's output (adaLN)
    closed: bool  # a gate, or a scale computed from weights, is zero on the example, as at a zero initialisation
    alpha: float
    beta: float
    extras: tuple[str, ...]  # other steps: "query-key norm", "mask", "input modulation", "output factor", ...
    parameters: tuple[nn.Parameter, ...]  # the parameters behind the views
    biases: tuple[nn.Parameter, ...]  # the parameters of the branch's biases


@dataclass(frozen=True, eq=False, repr=False)
class AttentionParts(_Branch):
    """The weights of an attention. `cross`: keys and values read another sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    cross: bool
    softmax_scale: float  # of q k^T before the softmax

    @property
    def heads(self) -> int:
        return len(self.q)

    @property
    def kv_heads(self) -> int:
        return len(self.k)

    @property
    def head_dim(self) -> int:
        return self.q.shape[1]

    def value_output(self) -> Tensor:
        """W_V W_O as one (out, in) matrix, float64: the map of a token that attends only to itself."""
        group = self.heads // len(self.v)
        out = self.out.detach().double().unflatten(1, (self.heads, -1))  # (out, heads, head_dim)
        value = self.v.detach().double().repeat_interleave(group, 0)  # (heads, head_dim, in)
        return torch.mm(out.flatten(1), value.flatten(0, 1))


@dataclass(frozen=True, eq=False, repr=False)
class MlpParts(_Branch):
    """The weights of an MLP. `activation` is a name in ACTIVATIONS, or None."""

    up: Tensor
    gate: Tensor | None
    down: Tensor
    up_bias: Tensor | None
    gate_bias: Tensor | None
    down_bias: Tensor | None
    activation: str | None
    curve: Curve | None  # the traced activation: values on a grid, and operators
    steps: tuple[str, ...] = ()  # other operators of the branch, also if they changed nothing on the example
    reads_stream: bool = True  # the branch reads the tensor that it is added to, entry by entry up to rounding

    @property
    def function(self) -> Callable[[Tensor], Tensor] | None:
        """The activation as a function."""
        return None if self.activation is None else ACTIVATIONS[self.activation]


@dataclass(frozen=True, eq=False)
class ParallelParts:
    """An attention and an MLP whose sum is added at one site."""

    attention: AttentionParts
    mlp: MlpParts

    @property
    def site(self) -> Site:
        return self.attention.site


Part = AttentionParts | MlpParts | ParallelParts  # the weights of the branch of one site


class Parts(Sequence[Part | None]):
    """The parts of every site, in order; None if the layout is unknown, with the reason in `reasons`."""

    def __init__(self, model: str, sites: Sequence[Site], parts: Sequence[Part | None], reasons: dict[int, str]):
        self.model = model
        self.sites = tuple(sites)
        self.reasons = reasons  # by site index
        self._parts = tuple(parts)

    @overload
    def __getitem__(self, index: int) -> Part | None: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Part | None]: ...
    def __getitem__(self, index: int | slice) -> Part | Sequence[Part | None] | None:
        return self._parts[index]

    def __len__(self) -> int:
        return len(self._parts)

    def attentions(self) -> Iterator[AttentionParts]:
        """Every attention, including those of parallel sites."""
        for part in self._parts:
            if isinstance(part, ParallelParts):
                yield part.attention
            elif isinstance(part, AttentionParts):
                yield part

    def mlps(self) -> Iterator[MlpParts]:
        """Every MLP, including those of parallel sites."""
        for part in self._parts:
            if isinstance(part, ParallelParts):
                yield part.mlp
            elif isinstance(part, MlpParts):
                yield part

    def __str__(self) -> str:
        header = ("site", "path", "kind", "parts", "activation", "besides")
        lines: list[list[object]] = []
        for site, part in zip(self.sites, self._parts, strict=True):
            lines += [[site.index, site.path or "(model)", site.kind, *cells] for cells in _cells(part)]
            if part is None:
                lines[-1][-1] = self.reasons[site.index]
        known = sum(part is not None for part in self._parts)
        return f"{self.model}: the weights of {known} of {len(self)} sites\n\n" + table(header, lines)

    def __repr__(self) -> str:
        known = sum(part is not None for part in self._parts)
        return f"<Parts of {self.model}: {known} of {len(self)} sites>"


def _cells(part: Part | None) -> list[list[object]]:
    if part is None:
        return [["unknown", None, ""]]
    if isinstance(part, ParallelParts):
        return [*_cells(part.attention), *_cells(part.mlp)]
    if isinstance(part, AttentionParts):
        heads = f"{part.heads} heads of {part.head_dim}"
        if part.kv_heads != part.heads:
            heads += f", {part.kv_heads} for keys and values"
        return [[heads + (", cross" if part.cross else ""), None, _besides(part)]]
    width = f"{part.up.shape[1]} > {len(part.up)} > {len(part.down)}" + (", gated" if part.gate is not None else "")
    return [[width, part.activation or "unknown", _besides(part)]]


def _besides(part: _Branch) -> str:
    return ", ".join([*part.extras, *(["layer scale"] if part.scale is not None else []), *(["gate"] * part.gated)])
