"""A watch over the host: work that is to be recorded as a CUDA graph must not ask it for anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# A number read by the host, a shape that depends on values, and a tensor made from host data.
_WAITS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "lift_fresh", "is_nonzero", "equal.default")


class NoHost(TorchDispatchMode):
    """Raises where an operation would make the host wait for the device, or copy from it. Counts the others.

    Copies are seen where the work is done on the "meta" device, as if that were a GPU.
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
            raise AssertionError(f"{name} asks the host")
        given = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        places = {each.device.type for each in given}
        if "_to_copy" in name and options.get("device") is not None:
            places.add(options["device"].type)
        if len(places) > 1:
            raise AssertionError(f"{name} moves something between {' and '.join(sorted(places))}")
        if options.get("generator") is not None:
            raise AssertionError(f"{name} draws from a generator that no graph knows")
        self.operations += 1
        return operation(*args, **options)
