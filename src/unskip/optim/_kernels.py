"""What SOAP does between its matrix products, one pass over memory each; on a GPU these are small Triton kernels.

Every function here has a plain form in torch, which runs on the CPU and wherever Triton is missing, and which says what
the kernel computes. Kernels save memory traffic (a moment update is one pass instead of seven) and launches.
"""

# Kernels are Triton's language in Python's clothes; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,unused-ignore"

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found,import-untyped]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped]
except ImportError:  # wheels without CUDA
    triton = None

BLOCK = 2048
LONGEST = 16384  # a row that one program can hold
SHORTEST, MOST = 128, 65535


class Factors(NamedTuple):
    """What a step does to each row of a stack; a masked one keeps everything it has."""

    first: Tensor  # how much of the gradient enters the first moment
    second: Tensor  # and its square the second
    size: Tensor  # how far the parameter goes, weight decay included
    keep: Tensor  # how much of it stays
    scale: Tensor  # by how much the gradient was multiplied, see `load`


def fast(x: Tensor) -> bool:
    """Whether a stack is worked on by kernels: one with few rows, and those long enough for a program of their own."""
    few = len(x) <= MOST and x.numel() >= SHORTEST * len(x)
    return triton is not None and x.is_cuda and x.dtype == torch.float32 and few


def clear(stack: Tensor, ok: Tensor) -> None:
    """Sets the rows that do not count to zero, without reading the others: (rows, ...), (rows,)."""
    if fast(stack):
        size = stack[0].numel()
        _clear[(triton.cdiv(size, BLOCK), len(stack))](stack, ok, size, BLOCK)
    else:
        stack.masked_fill_(~ok.view(-1, *[1] * (stack.ndim - 1)), 0)


def half(x: Tensor, scale: Tensor) -> Tensor:
    """scale * x in float16: (rows, ...), (rows,)."""
    if fast(x):
        result = torch.empty_like(x, dtype=torch.float16)
        size = x[0].numel()
        _half[(triton.cdiv(size, BLOCK), len(x))](x, scale, result, size, BLOCK)
        return result
    return (x * scale.view(-1, *[1] * (x.ndim - 1))).half()


