"""The structure of a model beside its weights: class and simple settings of every module, and computed buffers.

Models of equal shapes may be different functions (ReLU or GELU, three or six heads, another RoPE base). Loading
compares the saved structure with the model's and reports the first difference.
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

Settings = dict[str, Any]  # of a module: its class, and attributes as JSON values
# Settings that do not change what a model computes. The vocabulary size is that of the embedding, which is compared;
# transformers' resize_token_embeddings does not update it in some modules.
_NEUTRAL = frozenset(
    "training forward fused_attn grad_checkpointing gradient_checkpointing name_or_path max_seq_len_cached "
    "vocab_size weight_init_mode".split()
)
_UNSET = object()
_LONG = 200  # characters; a longer setting is stored as its digest
_CLOSE = 1e-3  # a buffer computed on another device may differ by rounding


def class_name(module: nn.Module) -> str:
    """The import name of a module's original class."""
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
        if isinstance(getattr(type(module), name, None), functools.cached_property):
            continue
        plain = _plain(value)
        # None counts as absent: it is often the initial value of a tensor that forward sets.
        if plain is not None and plain is not _UNSET:
            settings[name] = plain
    return settings


def _plain(value: object) -> Any:
    """A setting as a JSON value; _UNSET if it is not a simple value."""
    result: Any
    match value:
        case enum.Enum():
            result = f"{type(value).__qualname__}.{value.name}"
        case None | bool() | int() | str():
            result = value
        case float():
            result = float(value) if math.isfinite(value) else str(float(value))
        case tuple() | list():
            result = [_plain(item) for item in value]
            if any(item is _UNSET for item in result):
                return _UNSET
        case functools.partial():
            return _plain(["partial", value.func, value.args, sorted(value.keywords.items())])
        case type() | FunctionType() | MethodType() | BuiltinFunctionType():
            result = _name(value)
        case _:
            return _UNSET
    text = json.dumps(result)
    return result if len(text) <= _LONG else hashlib.sha256(text.encode()).hexdigest()


def pack(settings: dict[str, Settings]) -> dict[str, Any]:
    """The settings without repetition: a list of kinds, and for each path the index of its kind."""
    kinds: dict[str, int] = {}
    modules = {path: kinds.setdefault(json.dumps(module), len(kinds)) for path, module in settings.items()}
    return {"kinds": [json.loads(kind) for kind in kinds], "modules": modules}


def unpack(data: Any) -> dict[str, Settings]:
    """The inverse of `pack`."""
    return {path: dict(data["kinds"][kind]) for path, kind in data["modules"].items()}


def difference(wanted: dict[str, Settings], now: dict[str, Settings]) -> str | None:
    """The first difference between two structures, in the module order of `wanted`, as text; None if they are equal."""
    for path, settings in wanted.items():
        where = path or "the model"
        other = now.get(path)
        if other is None:
            return f"it has no module {path}, which was a {settings['class']}"
        if settings["class"] != other["class"]:
            return f"{where} is a {other['class']} instead of a {settings['class']}"
        for name in [name for name in {**settings, **other} if name not in _NEUTRAL]:
            if settings.get(name, _UNSET) != other.get(name, _UNSET):
                return f"{name} of {where} is {_text(other, name)} instead of {_text(settings, name)}"
    extra = next((path for path in now if path not in wanted), None)
    return None if extra is None else f"it has an extra module, {extra}, a {now[extra]['class']}"


def _text(settings: Settings, name: str) -> str:
    return repr(settings[name]) if name in settings else "not set"


# --- Buffers ----------------------------------------------------------------------------------------------------------


def buffers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Dtype, shape and sum |x| of the computed buffers."""
    return {
        name: {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "sum": _sum(value)}
        for name, value in computed(model).items()
    }


def computed(model: nn.Module) -> dict[str, Tensor]:
    """The non-persistent buffers, such as RoPE frequencies, without those of a wiring."""
    tensors = {}
    for path, module in model.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            value = module._buffers.get(name)
            if value is not None and not name.startswith("unskip_"):
                tensors[f"{path}.{name}" if path else name] = value
    return tensors


def buffer_difference(wanted: dict[str, dict[str, Any]], model: nn.Module) -> str | None:
    """The first computed buffer in which a model differs after a cast to the saved dtype, as text."""
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
    """The name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype with a name. Raises ValueError for an unknown name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name}")
    return dtype


def _sum(value: Tensor) -> float:
    # Infinities, as in masks, count as 1.
    size = value.detach().abs().double() if value.dtype != torch.bool else value.double()
    return float(torch.nan_to_num(size, nan=0.0, posinf=1.0).sum())
