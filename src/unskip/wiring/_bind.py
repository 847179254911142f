"""Gives one module rewritten methods, by a subclass of its class that pickles as (class, patch).

The module keeps its identity, parameters, hooks and `isinstance`: only `module.__class__` changes, and other instances
of the class do not. A method bound to the instance would be simpler, but pickle drops it silently.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

from torch import Tensor, nn

from unskip._source import function_source, layers, names_of
from unskip.anatomy import PATCH, Hop, Place
from unskip.errors import RewireError, SourceError, WrappedError
from unskip.wiring._mix import Held
from unskip.wiring._rewrite import Edit, rewrite


@dataclass(frozen=True)
class Patch:
    """Which additions of a class read which slots. Plain data, pickled with the module."""

    slots: tuple[tuple[Place, ...], ...]


def bind(module: nn.Module, patch: Patch) -> None:
    """Sets the module's class to one with weighted additions."""
    base: Any = type(module)
    module.__class__ = patched(base, patch)


def unbind(module: nn.Module) -> None:
    """Restores the module's original class."""
    module.__class__ = original_class(module)


def is_bound(module: nn.Module) -> bool:
    """Whether the module is patched, also under a subclass added by another tool."""
    return hasattr(type(module), PATCH)


def refuse_covered(module: nn.Module, path: str) -> None:
    """Raises WrappedError if the original class cannot be restored."""
    covered = PATCH not in vars(type(module))
    if is_bound(module) and (covered or "forward" in vars(module)):
        what = type(module).__name__ if covered else "a forward on the instance"
        raise WrappedError(
            f"{path or 'the model'} was changed after it was rewired ({what}: FSDP, a parametrization, a hook of "
            "accelerate). Remove that first, or undo the wiring before adding it."
        )


def original_class(module: nn.Module) -> Any:
    """The class of a module before rewiring."""
    for cls in type(module).__mro__:
        if PATCH in vars(cls):
            return cls.__bases__[0]
    return type(module)


@functools.lru_cache(maxsize=1024)  # one class for all blocks of a model, so that they share compiled code
def patched(base: Any, patch: Patch) -> Any:
    """The subclass of `base` for a patch."""
    if base.__reduce_ex__ is not object.__reduce_ex__ or base.__reduce__ is not object.__reduce__:
        raise RewireError(
            f"{base.__qualname__} cannot be rewired: it defines how it is pickled, which would drop the wiring."
        )
    edits = [
        Edit(p.hops, p.side, p.role, slot, p.turn, p.fresh, p.variable, p.key)
        for slot, places in enumerate(patch.slots)
        for p in places
    ]
    namespace = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    for hop in dict.fromkeys((edit.hops[0].qualname, edit.hops[0].digest) for edit in edits):
        here = [edit for edit in edits if (edit.hops[0].qualname, edit.hops[0].digest) == hop]
        for name, function in _methods(base, here[0].hops[0]):
            namespace[name] = rewrite(function, here)
    namespace[PATCH] = patch
    namespace["__reduce_ex__"] = _reduce
    namespace["_apply"] = _move
    namespace["__prepare_scriptable__"] = _refuse_script
    return types.new_class(base.__name__, (base,), {}, lambda body: body.update(namespace))


def _methods(base: type, hop: Hop) -> Iterator[tuple[str, FunctionType]]:
    for owner in base.__mro__:
        for function in list(vars(owner).values()):
            for layer in layers(function):
                if layer.__code__.co_qualname != hop.qualname or not _is_source(layer, hop.digest):
                    continue
                names = names_of(base, layer.__code__)
                if names:
                    yield from ((name, getattr(base, name)) for name in names)
                    return
    raise RewireError(
        f"{hop.module}.{hop.qualname}: {base.__qualname__} has no method with the source that was rewired. The "
        "library may have another version."
    )


def _is_source(function: FunctionType, digest: str) -> bool:
    try:
        return function_source(function.__code__).digest == digest
    except SourceError:
        return False


def _move(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`, which `to`, `cuda` and `double` call, extended to Held weights."""
    original_class(self)._apply(self, fn, recurse)
    state = vars(self)
    state.update({name: value.moved(fn) for name, value in state.items() if isinstance(value, Held)})
    return self


def _refuse_script(self: nn.Module) -> NoReturn:
    """Called by torch.jit.script, which would compile the source file and so the plain model."""
    raise RewireError(
        f"{type(self).__name__} is rewired, and torch.jit.script reads the source file, which has no shortcut weights. "
        "Use torch.export, or torch.jit.trace."
    )


def _reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    return _rebuild, (original_class(self), getattr(type(self), PATCH)), self.__getstate__()


def _rebuild(base: Any, patch: Patch) -> Any:
    cls = patched(base, patch)
    return cls.__new__(cls)
