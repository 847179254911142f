"""accelerate, on the device of the model.

accelerate moves a model to "cuda", the current GPU, and CUDA graphs are recorded there. So the model's GPU is made the
current one during a run: a model on cuda:1 trains on cuda:1.
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
    """Joins the process group when torchrun has restarted the workers, before accelerate creates an ordinary one.

    The agent keeps one store for all attempts, which still has the addresses of the old workers.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt != "0" and not dist.is_initialized():
        distributed: Any = dist  # its type stubs are incomplete
        store, rank, world = next(iter(distributed.rendezvous("env://")))
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=distributed.PrefixStore(f"attempt-{attempt}", store), rank=rank, world_size=world
        )


def _leave() -> None:
    """Stops the process group's threads before the interpreter exits: a thread that needs the interpreter later is
    killed inside C++ code, which aborts the process ("terminate called without an active exception")."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_main() -> bool:
    """Whether this process writes and prints: rank 0 of torchrun and accelerate, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def on(device: torch.device) -> Any:
    """A context that makes a GPU the current one; other devices need none."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def device_of(name: str) -> torch.device:
    """The torch device for a name or "auto". Raises BadInput if it does not exist."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    local_rank = os.environ.get("LOCAL_RANK")
    if name.startswith("cuda:") and local_rank is not None:
        raise BadInput(
            f"device is {name!r}, but the launcher gives every process its own GPU; use cuda, and select GPUs with "
            "CUDA_VISIBLE_DEVICES"
        )
    if name == "cuda" and local_rank is not None:
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"device is {name!r}; it can be auto, cpu, cuda, cuda:1 or mps") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"device is {name!r}, but torch finds no GPU; use auto or cpu")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise BadInput(f"device is {name!r}, but torch finds {count} GPUs, cuda:0 to cuda:{count - 1}")
    return device


def device_of_model(model: nn.Module) -> torch.device:
    """The device of the model's first parameter."""
    return next(model.parameters()).device


def _accelerator(kind: str) -> Any:
    """accelerate keeps one device per process; a run on another kind of device resets it."""
    accelerate = need("accelerate")
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):  # wrappers that accelerate would apply to the model
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            raise BadInput(f"accelerate launch sets {name}; unset it and use unskip's --fsdp to shard the weights")
    _join_again(kind)
    state = accelerate.state.PartialState
    if state._shared_state and state().num_processes == 1 and state().device.type != kind:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    # Settings of `accelerate launch` must not override the run's config.
    settings = {"mixed_precision": "no", "dynamo_backend": "no", "step_scheduler_with_optimizer": False}
    accelerator = accelerate.Accelerator(cpu=kind == "cpu", **settings)
    accelerator.gradient_accumulation_steps = 1
    return accelerator
