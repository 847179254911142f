"""The forward and backward pass of a step as one CUDA graph.

A small model leaves a GPU waiting: its host launches some two thousand kernels a step, one after the other. Recorded
once and replayed, they cost one launch. What the pass reads has to stay where it is: batches are copied into the first
one's memory, and gradients stay in theirs. The optimizer is no part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from unskip.errors import TrainingError

Pass = Callable[[Any], tuple[Tensor, dict[str, Tensor]]]  # from a batch to the loss and further numbers
_WARMUPS = 3  # lazy initialisation, and the choice of algorithms, must not be recorded


def why_not(kind: str, world: int, accumulate: int, precision: str = "float32") -> str | None:
    """What stands in the way of a graph; None where there can be one."""
    if kind != "cuda":
        return f"a CUDA graph is for a GPU, and this run is on {kind}"
    if world > 1:
        return f"a CUDA graph is for one process, and there are {world}"
    if accumulate > 1:
        return f"a CUDA graph holds one pass, and gradients are accumulated over {accumulate}"
    if precision == "fp16":
        return "a CUDA graph cannot leave out a step, as fp16 does where gradients overflow"
    return None


class Graphed:
    """A pass over one batch, (loss, numbers), which leaves its gradients in `.grad`; recorded anew for each new key."""

    def __init__(self, work: Pass, model: nn.Module) -> None:
        self.work, self.model = work, model
        self.graph: Any = None
        self.key: Hashable = None

    def __call__(self, batch: tuple[Tensor, ...], key: Hashable, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        if self.graph is None or key != self.key:
            self._record(batch, key)
            torch.manual_seed(seed)  # recording has drawn from the generator
        for held, new in zip(self.batch, batch, strict=True):
            if held.shape != new.shape or held.dtype != new.dtype:
                raise TrainingError(
                    f"a batch of {tuple(new.shape)}, {new.dtype}, after one of {tuple(held.shape)}, {held.dtype}: a "
                    "CUDA graph holds one shape. Train with graph=False."
                )
            held.copy_(new)
        self.graph.replay()
        loss, numbers = self.result
        return loss.clone(), {name: value.clone() for name, value in numbers.items()}

    def _record(self, batch: tuple[Tensor, ...], key: Hashable) -> None:
        self.graph, self.key = None, key  # an earlier graph gives its memory back first
        self.batch = tuple(tensor.clone() for tensor in batch)
        before = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARMUPS):
                self.model.zero_grad(set_to_none=True)
                self.work(self.batch)
        torch.cuda.current_stream().wait_stream(side)
        self.model.zero_grad(set_to_none=True)  # so that the recorded pass writes gradients, and adds to none
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that pins memory, may continue.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            loss, numbers = self.work(self.batch)
        # Detached: what holds the autograd graph would keep its nodes on this stream for the next recording.
        self.result = loss.detach(), {name: value.detach() for name, value in numbers.items()}
        for buffer, value in before:  # such as running means, which the rehearsals have moved
            buffer.copy_(value)
        self.graph = graph
