"""The forward and backward pass of a step as one CUDA graph.

A small model leaves a GPU idle while the host launches about two thousand kernels a step, one after another. A recorded
graph replays them with one launch. A graph has fixed memory addresses: batches are copied into the memory of the first
batch, and gradients keep their memory. The optimizer is not part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from unskip.errors import TrainingError

Pass = Callable[[Any], tuple[Tensor, dict[str, Tensor]]]  # batch -> (loss, numbers to log)
_WARMUPS = 3  # lazy initialisation and algorithm selection must not be recorded


def why_not(kind: str, world: int, accumulate: int, precision: str = "float32") -> str | None:
    """The reason why a graph cannot be used; None if it can."""
    if kind != "cuda":
        return f"a CUDA graph needs a GPU, and this run is on {kind}"
    if world > 1:
        return f"a CUDA graph needs a single process, and there are {world}"
    if accumulate > 1:
        return f"a CUDA graph holds one pass, and gradients are accumulated over {accumulate}"
    if precision == "fp16":
        return "a CUDA graph cannot skip a step, which fp16 does if gradients overflow"
    return None


class Graphed:
    """A pass over one batch: returns (loss, numbers), gradients are in `.grad`. A new key records a new graph."""

    def __init__(self, work: Pass, model: nn.Module) -> None:
        self.work, self.model = work, model
        self.graph: Any = None
        self.key: Hashable = None

    def __call__(self, batch: tuple[Tensor, ...], key: Hashable, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        if self.graph is None or key != self.key:
            self._record(batch, key)
            torch.manual_seed(seed)  # recording drew from the generator
        for old, new in zip(self.batch, batch, strict=True):
            if old.shape != new.shape or old.dtype != new.dtype:
                raise TrainingError(
                    f"a batch of {tuple(new.shape)}, {new.dtype}, follows one of {tuple(old.shape)}, {old.dtype}, but "
                    "a CUDA graph has one shape. Train with graph=False."
                )
            old.copy_(new)
        self.graph.replay()
        loss, numbers = self.result
        return loss.clone(), {name: value.clone() for name, value in numbers.items()}

    def _record(self, batch: tuple[Tensor, ...], key: Hashable) -> None:
        self.graph, self.key = None, key  # frees the memory of an earlier graph first
        self.batch = tuple(tensor.clone() for tensor in batch)
        before = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARMUPS):
                self.model.zero_grad(set_to_none=True)
                self.work(self.batch)
        torch.cuda.current_stream().wait_stream(side)
        self.model.zero_grad(set_to_none=True)  # so that the recorded pass writes gradients and does not add to them
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as one that pins memory, may use CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss, numbers = self.work(self.batch)
        # Detached: a live autograd graph would keep its nodes on this stream for the next recording.
        self.result = loss.detach(), {name: value.detach() for name, value in numbers.items()}
        for buffer, value in before:  # such as running means, which the warm-up passes changed
            buffer.copy_(value)
        self.graph = graph
