"""The weights of a block: one MLP with its skip and its norms.

    F(x) = A x + W_down phi(W_up x + b_up) + b_down                           plain
    F(x) = A x + W_down (phi(W_gate x + b_gate) * (W_up x + b_up)) + b_down   gated

A norm is placed before the MLP ("pre"), at the end of the branch ("out"), or after the sum ("post").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unskip.absorption._activations import Activation, resolve
from unskip.absorption._norm import Norm, check_weight, norm_of
from unskip.errors import BadInput

WEIGHTS = ("up", "gate", "down", "up_bias", "gate_bias", "down_bias")


@dataclass(frozen=True, eq=False)
class Block:
    """The weights of one block as nn.Linear stores them: up and gate (h, d), down (d_out, h).

    `skip` is a number or a (d_out, d) matrix; `norm` is one norm, or several at different places. With a gate,
    activation="silu" means "swiglu".
    """

    up: Tensor
    down: Tensor
    gate: Tensor | None = None
    up_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str = "gelu"
    skip: float | Tensor = 1.0
    norm: Norm | tuple[Norm, ...] | None = None

    def __post_init__(self) -> None:
        phi, gated = resolve(self.activation)
        object.__setattr__(self, "_phi", phi)
        check_weight("Block: up", self.up, 2)
        check_weight("Block: down", self.down, 2)
        h, d = self.up.shape
        if self.down.shape[1] != h:
            raise BadInput(
                f"Block: up is {tuple(self.up.shape)} and down {tuple(self.down.shape)}: down must be (d_out, {h}), "
                "as nn.Linear stores it; transpose it if it is stored the other way"
            )
        if gated and self.gate is None:
            raise BadInput(f"Block: {self.activation!r} is a gated activation, so it needs gate, a ({h}, {d}) weight")
        if self.gate is None and self.gate_bias is not None:
            raise BadInput("Block: gate_bias is given without gate")
        if self.gate is not None:
            check_weight("Block: gate", self.gate, 2)
            _shaped("gate", self.gate, (h, d))
        weights = {name: value for name in ("up", "down", "gate") if (value := getattr(self, name)) is not None}
        common = reduce(torch.promote_types, (value.dtype for value in weights.values()))
        for name, value in weights.items():  # one dtype, or the replacement would be rounded to the coarsest
            object.__setattr__(self, name, value.to(common))
        for name, size in (("up_bias", h), ("gate_bias", h), ("down_bias", len(self.down))):
            value = getattr(self, name)
            if value is not None:
                check_weight(f"Block: {name}", value, 1)
                _shaped(name, value, (size,))
        if isinstance(self.skip, Tensor) and self.skip.ndim:
            check_weight("Block: skip", self.skip, 2)
            _shaped("skip", self.skip, (len(self.down), d))
        else:
            number = float(self.skip) if isinstance(self.skip, Tensor | int | float) else math.nan
            if not math.isfinite(number):
                raise BadInput(f"Block: skip must be a finite number or a (d_out, d) tensor, got {self.skip!r:.60}")
            if number and len(self.down) != d:
                raise BadInput(
                    f"Block: a number as skip needs as many outputs as inputs, got {len(self.down)} and {d}; "
                    f"give a ({len(self.down)}, {d}) matrix"
                )
            object.__setattr__(self, "skip", number)
        given = self.norm if isinstance(self.norm, tuple) else () if self.norm is None else (self.norm,)
        norms = tuple(norm_of(n) for n in given)
        for norm in norms:
            for name in ("gain", "bias"):
                value = getattr(norm, name)
                if value is not None:
                    _shaped(f"norm.{name} ({norm.place})", value, (d if norm.place == "pre" else len(self.down),))
        if len({norm.place for norm in norms}) < len(norms):
            raise BadInput("Block: two norms stand at the same place")
        object.__setattr__(self, "norm", norms or None)

    @property
    def phi(self) -> Activation:
        """The activation and its properties."""
        return self._phi  # type: ignore[attr-defined,no-any-return]

    @property
    def gated(self) -> bool:
        return self.gate is not None

    @property
    def width(self) -> int:
        return len(self.up)

    @property
    def inputs(self) -> int:
        return self.up.shape[1]

    @property
    def outputs(self) -> int:
        return len(self.down)

    @property
    def norms(self) -> dict[str, Norm]:
        """The norms by their place."""
        return {norm.place: norm for norm in (self.norm or ())}  # type: ignore[union-attr]

    @property
    def matrix(self) -> Tensor:
        """The skip as a (d_out, d) matrix in float64."""
        if isinstance(self.skip, Tensor):
            return self.skip.detach().double().to(self.up.device)
        eye = torch.eye(self.outputs, self.inputs, dtype=torch.float64, device=self.up.device)
        return self.skip * eye

    @property
    def roundoff(self) -> float:
        """The unit roundoff of the weights' dtype."""
        return torch.finfo(self.up.dtype).eps / 2

    @cached_property
    def grain(self) -> float:
        """The unit roundoff of the coarsest dtype that represents every weight exactly, whatever they are stored in."""
        weights = [w.detach() for w in (self.up, self.down, self.gate) if w is not None]
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if all(_holds(w.flatten()[:4096], dtype) for w in weights) and all(_holds(w, dtype) for w in weights):
                return max(torch.finfo(dtype).eps / 2, self.roundoff)
        return self.roundoff

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights; biases may have others."""
        return self.up.dtype

    def hidden(self, x: Tensor) -> Tensor:
        """The hidden activations for x (..., d), in the dtype of x; a norm before the MLP is applied first."""
        x = self.norms["pre"](x) if "pre" in self.norms else x
        rows = F.linear(x, self.up.to(x), None if self.up_bias is None else self.up_bias.to(x))
        if self.gate is None:
            return self.phi.function(rows)
        bias = None if self.gate_bias is None else self.gate_bias.to(x)
        return self.phi.function(F.linear(x, self.gate.to(x), bias)) * rows

    def __call__(self, x: Tensor) -> Tensor:
        """The output of the whole block for x (..., d), in the dtype of x."""
        norms = self.norms
        out = F.linear(self.hidden(x), self.down.to(x), None if self.down_bias is None else self.down_bias.to(x))
        if "out" in norms:
            out = norms["out"](out)
        if isinstance(self.skip, Tensor):
            out = out + x @ self.skip.to(x).mT
        elif self.skip:
            out = out + self.skip * x
        return norms["post"](out) if "post" in norms else out

    @property
    def extreme(self) -> bool:
        """Whether some weights are so large or small that products of their squares may leave the range of float64."""
        skip = self.skip.detach() if isinstance(self.skip, Tensor) else torch.tensor([[self.skip]], dtype=torch.float64)
        most = []
        for weight, axis in ((self.up.detach(), 1), (self.down.detach(), 0), (skip, 0)):
            low, high = torch.aminmax(weight, dim=axis)
            most.append(torch.maximum(high, -low))
        most += [bias.detach().abs() for bias in (self.up_bias, self.down_bias) if bias is not None]
        sizes = torch.cat([each.double().cpu() for each in most])
        return bool(((sizes > 1e70) | ((sizes > 0) & (sizes < 1e-70))).any())

    def bare(self) -> Block:
        """The block without its norms, which is the case of the paper."""
        return self if self.norm is None else replace(self, norm=None)

    def stored_as(self, other: Block) -> Block:
        """The same block with its weights in the dtypes of another one."""

        def dtype(name: str) -> torch.dtype:
            like = getattr(other, name)
            return (other.up if like is None else like).dtype

        held: dict[str, Any] = {name: value.to(dtype(name)) for name, value in self.tensors().items() if name != "skip"}
        return replace(self, **held)

    def double(self) -> Block:
        """The same block with every weight in float64; the stored dtypes are not kept."""
        held: dict[str, Any] = {name: value.double() for name, value in self.tensors().items()}
        return self if all(getattr(self, name).dtype == torch.float64 for name in held) else replace(self, **held)

    def tensors(self) -> dict[str, Tensor]:
        """The weights and biases by name, detached, and the skip if it is a matrix."""
        values = {name: getattr(self, name) for name in (*WEIGHTS, "skip")}
        return {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}


def _holds(weight: Tensor, dtype: torch.dtype) -> bool:
    return weight.dtype == dtype or bool((weight.to(dtype).to(weight.dtype) == weight).all())


def _shaped(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise BadInput(f"Block: {name} must have shape {shape}, got {tuple(value.shape)}")
