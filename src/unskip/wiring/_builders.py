"""How a saved model is built again: from a spec with keyword arguments, or from a configuration of transformers or
diffusers. A builder is recorded only where what it builds is the model, module by module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from unskip import spec
from unskip.anatomy._guard import wiring_in
from unskip.errors import BadInput
from unskip.wiring._structure import class_name, difference, structure

Builder = str | Mapping[str, Any] | None
_IMPLEMENTATIONS = (
    "_attn_implementation",
    "_experts_implementation",
)  # private in transformers' configs, so not in JSON


def record_of(model: nn.Module, builder: Builder) -> dict[str, Any] | None:
    """The builder as plain data. Raises BadInput for a given one that builds another model; where none was given and
    none can be inferred, None.
    """
    if builder is None:
        record = _inferred(model)
        return None if record is None or _difference(model, record) else record
    given = {"spec": builder, "kwargs": {}} if isinstance(builder, str) else {"kwargs": {}, **builder}
    if not _is_spec(given):
        raise BadInput("builder is a spec such as 'timm:NAME', or a mapping with 'spec' and 'kwargs'")
    try:
        # Compared as it will be read: JSON has lists for tuples.
        record = json.loads(json.dumps(given, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"builder {given['spec']}: its kwargs cannot be written as JSON ({error}). Name what they mean by text and "
            "numbers, or build the model in a function of a file: builder='file.py:function'"
        ) from error
    wrong = _difference(model, record)
    if wrong:
        raise BadInput(f"builder {record['spec']} does not build this model: {wrong}")
    return record  # type: ignore[no-any-return]


def build(record: dict[str, Any]) -> nn.Module:
    """A new model from the record of a builder. What a library raises is passed on."""
    if _is_spec(record):
        return spec.build(record["spec"], **record["kwargs"])
    if isinstance(record.get("config"), dict):
        if isinstance(record.get("transformers"), str):
            return _from_transformers(record)
        if isinstance(record.get("diffusers"), str):
            import diffusers

            model: Any = getattr(diffusers, record["diffusers"])
            return model.from_config(record["config"])  # type: ignore[no-any-return]
    raise ValueError("the record has no builder that is known")


def _is_spec(record: dict[str, Any]) -> bool:
    return (
        set(record) == {"spec", "kwargs"}
        and isinstance(record["spec"], str)
        and isinstance(record["kwargs"], Mapping)
        and all(isinstance(name, str) for name in record["kwargs"])
    )


def _from_transformers(record: dict[str, Any]) -> nn.Module:
    import transformers

    cls: Any = getattr(transformers, record["transformers"])
    config = cls.config_class.from_dict(_floats(record["config"]))
    for name, value in record.get("implementations", {}).items():
        if name in _IMPLEMENTATIONS and hasattr(type(config), name):
            setattr(config, name, value)
    return cls(config)  # type: ignore[no-any-return]


def _floats(value: Any) -> Any:
    """A configuration with its infinities: transformers writes them as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _floats(item) for key, item in value.items()}
    return [_floats(item) for item in value] if isinstance(value, list) else value


def _inferred(model: nn.Module) -> dict[str, Any] | None:
    config: Any = getattr(model, "config", None)
    library = type(model).__module__.partition(".")[0]
    try:
        if library == "transformers" and hasattr(config, "to_json_string"):
            return {
                "transformers": type(model).__name__,
                "config": json.loads(config.to_json_string(use_diff=False)),
                "implementations": {name: _implementation(config, name) for name in _IMPLEMENTATIONS},
            }
        if library == "diffusers" and config is not None:
            plain = {key: value for key, value in dict(config).items() if not key.startswith("_")}
            return {"diffusers": type(model).__name__, "config": json.loads(json.dumps(plain))}
    except (TypeError, ValueError):
        return None  # a configuration that is no plain data
    described = getattr(model, "pretrained_cfg", None)
    name = described.get("architecture") if isinstance(described, dict) else getattr(described, "architecture", None)
    return {"spec": f"timm:{name}", "kwargs": {}} if library == "timm" and isinstance(name, str) else None


def _implementation(config: Any, name: str) -> Any:
    """Of a config, and by name of the configs inside it."""
    inner = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", {})}
    own = getattr(config, name, None)
    parts = {key: _implementation(part, name) for key, part in inner.items() if part is not None}
    return {"": own, **parts} if parts else own


def _difference(model: nn.Module, record: dict[str, Any]) -> str | None:
    """How a model built from the record differs, in words."""
    try:
        other = _quietly_built(record)
    except Exception as error:  # of a library or of the user's file
        return f"{type(error).__name__}: {error}"
    if class_name(other) != class_name(model):
        return f"it gives a {class_name(other)}, not a {class_name(model)}"
    wrong = difference(structure(model), structure(other))
    if wrong:
        return f"in what it builds, {wrong}"
    wiring = wiring_in(model)
    added = {} if wiring is None else wiring.parameters
    ours = {k: tuple(v.shape) for k, v in model.state_dict().items() if k not in added}
    theirs = {k: tuple(v.shape) for k, v in other.state_dict().items()}
    differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return f"{len(differing)} weights differ, such as {differing[0]}" if differing else None


def _quietly_built(record: dict[str, Any]) -> nn.Module:
    """Without values where the constructor can do without, and without a trace in the random state."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return build(record)
        except Exception:
            return build(record)
