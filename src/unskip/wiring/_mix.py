"""Computes alpha * stream + beta * branch at one site, in as few passes over memory as possible.

A weight is a number, a parameter where it is learned, or a `Held` where it differs between sites or is annealed: a
number in eager mode, an input of a compiled graph. As constants, different weights would give equal blocks different
kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import Proxy

Number = float | Tensor
_HALF = (torch.bfloat16, torch.float16)


class Held(NamedTuple):
    """A weight as a number and as a tensor on the model's device, float32 (float64 in a float64 model)."""

    number: float
    tensor: Tensor
    annealed: bool  # CUDA graphs then have to read the tensor

    def moved(self, function: Callable[[Tensor], Tensor]) -> Held:
        """The weight after `nn.Module._apply(function)`. It takes the device and float64, but no narrower dtype."""
        like = function(torch.empty_like(self.tensor))
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if (like.device, dtype) == (self.tensor.device, self.tensor.dtype):
            return self
        return self._replace(tensor=torch.full((), self.number, dtype=dtype, device=like.device))


def mix(
    stream: Tensor,
    branch: Tensor,
    alpha: Number | Held,
    beta: Number | Held,
    into: Literal["stream", "branch"] | None = None,
    fresh: bool = False,
    left: Literal["stream", "branch"] = "stream",
) -> Tensor:
    """alpha * stream + beta * branch.

    `into` is the operand that an in-place addition writes to. At alpha = 0 the stream is not read, so NaN in it does
    not reach the result, which is the branch itself unless `fresh` is set (for models that write into the sum).
    `left` is the left operand of the addition: the sum has its memory layout, as later views may require.
    """
    if isinstance(stream, Proxy):  # torch.fx records one call, with the weights of now
        now = [weight.number if isinstance(weight, Held) else weight for weight in (alpha, beta)]
        return stream.tracer.create_proxy("call_function", mix, (stream, branch, *now, into, fresh, left), {})
    if not isinstance(branch, Tensor):  # an optional branch that is the number 0
        branch = torch.full_like(stream, branch)
    traced = torch.compiler.is_compiling() and (isinstance(alpha, Held) or isinstance(beta, Held))
    alpha, beta = _value(alpha, stream), _value(beta, stream)
    if traced:
        # In float32 and rounded once, like eager addition with a number. The casts are fused into the same kernel.
        total = _laid_out(_wide(stream), _wide(branch), alpha, beta, left)
        total = total.to(torch.promote_types(stream.dtype, branch.dtype))
        return total if into is None else (stream if into == "stream" else branch).copy_(total)
    if into == "stream":
        if _is(alpha, 0):
            return stream.copy_(_scaled(branch, beta))
        stream = stream if _is(alpha, 1) else stream.mul_(alpha)
        return stream.add_(branch, alpha=beta) if not isinstance(beta, Tensor) else stream.add_(branch * beta)
    if into == "branch":
        branch = branch if _is(beta, 1) else branch.mul_(beta)
        if isinstance(alpha, Tensor):
            return branch.addcmul_(stream, alpha.to(stream.dtype))
        return branch if alpha == 0 else branch.add_(stream, alpha=alpha)
    if not _same_layout(stream, branch):
        return _laid_out(stream, branch, alpha, beta, left)
    if isinstance(alpha, Tensor):
        # Without the cast, autocast would widen the whole stream to the weight's dtype.
        return torch.addcmul(_scaled(branch, beta), stream, alpha.to(stream.dtype))
    if alpha == 0:
        # The dtype and shape of the sum: under autocast the branch may be narrower than the stream.
        out = _scaled(branch, beta).to(torch.promote_types(stream.dtype, branch.dtype))
        out = out if out.shape == stream.shape else out.expand(torch.broadcast_shapes(out.shape, stream.shape))
        return out.clone() if fresh and out is branch else out
    if _is(alpha, 1) and not isinstance(beta, Tensor):
        return torch.add(stream, branch, alpha=beta)
    return torch.add(_scaled(branch, beta), stream, alpha=alpha)


def _same_layout(stream: Tensor, branch: Tensor) -> bool:
    if stream.shape != branch.shape or stream.stride() == branch.stride():
        return True
    return stream.is_contiguous() and branch.is_contiguous()


def _laid_out(stream: Tensor, branch: Tensor, alpha: Number, beta: Number, left: str) -> Tensor:
    """The sum with the memory layout of its left operand."""
    if _is(alpha, 0):
        like = stream if left == "stream" else branch
        dtype = torch.promote_types(stream.dtype, branch.dtype)
        return torch.empty_like(like, dtype=dtype).copy_(_scaled(branch, beta))
    first, second = _scaled(stream, alpha), _scaled(branch, beta)
    return torch.add(first, second) if left == "stream" else torch.add(second, first)


def _value(weight: Number | Held, stream: Tensor) -> Number:
    """The number of a weight, which needs fewer kernels, or its tensor in compiled and captured graphs."""
    if not isinstance(weight, Held):
        return weight
    if torch.compiler.is_compiling():
        # torch 2.11 traces is_exporting() as True in every graph; the flag behind it is right in all versions.
        fixed = torch.compiler._is_exporting_flag or stream.dtype.itemsize > weight.tensor.dtype.itemsize
        return weight.number if fixed else weight.tensor
    captured = weight.annealed and stream.is_cuda and torch.cuda.is_current_stream_capturing()
    return weight.tensor if captured else weight.number


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _scaled(tensor: Tensor, weight: Number) -> Tensor:
    if isinstance(weight, Tensor):
        return tensor * weight.to(tensor.dtype)
    return tensor if weight == 1 else tensor * weight


def _is(weight: Number, value: float) -> bool:
    """Whether a weight is this number. Tensors are not compared, which would synchronise with the device."""
    return not isinstance(weight, Tensor) and weight == value
