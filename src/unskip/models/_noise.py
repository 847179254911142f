"""Normal noise as a function of (seed, sample, step), on any device: sample i does not depend on its batch.

    bits(seed, sample, step, place)  by splitmix64's finaliser (Steele et al. 2014), for each number
    two uniform numbers give two normal ones: sqrt(-2 log u) cos(2 pi w), sqrt(-2 log u) sin(2 pi w) (Box & Muller 1958)

There is no state, so numbers can be drawn in any order. Bits are equal on every device; the numbers are too, up to
rounding of the logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def normal(seed: int, samples: Tensor, step: int, shape: Sequence[int]) -> Tensor:
    """(samples, *shape), float32: independent for every seed, sample (int64), step and element."""
    count = math.prod(shape)
    pairs = (count + 1) // 2
    key = _mixed(_start(seed, step), samples)  # (samples,)
    elements = torch.arange(2 * pairs, device=samples.device)
    units = _unit(_mixed(key[:, None], elements))  # (samples, 2 pairs)
    radius = (-2 * units[:, :pairs].log()).sqrt()
    angle = 2 * math.pi * units[:, pairs:]
    values = torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count]
    return values.float().reshape(len(samples), *shape)


def _start(seed: int, step: int) -> int:
    """`_mixed` of two numbers on the host, which avoids a copy to the device and a synchronisation."""
    x = (seed + (step + 1) * _GOLDEN) % 2**64
    x = (x ^ (x >> 30)) * _FIRST % 2**64
    x = (x ^ (x >> 27)) * _SECOND % 2**64
    return _signed(x ^ (x >> 31))


def _mixed(key: Tensor | int, number: Tensor) -> Tensor:
    """splitmix64 of int64 tensors, whose overflow wraps as for unsigned integers."""
    x = key + (number + 1) * _signed(_GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    return x ^ _shifted(x, 31)


def _unit(bits: Tensor) -> Tensor:
    """Uniform in (0, 1), float64: the upper 53 bits plus half a step."""
    return (_shifted(bits, 11).double() + 0.5) * 2.0**-53


def _shifted(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number
