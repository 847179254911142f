"""The Triton kernels of `_kernels`, which defines what each computes. Imported on the first use on a GPU."""

# Arguments of Triton kernels have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,unused-ignore"

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped]
import triton.language as tl  # type: ignore[import-not-found,import-untyped]

KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def unskip_clear(stack, ok, size, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    if tl.load(ok + row) == 0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(stack + row.to(tl.int64) * size + at, tl.zeros([BLOCK], tl.float32), mask=at < size)


@triton.jit
def unskip_half(x, scale, result, size, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    at = row.to(tl.int64) * size + at
    tl.store(result + at, (tl.load(x + at, mask=inside) * tl.load(scale + row)).to(tl.float16), mask=inside)


@triton.jit
def unskip_adam(gradient, first, second, factors, direction, rows, size, eps, most, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    at = row.to(tl.int64) * size + at
    g = tl.load(gradient + at, mask=inside, other=0.0) / tl.load(factors + 4 * rows + row)
    m = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(second + at, mask=inside, other=0.0)
    m += tl.load(factors + row) * (g - m)
    v += tl.load(factors + rows + row) * (g * g - v)
    tl.store(first + at, m, mask=inside)
    tl.store(second + at, v, mask=inside)
    d = m / (tl.sqrt(v) + eps)
    tl.store(direction + at, tl.minimum(tl.maximum(d, -most), most), mask=inside)


@triton.jit
def unskip_momentum(gradient, buffer, result, size, share, NESTEROV: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gradient + at, mask=inside)
    b = tl.load(buffer + at, mask=inside)
    b += (1 - share) * (g - b)
    tl.store(buffer + at, b, mask=inside)
    tl.store(result + at, (g + share * (b - g)) if NESTEROV else b, mask=inside)


@triton.jit
def unskip_move(pointers, change, factors, rows, blocks, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    param = tl.multiple_of(tl.load(pointers + place).to(tl.pointer_type(KIND)), 16)
    value = tl.load(param + at, mask=inside).to(tl.float32)
    step = tl.load(change + place.to(tl.int64) * size + at, mask=inside).to(tl.float32)
    far, keep = tl.load(factors + 2 * rows + place * blocks), tl.load(factors + 3 * rows + place * blocks)
    tl.store(param + at, value * keep + step * far, mask=inside)


@triton.jit
def unskip_halves(x, scale, high, low, size, ratio, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    at = row.to(tl.int64) * size + at
    value = tl.load(x + at, mask=inside) * tl.load(scale + row)
    upper = value.to(tl.float16)
    tl.store(high + at, upper, mask=inside)
    tl.store(low + at, ((value - upper.to(tl.float32)) * ratio).to(tl.float16), mask=inside)


@triton.jit
def unskip_inner(a, b, dots, squares, size, LENGTH: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, LENGTH)
    inside = at < size
    x = tl.load(a + row.to(tl.int64) * size + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(b + row.to(tl.int64) * size + at, mask=inside, other=0.0)
    tl.store(dots + row, tl.sum(x * y, 0))
    tl.store(squares + row, tl.sum(y * y, 0))


@triton.jit
def unskip_pick(moved, basis, shift, order, result, size, LENGTH: tl.constexpr):
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0)
    source = (batch * size + tl.load(order + batch * size + row)) * size
    at = tl.arange(0, LENGTH)
    inside = at < size
    x = tl.load(moved + source + at, mask=inside, other=0.0).to(tl.float64)
    x += tl.load(shift + batch).to(tl.float64) * tl.load(basis + source + at, mask=inside, other=0.0).to(tl.float64)
    length = tl.sqrt(tl.sum(x * x, 0))
    length = tl.where(length > 0, length, 1.0)
    tl.store(result + (batch * size + row) * size + at, x / length, mask=inside)
