"""Work that is done over and over, as one CUDA graph: a small probe would keep a GPU waiting for its host otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def replayed(work: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """`work` recorded, where its state lies on a GPU; as it is otherwise.

    It may look at tensors that stay where they are, and at nothing else that changes: no number from the host, no
    random draw. `state` is what it changes; rehearsing leaves no trace there.
    """
    if not state[0].is_cuda:
        return work
    before = [tensor.clone() for tensor in state]
    with torch.cuda.device(state[0].device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()  # lazy initialisation must not be recorded
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)
    replay: Callable[[], None] = graph.replay
    return replay
