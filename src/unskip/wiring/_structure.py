"""What a model is beside its weights: the class and the simple settings of every module, the source of the classes, and
the buffers that this source computes.

Two models of equal shapes may be different functions (a ReLU for a GELU, six heads for three, another rope base). A
saved model is compared with the one it is loaded into in all three respects, and the first difference is put in words.
"""

from __future__ import annotations

import ast
import enum
import functools
import hashlib
import inspect
import json
import math
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from unskip import spec
from unskip._source import function_source
from unskip.errors import SourceError
from unskip.wiring import _fastpath
from unskip.wiring._bind import original_class

Settings = dict[str, Any]  # of a module: its class, and attributes as JSON has them
# They change how a model is run, or say where it came from, but not what it computes. The size of a vocabulary is that
# of its embedding, which is compared; transformers' resize_token_embeddings leaves that of some modules as it was.
_NEUTRAL = frozenset(
    "training forward fused_attn grad_checkpointing gradient_checkpointing name_or_path max_seq_len_cached "
    "vocab_size".split()
)
_FRAMES = ("torch", "transformers.modeling_utils", "diffusers.models.modeling_utils")
_LONG = 200  # characters: a longer setting is kept as its digest
_CLOSE = 1e-3  # a buffer computed on another device differs in its last bits


def class_name(module: nn.Module) -> str:
    """The import name of a module's class, without rewiring."""
    return _name(original_class(module))


def _name(value: Any) -> str:
    return f"{spec.own_name(str(value.__module__))}.{value.__qualname__}"


# --- Settings ---------------------------------------------------------------------------------------------------------


def structure(model: nn.Module) -> dict[str, Settings]:
    """The class and the simple public attributes of every module, by its path."""
    return {path: {"class": class_name(module), **_settings(module)} for path, module in model.named_modules()}


def _settings(module: nn.Module) -> Settings:
    found = {}
    for name, value in sorted({**vars(module), **_fastpath.original(module)}.items()):
        if name.startswith(("_", "unskip_")) or name in _NEUTRAL:
            continue
        plain = None if isinstance(getattr(type(module), name, None), functools.cached_property) else _plain(value)
        # None is as good as absent: it is often the place of a tensor that forward puts there.
        if plain is not None and plain[0] is not None:
            found[name] = plain[0]
    return found


def _plain(value: object) -> tuple[Any] | None:
    """A setting as JSON holds it, in a tuple of one; None for what is no simple value."""
    result: Any
    match value:
        case enum.Enum():
            result = f"{type(value).__qualname__}.{value.name}"
        case None | bool() | int() | str():
            result = value
        case float():
            result = float(value) if math.isfinite(value) else str(float(value))
        case tuple() | list():
            items = [_plain(item) for item in value]
            if any(item is None for item in items):
                return None
            result = [item[0] for item in items if item is not None]
        case functools.partial():
            inner = _plain(value.func), _plain(value.args), _plain(sorted(value.keywords.items()))
            if any(item is None for item in inner):
                return None
            result = ["partial", *(item[0] for item in inner if item is not None)]
        case type() | FunctionType() | MethodType() | BuiltinFunctionType():
            result = _name(value)
        case _:
            return None
    text = json.dumps(result)
    return (result if len(text) <= _LONG else hashlib.sha256(text.encode()).hexdigest(),)


def pack(settings: dict[str, Settings]) -> dict[str, Any]:
    """The settings with equal modules told once: each path has the number of its kind."""
    kinds: dict[str, int] = {}
    modules = {path: kinds.setdefault(json.dumps(each), len(kinds)) for path, each in settings.items()}
    return {"kinds": [json.loads(kind) for kind in kinds], "modules": modules}


def unpack(data: Any) -> dict[str, Settings]:
    """What `pack` packed."""
    return {path: dict(data["kinds"][kind]) for path, kind in data["modules"].items()}


def difference(wanted: dict[str, Settings], found: dict[str, Settings], common: bool = False) -> str | None:
    """The first module, in the order of the wanted model, in which the two differ, in words. With `common`, settings
    that only one of them has are passed over: another version of a class may have more of them.
    """
    for path, settings in wanted.items():
        where = path or "the model"
        other = found.get(path)
        if other is None:
            return f"it has no module {path}, which was a {settings['class']}"
        if settings["class"] != other["class"]:
            return f"{where} is a {other['class']} instead of a {settings['class']}"
        for name in [name for name in {**settings, **other} if name not in _NEUTRAL]:
            alone = name not in settings or name not in other
            if (alone and not common) or (not alone and settings[name] != other[name]):
                return f"{name} of {where} is {_say(other, name)} instead of {_say(settings, name)}"
    more = next((path for path in found if path not in wanted), None)
    return None if more is None else f"it has one module more, {more}, a {found[more]['class']}"


