"""Builders of saved models: a spec with keyword arguments, or a configuration of transformers or diffusers.

A builder is recorded only if the model it builds has the same modules. A timm model has its name, and its arguments are
read from it. A torchvision model does not: the builders defined in the file of its class are tried on the meta device.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from unskip import spec
from unskip._warn import warn
from unskip.errors import BadInput
from unskip.wiring._structure import class_name, difference, structure
from unskip.wiring._timm import arguments
from unskip.wiring._wiring import find_wiring

Builder = str | Mapping[str, Any] | None  # how `load` rebuilds the model
_IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")  # private: not in transformers' JSON
_LIBRARIES = ("diffusers", "timm", "torchvision", "transformers")  # their models are recorded without builder=
_FETCHING = {"quantization_config", "use_pretrained_backbone"}  # settings that load weights or kernels
_DEFAULTS = {"num_classes": 1000, "image_size": 224}  # of torchvision's builders


def record_of(model: nn.Module, builder: Builder) -> dict[str, Any] | None:
    """The builder as plain data, or None if none is given and none can be inferred, with a warning for models of the
    supported libraries. Raises BadInput if a given builder builds another model.
    """
    if builder is None:
        return _inferred(model)
    given = {"spec": builder, "kwargs": {}} if isinstance(builder, str) else {"kwargs": {}, **builder}
    if not _is_spec(given):
        raise BadInput("builder is a spec such as 'timm:NAME', or a mapping with 'spec' and 'kwargs'")
    try:
        # Compare what `load` will read: JSON turns tuples into lists.
        record = json.loads(json.dumps(given, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"builder {given['spec']}: its kwargs cannot be written as JSON ({error}). Use text and numbers "
            "only, or build the model in a function of a file: builder='file.py:function'"
        ) from error
    wrong = _difference(model, record)
    if wrong:
        raise BadInput(f"builder {record['spec']} does not build this model: {wrong}")
    return record  # type: ignore[no-any-return]


def rebuild(record: dict[str, Any]) -> nn.Module:
    """Builds a new model from the record of a builder. Exceptions of a library are passed on."""
    if _is_spec(record):
        return spec.build(record["spec"], **record["kwargs"])
    if isinstance(record.get("config"), dict):
        if isinstance(record.get("transformers"), str):
            return _from_transformers(record)
        if isinstance(record.get("diffusers"), str):
            import diffusers

            return _model_class(diffusers, record["diffusers"]).from_config(record["config"])  # type: ignore[no-any-return]
    raise ValueError("the record has no known builder")


def _model_class(library: Any, name: str) -> Any:
    cls = getattr(library, name)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"{name} of {library.__name__} is not a model")
    return cls


def reads_files(record: dict[str, Any]) -> list[str]:
    """The arguments of a builder that make a library read or download files outside the folder."""
    config = record.get("config")
    names = {*spec.reading(record.get("kwargs"), arguments=True), *spec.reading(config)}
    return sorted(names | _FETCHING.intersection(_enabled(config)))


def _enabled(config: Any) -> Iterator[str]:
    """The names of all settings with a true value, nested ones included."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if value:
            yield key
        yield from _enabled(value)


def foreign_code(record: dict[str, Any]) -> str | None:
    """The foreign code that building from the record would run: a Python file, a kernel from the hub, or None."""
    text = str(record.get("spec"))
    if spec.is_file(text):
        return f"a Python file, {text}"
    kernels = spec.kernels([record.get(part) for part in ("implementations", "config", "kwargs")])
    return f"a kernel from the hub, {kernels[0]}" if kernels else None


def _is_spec(record: dict[str, Any]) -> bool:
    return (
        set(record) == {"spec", "kwargs"}
        and isinstance(record["spec"], str)
        and isinstance(record["kwargs"], Mapping)
        and all(isinstance(name, str) for name in record["kwargs"])
    )


def _from_transformers(record: dict[str, Any]) -> nn.Module:
    import transformers

    cls = _model_class(transformers, record["transformers"])
    config = cls.config_class.from_dict(_floats(record["config"]))
    for name, value in record.get("implementations", {}).items():
        if name in _IMPLEMENTATIONS and hasattr(type(config), name):
            setattr(config, name, value)
    return cls(config)  # type: ignore[no-any-return]


