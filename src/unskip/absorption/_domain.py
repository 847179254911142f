"""Bounded sets of inputs for a verdict: a box or an ellipsoid.

    {m + L s: |s| < 1}        |s| is max_i |s_i| for a box, whose L is diagonal, and Euclidean for an ellipsoid

A ReLU-like unit whose hinge u.x + b = 0 misses the domain is affine there. The hinge misses it if |u.m + b| >= |L^T u|
in the dual norm: the sum of the absolute values for a box, the Euclidean norm for an ellipsoid.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unskip import _checks
from unskip.absorption._norm import Norm
from unskip.errors import BadInput

_LARGEST = 1e100  # the largest number in inputs, which a covariance squares
MARGIN = 0.1  # by how much the domain around data is wider than the data, relative


@dataclass(frozen=True, eq=False)
class Domain:
    """A bounded convex set of inputs with a nonempty interior. Made by `ball`, `box` or `around`."""

    text: str
    center: Tensor  # (d,)
    factor: Tensor  # L: (d, d) and lower triangular, or (d,) where it is diagonal
    square: bool = False  # a box

    @classmethod
    def ball(cls, center: Tensor, radius: float) -> Domain:
        """|x - center| < radius."""
        center = _numbers("ball", center)
        radius = _checks.number("Domain.ball", "radius", radius, high=_LARGEST, zero=False)
        where = "the origin" if not bool(center.any()) else "its centre"
        return cls(f"the ball of radius {radius:g} around {where}", center, torch.full_like(center, radius))

    @classmethod
    def box(cls, low: Tensor, high: Tensor) -> Domain:
        """low < x < high, entry by entry."""
        low, high = _numbers("box", low), _numbers("box", high)
        if low.shape != high.shape or not bool((low < high).all()):
            raise BadInput("Domain.box: low must be below high in every entry, and of the same length")
        text = f"a box with sides of {float((high - low).min()):.3g} to {float((high - low).max()):.3g}"
        return cls(text, (low + high) / 2, (high - low) / 2, square=True)

    @classmethod
    def around(cls, data: Tensor, margin: float = MARGIN) -> Domain:
        """The ellipsoid with the mean and covariance of data (..., d) that contains them, widened by `margin`."""
        x = as_rows("domain: data", data)
        if len(x) < 2:
            raise BadInput(f"domain: data needs at least 2 inputs, got {len(x)}")
        margin = _checks.number("domain", "margin", margin, zero=False)
        mean = x.mean(0)
        centred = x - mean
        covariance = centred.mT @ centred / len(x)
        floor = 1e-6 * (1 + x.abs().amax(0))  # a constant channel still gets an interior
        covariance.diagonal().mul_(1 + 1e-9).add_(floor**2)
        factor = torch.linalg.cholesky(covariance)
        reach = torch.linalg.solve_triangular(factor, centred.mT, upper=False).norm(dim=0).max().clamp(min=1e-3)
        text = f"the ellipsoid around {len(x)} inputs, {margin:.0%} wider than they are"
        return cls(text, mean, factor * float(reach) * (1 + margin))

    @classmethod
    def after(cls, norm: Norm, inputs: int) -> Domain:
        """An ellipsoid that contains every output of a LayerNorm or RMSNorm: gain * s + bias with |s| < sqrt(d)."""
        one = torch.ones(inputs, dtype=torch.float64)
        gain = one if norm.gain is None else norm.gain.detach().double().abs()
        center = 0 * one if norm.bias is None else norm.bias.detach().double()
        factor = inputs**0.5 * gain.clamp(min=1e-6 * float(gain.max()) or 1e-6)
        return cls(f"an ellipsoid that holds every output of the {norm.kind} before it", center.to(factor), factor)

    def on(self, device: torch.device) -> Domain:
        """The same domain on another device."""
        return replace(self, center=self.center.to(device), factor=self.factor.to(device))

    def _half_width(self, rows: Tensor) -> Tensor:
        """(h,) the largest |u.(x - m)| on the domain, for each row u."""
        wide = rows * self.factor if self.factor.ndim == 1 else rows @ self.factor
        width: Tensor = wide.norm(p=1 if self.square else 2, dim=1)
        return width

    def side(self, rows: Tensor, bias: Tensor) -> Tensor:
        """(h,) the sign of rows x + bias if it is constant on the domain, else 0."""
        value = rows @ self.center + bias
        return torch.where(value.abs() >= self._half_width(rows), value.sign(), 0.0)

    def cuts(self, rows: Tensor, bias: Tensor) -> Tensor:
        """(h,) whether rows x + bias takes both signs inside the domain, beyond rounding."""
        return (rows @ self.center + bias).abs() < self._half_width(rows) * (1 - 1e-6)

    def reach(self, rows: Tensor) -> Tensor:
        """(h,) the largest |rows x| on the domain."""
        return (rows @ self.center).abs() + self._half_width(rows)

    def holds(self, x: Tensor) -> Tensor:
        """Which of x (..., d) lie in the domain."""
        return self._gauge(x - self.center) < 1

    def _gauge(self, away: Tensor) -> Tensor:
        """(...) the distance from the center in the norm of the domain, 1 on its boundary."""
        if self.factor.ndim == 1:
            unit = away / self.factor
        else:
            unit = torch.linalg.solve_triangular(self.factor, away[..., None], upper=False)[..., 0]
        length: Tensor = unit.norm(p=torch.inf if self.square else 2, dim=-1)
        return length

    def along(self, way: Tensor, count: int, generator: torch.Generator, size: float) -> Tensor:
        """(count, d) offsets from the center along a direction, of both signs, up to `size` times that direction."""
        way = way.to(self.center)
        reach = min(size, 0.999 / float(self._gauge(way)))
        part = (1 + torch.rand(count, 1, generator=generator, dtype=torch.float64)) / 2
        part[::2] *= -1  # both signs equally often: some units round on one side only
        return reach * part.to(way) * way

    def sample(self, count: int, generator: torch.Generator, size: float = math.inf) -> Tensor:
        """(count, d) inputs: uniform over the domain, scaled down to within `size` of its center."""
        d = len(self.center)
        if self.square:
            unit = 2 * torch.rand(count, d, generator=generator, dtype=torch.float64) - 1
        else:
            way = torch.randn(count, d, generator=generator, dtype=torch.float64)
            length = torch.rand(count, 1, generator=generator, dtype=torch.float64) ** (1 / d)
            unit = way / way.norm(dim=1, keepdim=True) * length
        unit = 0.999 * unit.to(self.center)  # so that rounding puts none of them outside
        away = unit * self.factor if self.factor.ndim == 1 else unit @ self.factor.mT
        return self.center + min(1.0, size / max(float(away.norm(dim=1).max()), 1e-300)) * away


def as_domain(value: object, inputs: int) -> Domain | None:
    """Converts `domain=`, which is None, a Domain, a radius, a pair (low, high), or data (n, d). Raises BadInput."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        made = Domain.ball(torch.zeros(inputs, dtype=torch.float64), value)
    elif isinstance(value, Tensor) and value.ndim >= 2:
        made = Domain.around(value)
    elif isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, Tensor | int | float) for v in value):
        ones = torch.ones(inputs, dtype=torch.float64)
        made = Domain.box(*(v if isinstance(v, Tensor) else v * ones for v in value))
    elif isinstance(value, Domain):
        made = value
    else:
        raise BadInput(f"domain: give a Domain, a radius, (low, high), or data (n, d), got {type(value).__name__}")
    if len(made.center) != inputs:
        raise BadInput(f"domain: it has {len(made.center)} inputs and the block {inputs}")
    return made


def as_rows(name: str, value: object) -> Tensor:
    """Inputs (..., d) as (n, d) in float64. Raises BadInput."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta or value.is_complex():
        raise BadInput(f"{name} must be a dense tensor of real numbers, got {reprlib.repr(value)}")
    if value.ndim < 2 or not value.shape[-1]:
        raise BadInput(f"{name} must be of shape (..., d), got {tuple(value.shape)}")
    x = value.detach().double().reshape(-1, value.shape[-1])
    if not bool((x.abs() < _LARGEST).all()):
        raise BadInput(f"{name} must be finite and below {_LARGEST:g}")
    return x


def _numbers(who: str, value: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim != 1:
        raise BadInput(f"Domain.{who}: give vectors (d,)")
    return as_rows(f"Domain.{who}: a vector", value[None])[0]