def _say(settings: Settings, name: str) -> str:
    return repr(settings[name]) if name in settings else "not set"


# --- Source -----------------------------------------------------------------------------------------------------------


def sources(model: nn.Module) -> dict[str, dict[str, str | None]]:
    """For every class that is not of torch: digests of its forward, the methods of its own that forward comes to, and
    the functions of the same file that those use. None where the source cannot be had.
    """
    classes = {class_name(module): original_class(module) for module in model.modules()}
    return {name: _digests(cls) for name, cls in classes.items() if not _of_frame(cls)}


def source_difference(wanted: dict[str, dict[str, str | None]], found: dict[str, dict[str, str | None]]) -> str | None:
    """The first class whose source differs, in words."""
    for cls, functions in wanted.items():
        now = found.get(cls, {})
        for name in {**functions, **now}:
            if name in functions and functions[name] is None:
                continue  # it could not be had then
            if functions.get(name) != now.get(name):
                return f"the source of {cls} has changed ({name})"
    return None


def _of_frame(cls: type) -> bool:
    return cls is object or any(f"{cls.__module__}.".startswith(f"{frame}.") for frame in _FRAMES)


def _digests(cls: type) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    queue = [*_methods(cls, "forward")]
    while queue:
        function = queue.pop()
        name = _name(function)
        if name in found:
            continue
        try:
            source = function_source(function.__code__)
        except SourceError:
            found[name] = None
            continue
        found[name] = source.digest
        queue.extend(_used(cls, function, source.node))
    return dict(sorted(found.items()))


def _used(cls: type, function: FunctionType, node: ast.AST) -> Iterator[FunctionType]:
    """What a function's source reads from self, from super(), or by name from its own file."""
    first = function.__code__.co_varnames[:1]
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if (name,) == first:
                yield from _methods(cls, attribute)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=attribute):
                yield from _methods(cls, attribute)
            case ast.Name(id=name):
                other = inspect.unwrap(value) if callable(value := function.__globals__.get(name)) else None
                if isinstance(other, FunctionType) and other.__module__ == function.__module__:
                    yield other


def _methods(cls: type, name: str) -> Iterator[FunctionType]:
    """The functions behind an attribute in a class and its bases: an overridden one may be reached by super()."""
    for owner in cls.__mro__:
        value = vars(owner).get(name)
        if _of_frame(owner) or value is None:
            continue
        if isinstance(value, property):
            value = value.fget
        function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
        if isinstance(function, FunctionType):
            yield function


# --- Buffers ----------------------------------------------------------------------------------------------------------


def buffers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The buffers that are no part of the weights, such as the frequencies of a rope: dtype, shape and sum |x|."""
    return {
        name: {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "sum": _sum(value)}
        for name, value in computed(model).items()
    }


def computed(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are no part of the weights, themselves; those of a wiring are left out."""
    found = {}
    for path, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            value = module._buffers.get(name)
            if value is not None and not name.startswith("unskip_"):
                found[f"{path}.{name}" if path else name] = value
    return found


def buffer_difference(wanted: dict[str, dict[str, Any]], model: nn.Module) -> str | None:
    """The first such buffer in which a model differs, once it is in the saved dtype."""
    found = computed(model)
    for name in {**wanted, **found}:
        if name not in wanted or name not in found:
            return f"the buffer {name} is {'new' if name in found else 'missing'}"
        facts, value = wanted[name], found[name]
        if list(value.shape) != facts["shape"]:
            return f"the buffer {name} has shape {list(value.shape)} instead of {facts['shape']}"
        if not math.isclose(_sum(value.to(dtype_of(facts["dtype"]))), float(facts["sum"]), rel_tol=_CLOSE):
            return f"the buffer {name} has other values"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in torch."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name. Raises ValueError for any other name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name}")
    return found


def _sum(value: Tensor) -> float:
    # Masks hold infinities, which count as 1.
    size = value.detach().abs().double() if value.dtype != torch.bool else value.double()
    return float(torch.nan_to_num(size, nan=0.0, posinf=1.0).sum())
