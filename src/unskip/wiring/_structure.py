"""What a model is beside its weights: the class and the simple settings of every module, and the buffers it computes.

Two models of equal shapes may be different functions (a ReLU for a GELU, six heads for three, another rope base). A
saved model is compared with the one it is loaded into in both respects, and the first difference is put in words.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import math
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from unskip import spec
from unskip.wiring import _fastpath
from unskip.wiring._bind import original_class

Settings = dict[str, Any]  # of a module: its class, and attributes as JSON has them
# They change how a model is run, or say where it came from, but not what it computes. The size of a vocabulary is that
# of its embedding, which is compared; transformers' resize_token_embeddings leaves that of some modules as it was.
_NEUTRAL = frozenset(
    "training forward fused_attn grad_checkpointing gradient_checkpointing name_or_path max_seq_len_cached "
    "vocab_size weight_init_mode".split()
)
_UNSET = object()
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
    settings = {}
    for name, value in sorted({**vars(module), **_fastpath.original(module)}.items()):
        if name.startswith(("_", "unskip_")) or name in _NEUTRAL:
            continue
        plain = None if isinstance(getattr(type(module), name, None), functools.cached_property) else _plain(value)
        # None is as good as absent: it is often the place of a tensor that forward puts there.
        if plain is not None and plain[0] is not None:
            settings[name] = plain[0]
    return settings


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


def difference(wanted: dict[str, Settings], now: dict[str, Settings]) -> str | None:
    """The first module, in the order of the wanted model, in which the two differ, in words."""
    for path, settings in wanted.items():
        where = path or "the model"
        other = now.get(path)
        if other is None:
            return f"it has no module {path}, which was a {settings['class']}"
        if settings["class"] != other["class"]:
            return f"{where} is a {other['class']} instead of a {settings['class']}"
        for name in [name for name in {**settings, **other} if name not in _NEUTRAL]:
            if settings.get(name, _UNSET) != other.get(name, _UNSET):
                return f"{name} of {where} is {_say(other, name)} instead of {_say(settings, name)}"
    more = next((path for path in now if path not in wanted), None)
    return None if more is None else f"it has one module more, {more}, a {now[more]['class']}"


def _say(settings: Settings, name: str) -> str:
    return repr(settings[name]) if name in settings else "not set"


# --- Buffers ----------------------------------------------------------------------------------------------------------


def buffers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The buffers that are no part of the weights, such as the frequencies of a rope: dtype, shape and sum |x|."""
    return {
        name: {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "sum": _sum(value)}
        for name, value in computed(model).items()
    }


def computed(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are no part of the weights, themselves; those of a wiring are left out."""
    tensors = {}
    for path, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            value = module._buffers.get(name)
            if value is not None and not name.startswith("unskip_"):
                tensors[f"{path}.{name}" if path else name] = value
    return tensors


def buffer_difference(wanted: dict[str, dict[str, Any]], model: nn.Module) -> str | None:
    """The first such buffer in which a model differs, once it is in the saved dtype."""
    now = computed(model)
    for name in {**wanted, **now}:
        if name not in wanted or name not in now:
            return f"the buffer {name} is {'new' if name in now else 'missing'}"
        facts, value = wanted[name], now[name]
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
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name}")
    return dtype


def _sum(value: Tensor) -> float:
    # Masks hold infinities, which count as 1.
    size = value.detach().abs().double() if value.dtype != torch.bool else value.double()
    return float(torch.nan_to_num(size, nan=0.0, posinf=1.0).sum())
