"""A forward that leaves no trace: modes, and if asked buffers and random state, are as they were afterwards."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import numpy
import torch
from torch import Tensor, nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode while it lasts; afterwards every module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def quiet(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in one mode, without gradients or fused attention; modes, buffers and random state are put back."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(m, name, b, None if b is None else b.clone()) for m in modes for name, b in m._buffers.items()]
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    fast = torch.backends.mha.get_fastpath_enabled()
    python, array = random.getstate(), numpy.random.get_state()  # noqa: NPY002  (what a user's forward may draw from)
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        model.train(training)
        # In inference mode attention would stay fused, and what is recorded could not be differentiated.
        with _eager(), torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(list(devices)):
            torch.manual_seed(0)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        random.setstate(python)
        numpy.random.set_state(array)  # noqa: NPY002
        model.train(modes[model])  # whatever a train() of the model's own does besides
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if buffer is not None and value is not None:
                    _put_back(buffer, value)


def _eager() -> contextlib.AbstractContextManager[object]:
    """A function that is compiled inside a model, as flex attention is by torch itself, runs as it is written.

    Where none can be, the compiler is not asked: it takes seconds to import.
    """
    compiles = {"torch._dynamo", "torch.nn.attention.flex_attention"} & sys.modules.keys()
    return torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()


def _put_back(buffer: Tensor, value: Tensor) -> None:
    """The buffer as it was, in the memory that it has: other views of it, or a CUDA graph, may read it there."""
    if buffer.shape != value.shape or buffer.dtype != value.dtype or buffer.layout != torch.strided:
        buffer.data = value
    elif not buffer.is_meta and not torch.equal(buffer, value):
        buffer.data.copy_(value)  # of data: nothing that was computed from the buffer becomes invalid
