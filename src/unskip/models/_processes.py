"""Means and batch norm over the batch of all processes, so that N of them train as one.

torch's SyncBatchNorm works on GPUs only. Every process has equally many samples, which `unskip.data` ensures.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class BatchNorm(nn.BatchNorm1d):
    """`nn.BatchNorm1d` of (samples, dim), over the samples of all processes."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not several_processes():
            return super().forward(x)
        values = widened(x)
        mean = _mean(values.mean(0))
        variance = _mean((values - mean).square().mean(0))
        count = len(x) * torch.distributed.get_world_size()
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            unbiased = variance * count / max(1, count - 1)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        values = (values - mean) * torch.rsqrt(variance + self.eps)
        if self.affine:
            values = values * self.weight + self.bias
        return values.to(x.dtype)


def widened(x: Tensor) -> Tensor:
    """Casts to at least float32: half precision is not enough for sums over many entries."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def several_processes() -> bool:
    """Whether torch.distributed runs with more than one process."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def over_processes(value: Tensor) -> Tensor:
    """The mean of a tensor over all processes, without a gradient."""
    if not several_processes():
        return value
    value = value.detach().clone()
    torch.distributed.all_reduce(value)
    return value / torch.distributed.get_world_size()


def _mean(value: Tensor) -> Tensor:
    mean: Tensor = _Mean.apply(value)
    return mean


class _Mean(torch.autograd.Function):
    """The mean over all processes. It enters the loss of every process, so its gradient is the mean of theirs."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return over_processes(value)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return over_processes(gradient)
