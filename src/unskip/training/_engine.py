"""The engine of a run: accelerate, on the device that the model lies on.

accelerate moves a model to "cuda", which is the GPU that is current, and CUDA graphs are recorded there. So the model's
own GPU is the current one during its run: cuda:1 is trained on cuda:1.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from unskip._extras import need
from unskip.errors import BadInput


@contextlib.contextmanager
def engine(device: torch.device) -> Iterator[Any]:
    """An `Accelerator` for models on this device."""
    with on(device):
        yield _accelerator(device.type)
    if dist.is_available() and dist.is_initialized():  # not after an error: the other processes may be waiting
        atexit.unregister(_leave)
        atexit.register(_leave)


def _join_again(kind: str) -> None:
    """The process group of workers that torchrun has started again, where accelerate would make an ordinary one.

    The agent keeps one store for all attempts, and the addresses in it are those of the workers that are gone.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt != "0" and not dist.is_initialized():
        distributed: Any = dist  # whose types leave some names out
        store, rank, world = next(iter(distributed.rendezvous("env://")))
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=distributed.PrefixStore(f"attempt-{attempt}", store), rank=rank, world_size=world
        )


def _leave() -> None:
    """Ends the threads of the process group before the interpreter ends: one that needs the interpreter afterwards is
    ended in the middle of C++ code, which aborts the process ("terminate called without an active exception")."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_main() -> bool:
    """Whether this process writes and prints; torchrun and accelerate number their processes so."""
    return int(os.environ.get("RANK", "0")) == 0


def on(device: torch.device) -> Any:
    """A context in which a GPU is the current one; of other devices there is nothing to choose."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def device_of(name: str) -> torch.device:
    """The device of a name, or of "auto". Raises BadInput where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    launched = os.environ.get("LOCAL_RANK")  # the number of one of several processes
    if name.startswith("cuda:") and launched is not None:
        raise BadInput(
            f"device is {name!r}, and every process that a launcher starts has a GPU of its own; take cuda, and choose "
            "GPUs by CUDA_VISIBLE_DEVICES"
        )
    if name == "cuda" and launched is not None:
        name = f"cuda:{launched}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"device is {name!r}; it can be auto, cpu, cuda, cuda:1 or mps") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"device is {name!r}, and torch finds no GPU; take auto or cpu")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise BadInput(f"device is {name!r}, and torch finds {count} GPUs, cuda:0 to cuda:{count - 1}")
    return device


def device_of_model(model: nn.Module) -> torch.device:
    """The device of its first parameter."""
    return next(model.parameters()).device


def _accelerator(kind: str) -> Any:
    """accelerate keeps one device a process; a run on another kind of device resets it."""
    accelerate = need("accelerate")
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):  # which accelerate would put around the model
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            raise BadInput(f"accelerate launch asks for {name}: leave that out; --fsdp of unskip shards the weights")
    _join_again(kind)
    state = accelerate.state.PartialState
    if state._shared_state and state().num_processes == 1 and state().device.type != kind:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    # Settings of `accelerate launch` must not override the config of the run.
    own = {"mixed_precision": "no", "dynamo_backend": "no", "step_scheduler_with_optimizer": False}
    accelerator = accelerate.Accelerator(cpu=kind == "cpu", **own)
    accelerator.gradient_accumulation_steps = 1
    return accelerator
