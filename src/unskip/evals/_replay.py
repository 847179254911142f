"""Repeated work as one CUDA graph, because kernel launches would dominate the time of a small probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def replayed(work: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """`work` captured as a CUDA graph if its state is on a GPU, otherwise unchanged.

    Between calls only the contents of fixed tensors may change: no numbers from the host, no random draws. `state` are
    the tensors that `work` changes; they are restored after the warm-up.
    """
    if not state[0].is_cuda:
        return work
    before = [tensor.clone() for tensor in state]
    with torch.cuda.device(state[0].device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()  # lazy initialisation must not be captured
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)
    replay: Callable[[], None] = graph.replay
    return replay
