"""A check that work can be captured as a CUDA graph: no synchronisation with the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Numbers read by the host, shapes that depend on values, and tensors made from host data.
_WAITS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "lift_fresh", "is_nonzero", "equal.default")


class NoHost(TorchDispatchMode):
    """Raises AssertionError for an operation that would synchronise with the host or copy from it; counts the others.

    On the "meta" device it also detects copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(
        self, operation: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(operation)
        options = dict(kwargs or {})
        if any(word in name for word in _WAITS):
            raise AssertionError(f"{name} synchronises with the host")
        devices = {leaf.device.type for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)}
        if "_to_copy" in name and options.get("device") is not None:
            devices.add(options["device"].type)
        if len(devices) > 1:
            raise AssertionError(f"{name} copies between {' and '.join(sorted(devices))}")
        if options.get("generator") is not None:
            raise AssertionError(f"{name} draws from a generator that is not part of the graph")
        self.operations += 1
        return operation(*args, **options)
