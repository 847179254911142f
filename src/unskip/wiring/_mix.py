"""The arithmetic of one site: alpha * stream + beta * branch, in as few passes over memory as it takes.

A weight is a number, a parameter where it is learned, or `Held` where it differs from site to site or is annealed: a
number in eager mode, and an input of a compiled graph. As a constant each site's weight would make kernels of its own,
so that equal blocks share none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Number = float | Tensor
_HALF = (torch.bfloat16, torch.float16)


class Held(NamedTuple):
    """A weight as a number and as a tensor on the model's device. The tensor is float32, or float64 in such a model."""

    number: float
    tensor: Tensor
    moves: bool  # it is annealed now, so that recorded kernels have to read the tensor

    def moved(self, function: Callable[[Tensor], Tensor]) -> Held:
        """What `nn.Module._apply` does to it: the device and float64 are followed, narrower dtypes are not."""
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

    `into` names the operand that an in-place addition wrote to, and that is written again. At alpha = 0 the stream is
    not read: nothing in it, NaN included, reaches the result, which then is the branch itself unless a `fresh` tensor
    is asked for, because the model writes into the sum. `left` names the left operand of the addition: the sum lies in
    memory as that one does, and a view that the model takes of it later may rely on that.
    """
    if not isinstance(branch, Tensor):  # an optional branch that is the number 0
        branch = torch.full_like(stream, branch)
    traced = torch.compiler.is_compiling() and (isinstance(alpha, Held) or isinstance(beta, Held))
    alpha, beta = _value(alpha, stream), _value(beta, stream)
    if traced:
        # In float32, as eager addition does it with a number, and rounded once. The casts are part of the same kernel.
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


def _value(weight: Number | Held, stream: Tensor) -> Number:
    """A held weight as a number, which takes fewer kernels; as its tensor where graphs are compiled or recorded."""
    if not isinstance(weight, Held):
        return weight
    if torch.compiler.is_compiling():
        # torch 2.11 traces is_exporting() as True in every graph; the flag that it returns is right in all versions.
        fixed = torch.compiler._is_exporting_flag or stream.dtype.itemsize > weight.tensor.dtype.itemsize
        return weight.number if fixed else weight.tensor
    recorded = weight.moves and stream.is_cuda and torch.cuda.is_current_stream_capturing()
    return weight.tensor if recorded else weight.number


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _scaled(tensor: Tensor, weight: Number) -> Tensor:
    if isinstance(weight, Tensor):
        return tensor * weight.to(tensor.dtype)
    return tensor if weight == 1 else tensor * weight


def _is(weight: Number, value: float) -> bool:
    """Whether a weight is this number; of a tensor that is not asked, which would wait for the device."""
    return not isinstance(weight, Tensor) and weight == value