def _floats(value: Any) -> Any:
    """A configuration with decoded infinities: transformers writes them as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _floats(item) for key, item in value.items()}
    return [_floats(item) for item in value] if isinstance(value, list) else value


def _inferred(model: nn.Module) -> dict[str, Any] | None:
    """The record inferred from the model, if it builds the same model."""
    library = type(model).__module__.partition(".")[0]
    record = _candidate(model, library)
    if record is None:
        reason = "no known name of the library builds it"
    else:
        wrong = _difference(model, record)
        if wrong is None:
            return record
        kwargs = "".join(f", {name}={value!r}" for name, value in record.get("kwargs", {}).items())
        reason = f"{record.get('spec', 'its configuration')}{kwargs} does not build it: {wrong}"
    if library in _LIBRARIES:
        warn(
            f"{class_name(model)}: saved without a builder; {reason}. To load it, build it as before and pass model=, "
            "or save it with builder=, a spec such as 'timm:NAME' or {'spec': ..., 'kwargs': {...}}."
        )
    return None


def _candidate(model: nn.Module, library: str) -> dict[str, Any] | None:
    config: Any = getattr(model, "config", None)
    try:
        if library == "transformers" and hasattr(config, "to_json_string"):
            return {
                "transformers": type(model).__name__,
                "config": json.loads(config.to_json_string(use_diff=False)),
                "implementations": {name: _implementation(config, name) for name in _IMPLEMENTATIONS},
            }
        if library == "diffusers" and config is not None:
            plain = {key: value for key, value in dict(config).items() if not key.startswith("_")}
            return {"diffusers": type(model).__name__, "config": json.loads(json.dumps(plain, allow_nan=False))}
    except (TypeError, ValueError):
        return None  # a configuration that is not plain data
    if library == "torchvision":
        return _torchvision_candidate(model)
    cfg = getattr(model, "pretrained_cfg", None)
    name = cfg.get("architecture") if isinstance(cfg, dict) else getattr(cfg, "architecture", None)
    if library != "timm" or not isinstance(name, str):
        return None
    record = {"spec": f"timm:{name}", "kwargs": {}}
    with contextlib.suppress(BadInput):  # if the name does not build, `_difference` reports it
        record["kwargs"] = arguments(model, _quietly_built(record))
    return record


def _torchvision_candidate(model: nn.Module) -> dict[str, Any] | None:
    """The first torchvision builder, of those in the file of the model's class, with the same weight shapes."""
    from torchvision import models

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    head = {"num_classes": linear[-1].out_features} if linear else {}
    size = {"image_size": model.image_size} if isinstance(getattr(model, "image_size", None), int) else {}
    kwargs = {name: value for name, value in {**head, **size}.items() if value != _DEFAULTS[name]}
    for name in models.list_models():
        if models.get_model_builder(name).__module__ == type(model).__module__:
            record = {"spec": f"torchvision:{name}", "kwargs": kwargs}
            # Only on the meta device: the largest RegNet, which cannot be built there, takes gigabytes.
            with contextlib.suppress(BadInput), torch.device("meta"):
                if _shapes(rebuild(record)) == _shapes(model):
                    return record
    return None


def _implementation(config: Any, name: str) -> Any:
    """A private setting of a configuration and, by name, of the configurations inside it."""
    inner = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", {})}
    own = getattr(config, name, None)
    parts = {key: _implementation(part, name) for key, part in inner.items() if part is not None}
    return {"": own, **parts} if parts else own


def _difference(model: nn.Module, record: dict[str, Any]) -> str | None:
    """How a model built from the record differs, as text; None if it does not."""
    try:
        other = _quietly_built(record)
    except Exception as error:  # of a library or of the user's file
        return f"{type(error).__name__}: {error}"
    if class_name(other) != class_name(model):
        return f"it builds a {class_name(other)}, not a {class_name(model)}"
    wrong = difference(structure(model), structure(other))
    if wrong:
        return f"in the built model, {wrong}"
    ours, theirs = _shapes(model), _shapes(other)
    differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return f"{len(differing)} weights differ, such as {differing[0]}" if differing else None


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights, without those that `Learn` added."""
    wiring = find_wiring(model)
    added = {} if wiring is None else wiring.parameters
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in added}


def _quietly_built(record: dict[str, Any]) -> nn.Module:
    """Builds on the meta device if the constructor allows it, and leaves the random state unchanged."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return rebuild(record)
        except Exception:  # a constructor that reads values; a real error is raised again below
            return rebuild(record)
