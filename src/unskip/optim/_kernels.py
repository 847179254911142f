"""Elementwise steps of SOAP and Muon, one pass over memory each; on a GPU these are small Triton kernels.

Every function also has a plain torch form, which runs on the CPU and without Triton, and which defines what the kernel
computes. Kernels save memory traffic (a moment update is one pass instead of seven) and launches.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 2048
LONGEST = 16384  # longest row of one program
SHORTEST, MOST = 128, 65535


@functools.cache
def kernels() -> Any:
    """The module of kernels, or None without Triton. Imported on use, so that `import unskip` is fast."""
    try:
        return importlib.import_module("unskip.optim._triton")
    except ImportError:
        return None


class Factors(NamedTuple):
    """The factors of a step for each row of a stack; a masked row does not change."""

    first: Tensor  # weight of the gradient in the first moment
    second: Tensor  # weight of its square in the second
    size: Tensor  # factor of the direction, weight decay included
    keep: Tensor  # factor of the parameter
    scale: Tensor  # factor that the gradient was multiplied with, see `half`


def fast(x: Tensor) -> bool:
    """Whether kernels process a stack: it has few rows, each long enough for a program."""
    few = len(x) <= MOST and x.numel() >= SHORTEST * len(x)
    return x.is_cuda and x.dtype == torch.float32 and few and kernels() is not None


def clear(stack: Tensor, ok: Tensor) -> None:
    """Sets masked rows to zero without reading the others: (rows, ...), (rows,)."""
    if fast(stack):
        size = stack[0].numel()
        kernels().unskip_clear[(-(-size // BLOCK), len(stack))](stack, ok, size, BLOCK)
    else:
        stack.masked_fill_(~ok.view(-1, *[1] * (stack.ndim - 1)), 0)


def half(x: Tensor, scale: Tensor) -> Tensor:
    """scale * x in float16: (rows, ...), (rows,)."""
    if fast(x):
        result = torch.empty_like(x, dtype=torch.float16)
        size = x[0].numel()
        kernels().unskip_half[(-(-size // BLOCK), len(x))](x, scale, result, size, BLOCK)
        return result
    return (x * scale.view(-1, *[1] * (x.ndim - 1))).half()


def adam(gradient: Tensor, first: Tensor, second: Tensor, factors: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """One step of Adam on (rows, ...) with factors (5, rows): updates the moments, returns the direction in `dtype`."""
    # After a refresh a second moment may be near zero and the direction unbounded; the maximum of float16 is 65504.
    most = min(torch.finfo(dtype).max, 1e30)
    if fast(gradient):
        direction = gradient if dtype == gradient.dtype else torch.empty_like(gradient, dtype=dtype)
        size = gradient[0].numel()
        grid = (-(-size // BLOCK), len(gradient))
        kernels().unskip_adam[grid](gradient, first, second, factors, direction, len(gradient), size, eps, most, BLOCK)
        return direction
    row = Factors(*factors.view(5, -1, *[1] * (gradient.ndim - 1)))
    gradient.div_(row.scale)
    moment = first.to(gradient.dtype).lerp_(gradient, row.first)
    second.lerp_(gradient.square_(), row.second)
    if moment.dtype != first.dtype:
        first.copy_(moment)
    direction = torch.div(moment, torch.sqrt(second, out=gradient).add_(eps), out=gradient)
    return direction.clamp_(-most, most).to(dtype)


def momentum(gradient: Tensor, buffer: Tensor, share: float, nesterov: bool, dtype: torch.dtype) -> Tensor:
    """buffer <- share * buffer + (1 - share) * gradient. Returns it in `dtype`, one step ahead if nesterov."""
    if fast(gradient):
        result = torch.empty_like(gradient, dtype=dtype)
        size = gradient.numel()
        kernels().unskip_momentum[(-(-size // BLOCK),)](gradient, buffer, result, size, share, nesterov, BLOCK)
        return result
    buffer.lerp_(gradient, 1 - share)
    return (gradient.lerp_(buffer, share) if nesterov else buffer).to(dtype)


def move(params: list[Tensor], pointers: Tensor | None, change: Tensor, factors: Tensor, blocks: int) -> None:
    """param <- keep * param + size * change for params of `blocks` rows each, with one rounding."""
    if pointers is not None:
        size = blocks * change[0].numel()
        kind = kernels().KINDS[params[0].dtype]
        grid = (-(-size // BLOCK), len(params))
        kernels().unskip_move[grid](pointers, change, factors, len(change), blocks, size, kind, BLOCK)
        return
    sizes, keeps = (factors[i, ::blocks].unbind() for i in (2, 3))
    for param, step, factor, keep in zip(params, change.split(blocks), sizes, keeps, strict=True):
        step = step.reshape(param.shape).to(factors.dtype) * factor
        if param.dtype == step.dtype:
            torch.addcmul(step, param, keep, out=param)
        else:
            param.copy_(torch.addcmul(step, param.to(step.dtype), keep))


def pointers(params: list[Tensor], work: torch.dtype) -> Tensor | None:
    """The addresses of the parameters, for `move`; None if its kernel cannot be used."""
    addresses = [param.data_ptr() for param in params]
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    plain = all(param.is_contiguous() for param in params) and all(address % 16 == 0 for address in addresses)
    if not params[0].is_cuda or kernels() is None or work != torch.float32 or params[0].dtype not in kinds or not plain:
        return None
    return torch.tensor(addresses, dtype=torch.int64, device=params[0].device)


def halves(x: Tensor, scale: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """scale * x as two float16 parts, high + low / ratio: (rows, n, n), (rows,). For CUDA."""
    high, low = torch.empty_like(x, dtype=torch.float16), torch.empty_like(x, dtype=torch.float16)
    if fast(x):
        size = x[0].numel()
        kernels().unskip_halves[(-(-size // BLOCK), len(x))](x, scale, high, low, size, ratio, BLOCK)
    else:
        scaled = x * scale[:, None, None]
        high.copy_(scaled)
        low.copy_(scaled.sub_(high).mul_(ratio))
    return high, low


def inner(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Row-wise a . b and b . b of (batch, n, n): (batch, n) each."""
    if fast(b) and a.shape[-1] <= LONGEST:
        dots, squares = b.new_empty(b.shape[:-1]), b.new_empty(b.shape[:-1])
        size = b.shape[-1]
        kernels().unskip_inner[(dots.numel(),)](a, b, dots, squares, size, 1 << (size - 1).bit_length())
        return dots, squares
    return (a * b).sum(-1), b.square().sum(-1)


def pick(moved: Tensor, basis: Tensor, shift: Tensor, order: Tensor) -> Tensor:
    """The normalised rows of moved + shift * basis in a new order, in float64: (batch, n, n), shift (batch,)."""
    if fast(moved) and moved.shape[-1] <= LONGEST:
        result = torch.empty_like(moved, dtype=torch.float64)
        size = moved.shape[-1]
        kernels().unskip_pick[(size, len(moved))](
            moved, basis, shift, order, result, size, 1 << (size - 1).bit_length()
        )
        return result
    shifted = torch.addcmul(moved, basis.to(moved.dtype), shift[:, None, None])
    rows = shifted.take_along_dim(order[:, :, None], -2).double()
    lengths: Tensor = rows.norm(dim=-1, keepdim=True)
    return rows / lengths.clamp_min(torch.finfo(rows.dtype).tiny)
