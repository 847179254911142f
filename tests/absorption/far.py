"""A simulated device: its tensors report another device, so that transfers to the CPU can be counted.

Their data are on the CPU. Every operation is checked as a GPU would check it (no mixing of devices). Every copy to the
CPU and every number that is read is recorded, and so is the peak memory in bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from unskip.absorption import Block, Norm

FAR = "lazy"  # a device type that torch knows and that has no backend
EITHER = ("aten.index.Tensor", "aten.index_put", "aten._index_put_impl_", "aten.copy_")  # may read from the CPU


class FarTensor(Tensor):
    """A tensor that reports the far device as its own."""

    inner: Tensor
    log: Far
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, log: Far) -> FarTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=FAR,
        )

    def __init__(self, inner: Tensor, log: Far) -> None:
        self.inner, self.log = inner, log
        log.hold(self, inner)

    def tolist(self) -> Any:
        self.log.moved.append(self.numel())
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the mode")


class Far(TorchDispatchMode):
    """The mode in which operations on the far device run."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[int] = []  # number of entries of each transfer to the CPU
        self.steps = 0  # operations on the far device
        self.held = self.peak = 0  # bytes
        self._users: dict[int, int] = {}

    def hold(self, outer: FarTensor, inner: Tensor) -> None:
        place, size = inner.untyped_storage().data_ptr(), inner.untyped_storage().nbytes()
        self._users[place] = self._users.get(place, 0) + 1
        if self._users[place] == 1:
            self.held += size
            self.peak = max(self.peak, self.held)
        weakref.finalize(outer, self._drop, place, size)

    def _drop(self, place: int, size: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            self.held -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        far = [x for x in given if isinstance(x, FarTensor)]
        near = [x for x in given if not isinstance(x, FarTensor) and x.ndim]
        to = kwargs.get("device")
        if to is not None:
            kwargs["device"] = torch.device("cpu")
        ends = bool(far) if to is None else torch.device(to).type == FAR
        if far and near:
            assert str(func).startswith(EITHER), f"{func} on two devices"
            ends = isinstance(args[0], FarTensor)
            assert ends or "copy_" in str(func), f"{func} reads a tensor of the CPU by indices that are elsewhere"
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        self.steps += bool(far)
        if far and (not ends or not any(isinstance(x, Tensor) for x in tree_leaves(out))):
            self.moved.append(max(x.numel() for x in far))
        if not ends:
            return out
        same = {id(x.inner): x for x in far}  # an operation in place returns its argument
        return tree_map(lambda x: same[id(x)] if id(x) in same else self.wrap(x), out)

    def wrap(self, value: Any) -> Any:
        return FarTensor(value, self) if isinstance(value, Tensor) else value


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, FarTensor) else value


def send(block: Block) -> Block:
    """Moves the weights of a block to the far device."""

    def sent(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(sent(each) for each in value)
        if isinstance(value, Norm):
            return replace(value, gain=sent(value.gain), bias=sent(value.bias))
        return value.to(FAR) if isinstance(value, Tensor) else value

    return replace(block, **{field.name: sent(getattr(block, field.name)) for field in fields(block)})
