"""The precision of matrix products in the optimizers, independent of the user's settings.

On a GPU a float32 product is either exact ("float32") or rounds its factors to 10 bits of mantissa ("tf32", seven times
as fast on an H200). Float16 has the same 10 bits and less range, so rotations, whose factors are a basis and a scaled
gradient, use float16, twice as fast again. That is enough for gradients, but not for the power iteration of a basis:
there `exact_product` splits a factor into two float16 halves,

    a b  =  a_hi b_hi  +  (a_hi b_lo + a_lo b_hi) / 2^11,    a = a_hi + a_lo / 2^11

which keeps 22 bits at a third of the float16 rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from unskip.optim._kernels import halves

MatmulPrecision = Literal["tf32", "float32"]
LOW = 2.0**11  # float16 has 11 bits of mantissa, so the remainder is smaller by this factor


@contextmanager
def matmul_precision(precision: MatmulPrecision, device: torch.device) -> Iterator[None]:
    """Sets the precision of matrix products and disables autocast, inside the context."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        settings.fp32_precision = before


def exact_product(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """a @ (scale * b) to float32 accuracy, (rows, n, n); all entries of a and scale * b are at most 1 in magnitude."""
    if not a.is_cuda or b.dtype != torch.float32:
        return torch.bmm(a.to(b.dtype), b * scale[:, None, None])
    b_high, b_low = halves(b, scale, LOW)
    if a.dtype == torch.float16:
        a_high = a
        small = torch.bmm(a_high, b_low, out_dtype=torch.float32)
    else:
        a_high, a_low = halves(a, torch.ones_like(scale), LOW)
        small = torch.bmm(a_high, b_low, out_dtype=torch.float32)
        small = torch.baddbmm(small, a_low, b_high, out_dtype=torch.float32)
    return torch.baddbmm(small, a_high, b_high, out_dtype=torch.float32, beta=1 / LOW)