def adam(gradient: Tensor, first: Tensor, second: Tensor, factors: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """One step of Adam on (rows, ...) with factors (5, rows): the moments move, the direction comes back in `dtype`."""
    if fast(gradient):
        direction = gradient if dtype == gradient.dtype else torch.empty_like(gradient, dtype=dtype)
        size = gradient[0].numel()
        grid = (triton.cdiv(size, BLOCK), len(gradient))
        most = min(torch.finfo(dtype).max, 1e30)  # what a bounded direction never reaches, and float16 must not pass
        _adam[grid](gradient, first, second, factors, direction, len(gradient), size, eps, most, BLOCK)
        return direction
    row = Factors(*factors.view(5, -1, *[1] * (gradient.ndim - 1)))
    gradient.div_(row.scale)
    moment = first.to(gradient.dtype).lerp_(gradient, row.first)
    second.lerp_(gradient.square_(), row.second)
    if moment.dtype != first.dtype:
        first.copy_(moment)
    return torch.div(moment, torch.sqrt(second, out=gradient).add_(eps), out=gradient).to(dtype)


def momentum(gradient: Tensor, buffer: Tensor, share: float, nesterov: bool, dtype: torch.dtype) -> Tensor:
    """buffer <- share * buffer + (1 - share) * gradient. Comes back in `dtype`, looking one step ahead if nesterov."""
    if fast(gradient):
        result = torch.empty_like(gradient, dtype=dtype)
        size = gradient.numel()
        _momentum[(triton.cdiv(size, BLOCK),)](gradient, buffer, result, size, share, nesterov, BLOCK)
        return result
    buffer.lerp_(gradient, 1 - share)
    return (gradient.lerp_(buffer, share) if nesterov else buffer).to(dtype)


def move(params: list[Tensor], pointers: Tensor | None, change: Tensor, factors: Tensor, blocks: int) -> None:
    """param <- keep * param + size * change for params that own `blocks` rows each, rounded once."""
    if pointers is not None:
        size = blocks * change[0].numel()
        kind = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[params[0].dtype]
        grid = (triton.cdiv(size, BLOCK), len(params))
        _move[grid](pointers, change, factors, len(change), blocks, size, kind, BLOCK)
        return
    sizes, keeps = (factors[i, ::blocks].unbind() for i in (2, 3))
    for param, step, far, keep in zip(params, change.split(blocks), sizes, keeps, strict=True):
        step = step.reshape(param.shape).to(factors.dtype) * far
        if param.dtype == step.dtype:
            torch.addcmul(step, param, keep, out=param)
        else:
            param.copy_(torch.addcmul(step, param.to(step.dtype), keep))


def pointers(params: list[Tensor], work: torch.dtype) -> Tensor | None:
    """Where the parameters lie, for `move`; None where they cannot be reached that way."""
    addresses = [param.data_ptr() for param in params]
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    plain = all(param.is_contiguous() for param in params) and all(address % 16 == 0 for address in addresses)
    if triton is None or not params[0].is_cuda or work != torch.float32 or params[0].dtype not in kinds or not plain:
        return None
    return torch.tensor(addresses, dtype=torch.int64, device=params[0].device)


def halves(x: Tensor, scale: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """scale * x as two float16 parts, high + low / ratio: (rows, n, n), (rows,). For CUDA."""
    high, low = torch.empty_like(x, dtype=torch.float16), torch.empty_like(x, dtype=torch.float16)
    if triton is not None:
        size = x[0].numel()
        _halves[(triton.cdiv(size, BLOCK), len(x))](x, scale, high, low, size, ratio, BLOCK)
    else:
        scaled = x * scale[:, None, None]
        high.copy_(scaled)
        low.copy_(scaled.sub_(high).mul_(ratio))
    return high, low


def inner(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Row by row a . b and b . b of (batch, n, n): (batch, n) each."""
    if fast(b) and a.shape[-1] <= LONGEST:
        dots, squares = b.new_empty(b.shape[:-1]), b.new_empty(b.shape[:-1])
        size = b.shape[-1]
        _inner[(dots.numel(),)](a, b, dots, squares, size, triton.next_power_of_2(size))
        return dots, squares
    return (a * b).sum(-1), b.square().sum(-1)


def pick(moved: Tensor, basis: Tensor, shift: Tensor, order: Tensor) -> Tensor:
    """The rows of moved + shift * basis in another order, of length 1, in float64: (batch, n, n), shift (batch,)."""
    if fast(moved) and moved.shape[-1] <= LONGEST:
        result = torch.empty_like(moved, dtype=torch.float64)
        size = moved.shape[-1]
        _pick[(size, len(moved))](moved, basis, shift, order, result, size, triton.next_power_of_2(size))
        return result
    shifted = torch.addcmul(moved, basis.to(moved.dtype), shift[:, None, None])
    rows = shifted.take_along_dim(order[:, :, None], -2).double()
    lengths: Tensor = rows.norm(dim=-1, keepdim=True)
    return rows / lengths.clamp_min(torch.finfo(rows.dtype).tiny)


if triton is not None:

    @triton.jit
    def _clear(stack, ok, size, BLOCK: tl.constexpr):
        row = tl.program_id(1)
        if tl.load(ok + row) == 0:
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(stack + row.to(tl.int64) * size + at, tl.zeros([BLOCK], tl.float32), mask=at < size)

    @triton.jit
    def _half(x, scale, result, size, BLOCK: tl.constexpr):
        row = tl.program_id(1)
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        at = row.to(tl.int64) * size + at
        tl.store(result + at, (tl.load(x + at, mask=inside) * tl.load(scale + row)).to(tl.float16), mask=inside)

    @triton.jit
    def _adam(gradient, first, second, factors, direction, rows, size, eps, most, BLOCK: tl.constexpr):
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
    def _momentum(gradient, buffer, result, size, share, NESTEROV: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        g = tl.load(gradient + at, mask=inside)
        b = tl.load(buffer + at, mask=inside)
        b += (1 - share) * (g - b)
        tl.store(buffer + at, b, mask=inside)
        tl.store(result + at, (g + share * (b - g)) if NESTEROV else b, mask=inside)

    @triton.jit
    def _move(pointers, change, factors, rows, blocks, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
        place = tl.program_id(1)
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        param = tl.multiple_of(tl.load(pointers + place).to(tl.pointer_type(KIND)), 16)
        value = tl.load(param + at, mask=inside).to(tl.float32)
        step = tl.load(change + place.to(tl.int64) * size + at, mask=inside).to(tl.float32)
        far, keep = tl.load(factors + 2 * rows + place * blocks), tl.load(factors + 3 * rows + place * blocks)
        tl.store(param + at, value * keep + step * far, mask=inside)

    @triton.jit
    def _halves(x, scale, high, low, size, ratio, BLOCK: tl.constexpr):
        row = tl.program_id(1)
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        at = row.to(tl.int64) * size + at
        value = tl.load(x + at, mask=inside) * tl.load(scale + row)
        upper = value.to(tl.float16)
        tl.store(high + at, upper, mask=inside)
        tl.store(low + at, ((value - upper.to(tl.float32)) * ratio).to(tl.float16), mask=inside)

    @triton.jit
    def _inner(a, b, dots, squares, size, LENGTH: tl.constexpr):
        row = tl.program_id(0)
        at = tl.arange(0, LENGTH)
        inside = at < size
        x = tl.load(a + row.to(tl.int64) * size + at, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(b + row.to(tl.int64) * size + at, mask=inside, other=0.0)
        tl.store(dots + row, tl.sum(x * y, 0))
        tl.store(squares + row, tl.sum(y * y, 0))

    @triton.jit
    def _pick(moved, basis, shift, order, result, size, LENGTH: tl.constexpr):
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
