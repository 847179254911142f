"""How a saved model is built again: from a spec with keyword arguments, or from a configuration of transformers or
diffusers. A builder is recorded only where what it builds is the model, module by module.

A timm model says its name, and its arguments are read from it. One of torchvision does not say its name: those that
give its class are tried, without values.
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

Builder = str | Mapping[str, Any] | None  # how `load` builds the model again
_IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")  # private in transformers' configs: not in JSON
_LIBRARIES = ("diffusers", "timm", "torchvision", "transformers")  # whose models are recorded unasked
_FETCHING = {"quantization_config", "use_pretrained_backbone"}  # weights, or kernels, where a configuration has them
_USUAL = {"num_classes": 1000, "image_size": 224}  # what torchvision's builders take for granted


def record_of(model: nn.Module, builder: Builder) -> dict[str, Any] | None:
    """The builder as plain data. Raises BadInput for a given one that builds another model; where none was given and
    none can be inferred, None, with a warning if a model of this library is usually recorded.
    """
    if builder is None:
        return _found(model)
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


def rebuild(record: dict[str, Any]) -> nn.Module:
    """A new model from the record of a builder. What a library raises is passed on."""
    if _is_spec(record):
        return spec.build(record["spec"], **record["kwargs"])
    if isinstance(record.get("config"), dict):
        if isinstance(record.get("transformers"), str):
            return _from_transformers(record)
        if isinstance(record.get("diffusers"), str):
            import diffusers

            return _model_class(diffusers, record["diffusers"]).from_config(record["config"])  # type: ignore[no-any-return]
    raise ValueError("the record has no builder that is known")


def _model_class(library: Any, name: str) -> Any:
    cls = getattr(library, name)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"{name} of {library.__name__} is no model")
    return cls


def reads_files(record: dict[str, Any]) -> list[str]:
    """The arguments of a builder that make a library read or fetch other files than the folder's."""
    config = record.get("config")
    found = {*spec.reading(record.get("kwargs"), arguments=True), *spec.reading(config)}
    return sorted(found | {key for key in _fetching(config) if key in _FETCHING})


def _fetching(config: Any) -> Iterator[str]:
    """The settings that are set anywhere in a configuration."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if value:
            yield key
        yield from _fetching(value)


def foreign_code(record: dict[str, Any]) -> str | None:
    """What building from the record would run beside the libraries: a Python file, or a kernel of the hub; or None."""
    named = str(record.get("spec"))
    if spec.is_file(named):
        return f"a Python file, {named}"
    kernels = spec.kernels([record.get(part) for part in ("implementations", "config", "kwargs")])
    return f"a kernel of the hub, {kernels[0]}" if kernels else None


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
    """A configuration with its infinities: transformers writes them as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _floats(item) for key, item in value.items()}
    return [_floats(item) for item in value] if isinstance(value, list) else value


def _found(model: nn.Module) -> dict[str, Any] | None:
    """The record that the model itself gives rise to, where that builds the same."""
    library = type(model).__module__.partition(".")[0]
    record = _inferred(model, library)
    differs = "no name of the library is known that does" if record is None else _difference(model, record)
    if differs is None:
        return record
    if library in _LIBRARIES:
        kwargs = "".join(f", {name}={value!r}" for name, value in (record or {}).get("kwargs", {}).items())
        what = "" if record is None else f"{record.get('spec', 'its configuration')}{kwargs} does not: "
        warn(
            f"{class_name(model)}: saved without a word on how to build it; {what}{differs}. To load it, build it as "
            "you did and pass model=, or save it with builder=, a spec such as 'timm:NAME' or {'spec': ..., 'kwargs': "
            "{...}}."
        )
    return None


def _inferred(model: nn.Module, library: str) -> dict[str, Any] | None:
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
        return None  # a configuration that is no plain data
    if library == "torchvision":
        return _from_names(model)
    described = getattr(model, "pretrained_cfg", None)
    name = described.get("architecture") if isinstance(described, dict) else getattr(described, "architecture", None)
    if library != "timm" or not isinstance(name, str):
        return None
    record = {"spec": f"timm:{name}", "kwargs": {}}
    with contextlib.suppress(BadInput):  # of a name that does not build: told by the comparison
        record["kwargs"] = arguments(model, _quietly_built(record))
    return record


def _from_names(model: nn.Module) -> dict[str, Any] | None:
    """The first of torchvision's names, among those of the file that the model's class stands in, that gives it."""
    from torchvision import models

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    head = {"num_classes": linear[-1].out_features} if linear else {}
    size = {"image_size": model.image_size} if isinstance(getattr(model, "image_size", None), int) else {}
    kwargs = {name: value for name, value in {**head, **size}.items() if value != _USUAL[name]}
    for name in models.list_models():
        if models.get_model_builder(name).__module__ == type(model).__module__:
            record = {"spec": f"torchvision:{name}", "kwargs": kwargs}
            # Never with values: the largest RegNet, which cannot do without, takes gigabytes.
            with contextlib.suppress(BadInput), torch.device("meta"):
                if _shapes(rebuild(record)) == _shapes(model):
                    return record
    return None


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
    ours, theirs = _shapes(model), _shapes(other)
    differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return f"{len(differing)} weights differ, such as {differing[0]}" if differing else None


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of the weights, without those that `Learn` added."""
    wiring = find_wiring(model)
    added = {} if wiring is None else wiring.parameters
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if name not in added}


def _quietly_built(record: dict[str, Any]) -> nn.Module:
    """Without values where the constructor can do without, and without a trace in the random state."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return rebuild(record)
        except Exception:  # a constructor that reads values: what is wrong itself is raised below
            return rebuild(record)
