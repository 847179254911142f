"""The inputs that a verdict is about, where they are not all: a box, an ellipsoid, or what lies in both.

A hinge u.x + b = 0 that misses a convex domain leaves its unit affine there. For a domain with centre m and half-width
w(u) = max |u.(x - m)| the sign of u.x + b is settled where |u.m + b| >= w(u); the half-width of a box [l, h] is
|u|.(h - l) / 2, that of an ellipsoid {m + L s: |s| < 1} is |L^T u|.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.errors import BadInput

MARGIN = 0.1  # by which the domain around data is wider than the data


@dataclass(frozen=True, eq=False)
class Domain:
    """A bounded convex set of inputs with an interior. Made by `ball`, `box` or `around`."""

    text: str
    low: Tensor | None = None  # (d,)
    high: Tensor | None = None
    center: Tensor | None = None  # (d,)
    factor: Tensor | None = None  # (d, d), or (d,) for a diagonal

    @classmethod
    def ball(cls, center: Tensor, radius: float) -> Domain:
        """|x - center| < radius."""
        center = _numbers("ball", center)
        if not (isinstance(radius, int | float) and 0 < radius < float("inf")):
            raise BadInput(f"Domain.ball: radius must be a positive number, got {radius!r}")
        where = "the origin" if not bool(center.any()) else "its centre"
        text = f"the ball of radius {radius:g} around {where}"
        return cls(text, center=center, factor=torch.full_like(center, float(radius)))

    @classmethod
    def box(cls, low: Tensor, high: Tensor) -> Domain:
        """low < x < high, entry by entry."""
        low, high = _numbers("box", low), _numbers("box", high)
        if low.shape != high.shape or not bool((low < high).all()):
            raise BadInput("Domain.box: low must be below high in every entry, and of the same length")
        return cls(f"a box with sides of {float((high - low).min()):.3g} to {float((high - low).max()):.3g}", low, high)

    @classmethod
    def around(cls, data: Tensor, margin: float = MARGIN) -> Domain:
        """What lies both in the box and in the ellipsoid (mean, covariance) around data (..., d), widened by margin.

        The box grows by `margin` of its sides at each end, the ellipsoid by `margin` of its axes.
        """
        x = data.detach().double().reshape(-1, data.shape[-1])
        if len(x) < 2 or not bool(torch.isfinite(x).all()):
            raise BadInput(f"domain: data needs at least 2 finite inputs, got {len(x)}")
        if not (isinstance(margin, int | float) and 0 < margin < float("inf")):
            raise BadInput(f"domain: margin must be a positive number, got {margin!r}")
        low, high = x.amin(0), x.amax(0)
        floor = 1e-6 * (1 + x.abs().amax())  # a channel that never moves still gets an interior
        wider = margin * (high - low) + floor
        mean = x.mean(0)
        centred = x - mean
        covariance = centred.mT @ centred / len(x)
        covariance.diagonal().add_(floor**2 + 1e-9 * covariance.diagonal().mean())
        factor = torch.linalg.cholesky(covariance)
        reach = torch.linalg.solve_triangular(factor, centred.mT, upper=False).norm(dim=0).max()
        text = f"the box and the ellipsoid around {len(x)} inputs, {margin:.0%} wider than they are"
        return cls(text, low - wider, high + wider, mean, factor * float(reach) * (1 + margin))

    @property
    def inputs(self) -> int:
        part = self.low if self.low is not None else self.center
        assert part is not None
        return len(part)

    def on(self, device: torch.device) -> Domain:
        """The same on another device."""
        parts = (part if part is None else part.to(device) for part in (self.low, self.high, self.center, self.factor))
        return Domain(self.text, *parts)

    def _shapes(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each shape: rows times its centre, and its half-width along the rows."""
        found = []
        if self.low is not None and self.high is not None:
            found.append((rows @ ((self.low + self.high) / 2), rows.abs() @ ((self.high - self.low) / 2)))
        if self.center is not None and self.factor is not None:
            wide = rows * self.factor if self.factor.ndim == 1 else rows @ self.factor
            found.append((rows @ self.center, wide.norm(dim=1)))
        return found

    def side(self, rows: Tensor, bias: Tensor, bend: float = 0.0) -> Tensor:
        """(h,) the sign of rows x + bias where it is the same, and at least `bend` away from 0, on all of the domain;
        0 elsewhere."""
        out = torch.zeros_like(bias)
        for middle, reach in self._shapes(rows):
            value = middle + bias
            out = torch.where((value.abs() >= reach + bend) & (out == 0), value.sign(), out)
        return out

    def cuts(self, rows: Tensor, bias: Tensor) -> Tensor:
        """(h,) where rows x + bias takes both signs inside the domain for certain, beyond rounding."""
        if self.center is None or self.factor is None or self.low is None or self.high is None:
            middle, reach = self._shapes(rows)[0]
            return (middle + bias).abs() < reach * (1 - 1e-6)
        # From the centre along the ellipsoid's steepest way up, as far as the box allows.
        wide = rows @ self.factor
        way = wide @ self.factor.mT / wide.norm(dim=1, keepdim=True).clamp(min=1e-300)
        room = torch.minimum((self.high - self.center), (self.center - self.low))
        length = (room / way.abs().clamp(min=1e-300)).amin(1).clamp(max=1.0)
        both: Tensor = (rows @ self.center + bias).abs() < length * wide.norm(dim=1) * (1 - 1e-6)
        return both

    def reach(self, rows: Tensor) -> Tensor:
        """(h,) a bound on |rows x| over the domain."""
        return torch.stack([middle.abs() + wide for middle, wide in self._shapes(rows)]).amin(0)

    def holds(self, x: Tensor) -> Tensor:
        """Which of x (..., d) lie in the domain."""
        inside = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        if self.low is not None and self.high is not None:
            inside &= ((x > self.low) & (x < self.high)).all(-1)
        if self.center is not None and self.factor is not None:
            inside &= self._whiten(x - self.center).norm(dim=-1) < 1
        return inside

    def _whiten(self, x: Tensor) -> Tensor:
        assert self.factor is not None
        if self.factor.ndim == 1:
            return x / self.factor
        return (
            torch.linalg.solve_triangular(self.factor, x.mT, upper=False).mT if x.ndim > 1 else self._whiten(x[None])[0]
        )

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """(count, d) inputs of the domain, out to its edge: drawn in one shape and pulled towards a point in both."""
        d = self.inputs
        draw = torch.randn(count, d, generator=generator, dtype=torch.float64)
        scale = torch.rand(count, 1, generator=generator, dtype=torch.float64) ** (1 / d)
        anchor, x = self.middle, self.middle
        draw, scale = draw.to(anchor), scale.to(anchor)
        if self.center is not None and self.factor is not None:
            ball = draw / draw.norm(dim=1, keepdim=True) * scale
            x = self.center + (ball * self.factor if self.factor.ndim == 1 else ball @ self.factor.mT)
        else:
            assert self.low is not None
            assert self.high is not None
            uniform = torch.rand(count, d, generator=generator, dtype=torch.float64).to(anchor)
            x = self.low + uniform * (self.high - self.low)
        for _ in range(60):
            outside = ~self.holds(x)
            if not bool(outside.any()):
                break
            x[outside] = anchor + 0.8 * (x[outside] - anchor)
        return x

    @property
    def middle(self) -> Tensor:
        """A point inside."""
        if self.center is not None:
            return self.center
        assert self.low is not None
        assert self.high is not None
        middle: Tensor = (self.low + self.high) / 2
        return middle


def as_domain(value: object, inputs: int) -> Domain | None:
    """What `domain=` may be: None, a Domain, a radius, a pair (low, high), or data (n, d)."""
    if value is None:
        return None
    if isinstance(value, bool):
        raise BadInput("domain: give a Domain, a radius, (low, high), or data (n, d)")
    if isinstance(value, int | float):
        made = Domain.ball(torch.zeros(inputs, dtype=torch.float64), float(value))
    elif isinstance(value, Tensor) and value.ndim >= 2:
        made = Domain.around(value)
    elif isinstance(value, tuple) and len(value) == 2:
        low, high = (v if isinstance(v, Tensor) else torch.full((inputs,), float(v)) for v in value)
        made = Domain.box(low, high)
    elif isinstance(value, Domain):
        made = value
    else:
        raise BadInput(f"domain: give a Domain, a radius, (low, high), or data (n, d), got {type(value).__name__}")
    if made.inputs != inputs:
        raise BadInput(f"domain: it has {made.inputs} inputs and the block {inputs}")
    return made


def _numbers(who: str, value: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim != 1 or not bool(torch.isfinite(value).all()):
        raise BadInput(f"Domain.{who}: give vectors (d,) of finite numbers")
    return value.detach().double()
