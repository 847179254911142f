"""The arithmetic of one site: alpha * stream + beta * branch, in as few passes over memory as it takes.

A weight is a number or, where it must change without recompiling or be learnt, a tensor.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Number = float | Tensor
NUMBER = "unskip_number"  # attribute of an annealed weight's tensor: its value, known without asking the device


def mix(
    stream: Tensor,
    branch: Tensor,
    alpha: Number,
    beta: Number,
    into: Literal["stream", "branch"] | None = None,
    fresh: bool = False,
    left: Literal["stream", "branch"] = "stream",
) -> Tensor:
    """alpha * stream + beta * branch.

    `into` names the operand that an in-place addition wrote to, and that is written again. At alpha = 0 the stream is
    not read: nothing in it, NaN included, reaches the result, which then is the branch itself unless a `fresh` tensor
    is asked for, because the model writes into the sum. `left` names the left operand of the addition: the sum lies in
    memory as that one does, and a view that the model takes of it later may rely on that.
    """
    if not isinstance(branch, Tensor):  # an optional branch that is the number 0
        branch = torch.full_like(stream, branch)
    alpha, beta = _value(alpha, stream), _value(beta, stream)
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
        # Cast, or autocast would widen the whole stream to the weight's dtype.
        return torch.addcmul(_scaled(branch, beta), stream, alpha.to(stream.dtype))
    if alpha == 0:
        # The dtype and shape that the sum would have: under autocast the branch may be narrower than the stream.
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
    """The sum in the order of its operands, whose first one says how it lies in memory."""
    if _is(alpha, 0):
        like = stream if left == "stream" else branch
        dtype = torch.promote_types(stream.dtype, branch.dtype)
        return torch.empty_like(like, dtype=dtype).copy_(_scaled(branch, beta))
    first, second = _scaled(stream, alpha), _scaled(branch, beta)
    return torch.add(first, second) if left == "stream" else torch.add(second, first)


def _value(weight: Number, stream: Tensor) -> Number:
    """An annealed weight as the number it holds, which takes fewer kernels. Where kernels are recorded it stays a
    tensor.
    """
    if not isinstance(weight, Tensor) or torch.compiler.is_compiling():
        return weight
    if stream.is_cuda and torch.cuda.is_current_stream_capturing():
        return weight
    return getattr(weight, NUMBER, weight)


def _scaled(tensor: Tensor, weight: Number) -> Tensor:
    if isinstance(weight, Tensor):
        return tensor * weight.to(tensor.dtype)
    return tensor if weight == 1 else tensor * weight


def _is(weight: Number, value: float) -> bool:
    """Whether a weight is this number; of a tensor that is not asked, which would wait for the device."""
    return not isinstance(weight, Tensor) and weight == value
