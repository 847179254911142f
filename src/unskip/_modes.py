"""Forward passes without side effects: modes, and optionally buffers and random state, are restored."""

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
    """Evaluation mode inside the context; afterwards every module's mode is restored."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def quiet(model: nn.Module, training: bool) -> Iterator[None]:
    """A mode without gradients or fused attention; modes, buffers and random state are restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(m, name, b, None if b is None else b.clone()) for m in modes for name, b in m._buffers.items()]
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    fast = torch.backends.mha.get_fastpath_enabled()
    python, array = random.getstate(), numpy.random.get_state()  # noqa: NPY002  (a user's forward may draw from it)
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        model.train(training)
        # In inference mode attention stays fused, and recorded tensors cannot be differentiated.
        with _eager(), torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(list(devices)):
            torch.manual_seed(0)
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        random.setstate(python)
        numpy.random.set_state(array)  # noqa: NPY002
        model.train(modes[model])  # an overridden train() may have side effects
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if buffer is not None and value is not None:
                    _restore(buffer, value)


def _eager() -> contextlib.AbstractContextManager[object]:
    """Runs compiled functions inside a model eagerly, such as torch's flex attention.

    Does nothing unless the compiler is imported already, because that takes seconds.
    """
    compiles = {"torch._dynamo", "torch.nn.attention.flex_attention"} & sys.modules.keys()
    return torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()


def _restore(buffer: Tensor, value: Tensor) -> None:
    """Restores the buffer in its own memory, which other views or a CUDA graph may read."""
    if buffer.shape != value.shape or buffer.dtype != value.dtype or buffer.layout != torch.strided:
        buffer.data = value
    elif not buffer.is_meta and not torch.equal(buffer, value):
        buffer.data.copy_(value)  # .data, so that autograd does not invalidate earlier results
