"""save and load: weights as safetensors, everything else as JSON that can be read and checked. No pickle.

    folder/model.safetensors    the weights
    folder/unskip.json          how to build the model, its wiring, versions, digests of its source, checksums

A wiring rests on the source of the functions it rewrote. Loading checks the checksum of the weights and the digest of
every such function before it builds or changes anything.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unskip import spec
from unskip.anatomy._guard import PATCH, refuse_wrapped, wiring_in
from unskip.anatomy._locate import Hop, Place
from unskip.anatomy.sites import Site, Survey, Unknown
from unskip.errors import BadInput, LoadError, UnskipError
from unskip.wiring._bind import Patch, original_class, patched
from unskip.wiring._select import Assignment
from unskip.wiring._wiring import Wiring
from unskip.wiring.shortcuts import from_dict

FORMAT = 1
_WEIGHTS, _RECORD = "model.safetensors", "unskip.json"
_LIBRARIES = ("torch", "timm", "torchvision", "transformers", "diffusers")

Builder = str | Mapping[str, Any] | None


def save(model: nn.Module, folder: str | os.PathLike[str], builder: Builder = None) -> Path:
    """Writes a model and its wiring into a folder.

    `builder` says how to build the model again: a spec such as "timm:vit_tiny_patch16_224" or "file.py:function", or a
    mapping {"spec": ..., "kwargs": {...}}. Without one, a transformers or diffusers model is recorded by its
    configuration and a timm model by its name where that builds the same shapes; any other needs `model=` when it is
    loaded.
    """
    from safetensors.torch import save_model

    if wiring_in(model) is None:
        refuse_wrapped(model)
    record = {
        "format": FORMAT,
        "class": _class(model),
        "builder": _given(model, builder) if builder is not None else _inferred(model),
        "wiring": _wiring_record(wiring_in(model)),
        "versions": _versions(),
    }
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    aside = target / (_WEIGHTS + ".new")
    save_model(model, str(aside))
    record["sha256"] = {_WEIGHTS: _sha256(aside)}
    text = target / (_RECORD + ".new")
    text.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    # The record is renamed last: a save that broke off leaves the old record, whose checksum no longer fits.
    aside.replace(target / _WEIGHTS)
    text.replace(target / _RECORD)
    return target


def load(folder: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Reads a model that `save` wrote: builds it where the folder says how, or fills the freshly built `model`.

    Raises LoadError, and leaves a given model as it was, for a folder that is damaged, from a newer version, or rests
    on source that has changed. `Wiring.of(model)` gives the wiring back.
    """
    source = Path(folder)
    record = _read(source)
    survey, plan, step = _wiring_of(record, source)
    if model is None:
        model = _build(record, source)
    elif wiring_in(model) is not None:
        raise BadInput(f"{_class(model)} is rewired already. Undo its wiring, or pass a freshly built model.")
    if _class(model) != record["class"]:
        raise LoadError(f"{source}: holds a {record['class']}, but the model is a {_class(model)}.")
    wiring = Wiring(model, survey) if survey is not None else None
    try:
        if wiring is not None:
            _check_paths(wiring, source)
            wiring._follow(plan, step)
        _fill(model, source)
    except BaseException:
        if wiring is not None:
            wiring.undo()
        raise
    return model


def _read(folder: Path) -> dict[str, Any]:
    """The record, once it and the weights are known to be whole."""
    path, weights = folder / _RECORD, folder / _WEIGHTS
    if not path.is_file() or not weights.is_file():
        missing = _RECORD if not path.is_file() else _WEIGHTS
        raise LoadError(f"{folder}: no {missing}. Give a folder that unskip.save wrote.")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        version = record["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{path}: damaged, it does not read as a record of unskip ({error}).") from error
    if version != FORMAT:
        raise LoadError(f"{path}: written in format {version}; this unskip reads format {FORMAT}. Update unskip.")
    wanted = {"class", "builder", "wiring", "versions", "sha256"} - set(record)
    if wanted:
        raise LoadError(f"{path}: damaged, {', '.join(sorted(wanted))} missing.")
    if _sha256(weights) != record["sha256"].get(_WEIGHTS):
        raise LoadError(f"{weights}: damaged, its checksum is not the recorded one.")
    return record  # type: ignore[no-any-return]


def _fill(model: nn.Module, folder: Path) -> None:
    """Loads the weights, names and shapes compared first: nothing is half loaded."""
    from safetensors import safe_open
    from safetensors.torch import load_model

    with safe_open(str(folder / _WEIGHTS), framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    state = model.state_dict()
    wrong = [name for name, shape in shapes.items() if name not in state or tuple(state[name].shape) != shape]
    # Tied weights are stored once, under one of their names.
    stored = {state[name].data_ptr() for name in shapes if name in state}
    wrong += [
        name for name, value in state.items() if name not in shapes and value.data_ptr() not in stored and value.numel()
    ]
    if wrong:
        raise LoadError(
            f"{folder}: the model does not fit the weights: {', '.join(wrong[:4])}. Build it as when it was saved."
        )
    load_model(model, str(folder / _WEIGHTS))


# --- Builders ---------------------------------------------------------------------------------------------------------


def _given(model: nn.Module, builder: str | Mapping[str, Any]) -> dict[str, Any]:
    record = {"spec": builder, "kwargs": {}} if isinstance(builder, str) else {"kwargs": {}, **builder}
    if set(record) != {"spec", "kwargs"}:
        raise BadInput("builder is a spec such as 'timm:NAME', or a mapping with 'spec' and 'kwargs'")
    wrong = _difference(model, record)
    if wrong:
        raise BadInput(f"builder {record['spec']} does not build this model: {wrong}")
    return record


def _inferred(model: nn.Module) -> dict[str, Any] | None:
    config: Any = getattr(model, "config", None)
    library = type(model).__module__.partition(".")[0]
    if library == "transformers" and hasattr(config, "to_dict"):
        return {"transformers": type(model).__name__, "config": json.loads(config.to_json_string(use_diff=False))}
    if library == "diffusers" and config is not None:
        return {
            "diffusers": type(model).__name__,
            "config": {k: v for k, v in dict(config).items() if not k.startswith("_")},
        }
    name = getattr(getattr(model, "pretrained_cfg", None), "architecture", None) or _get(model, "architecture")
    if library == "timm" and name:
        record = {"spec": f"timm:{name}", "kwargs": {}}
        return None if _difference(model, record) else record
    return None


def _get(model: nn.Module, key: str) -> Any:
    config = getattr(model, "pretrained_cfg", None)
    return config.get(key) if isinstance(config, dict) else None


def _difference(model: nn.Module, record: dict[str, Any]) -> str | None:
    """How a model built from the record differs in class or shapes."""
    try:
        with torch.device("meta"):
            other = spec.build(record["spec"], **record["kwargs"])
    except (UnskipError, TypeError) as error:
        return str(error)
    if _class(other) != _class(model):
        return f"it gives a {_class(other)}, not a {_class(model)}"
    added = set(wiring_in(model).parameters) if wiring_in(model) is not None else set()
    ours = {k: tuple(v.shape) for k, v in model.state_dict().items() if k not in added}
    theirs = {k: tuple(v.shape) for k, v in other.state_dict().items()}
    differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return f"{len(differing)} weights differ, such as {differing[0]}" if differing else None


def _build(record: dict[str, Any], folder: Path) -> nn.Module:
    builder = record["builder"]
    if builder is None:
        raise LoadError(
            f"{folder}: it is not recorded how to build the {record['class']}. Build it as when it was saved and pass "
            "model=, or save it with builder=."
        )
    try:
        if "spec" in builder:
            return spec.build(builder["spec"], **builder["kwargs"])
        return _from_config(builder)
    except (UnskipError, ImportError, AttributeError, TypeError, ValueError) as error:
        raise LoadError(f"{folder}: building the {record['class']} failed: {error}") from error


def _from_config(builder: dict[str, Any]) -> nn.Module:
    if "transformers" in builder:
        import transformers

        cls: Any = getattr(transformers, builder["transformers"])
        return cls(cls.config_class.from_dict(builder["config"]))  # type: ignore[no-any-return]
    import diffusers

    cls = getattr(diffusers, builder["diffusers"])
    return cls.from_config(builder["config"])  # type: ignore[no-any-return]


# --- Wirings ----------------------------------------------------------------------------------------------------------


def _wiring_record(wiring: Wiring | None) -> dict[str, Any] | None:
    if wiring is None:
        return None
    return {
        "sites": [asdict(site) for site in wiring.sites],
        "unknown": [asdict(unknown) for unknown in wiring.survey.unknown],
        "notes": list(wiring.survey.notes),
        "plan": [
            {"rule": a.rule.to_dict(), "where": a.where, "sites": [site.index for site in a.sites]}
            for a in wiring._plan
        ],
        "step": wiring.at_step,
        "alphas": wiring.alphas,
        "betas": wiring.betas,
    }


def _wiring_of(record: dict[str, Any], folder: Path) -> tuple[Survey | None, tuple[Assignment, ...], int]:
    data = record["wiring"]
    if data is None:
        return None, (), 0
    try:
        sites = tuple(_site(site) for site in data["sites"])
        survey = Survey(sites, tuple(Unknown(**unknown) for unknown in data["unknown"]), tuple(data["notes"]))
        plan = tuple(
            Assignment(from_dict(a["rule"]), tuple(sites[i] for i in a["sites"]), a["where"]) for a in data["plan"]
        )
        return survey, plan, int(data["step"])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise LoadError(f"{folder / _RECORD}: damaged, its wiring does not read ({error}).") from error


def _site(data: dict[str, Any]) -> Site:
    places = tuple(
        Place(tuple(Hop(**{**hop, "position": tuple(hop["position"])}) for hop in p.pop("hops")), **p)
        for p in data["places"]
    )
    return Site(**{**data, "branch": tuple(data["branch"]), "places": places})


def _check_paths(wiring: Wiring, folder: Path) -> None:
    """Every rewritten class must have the source it had."""
    slots: dict[str, list[tuple[Place, ...]]] = {}
    for site in wiring.sites:
        if site.problem is None:
            slots.setdefault(site.path, []).append(site.places)
    for path, places in slots.items():
        try:
            module = wiring.model.get_submodule(path)
            if hasattr(type(module), PATCH):
                raise LoadError(f"{path} is rewired already")
            base: Any = type(module)
            patched(base, Patch(tuple(places)))
        except (AttributeError, UnskipError) as error:
            raise LoadError(f"{folder}: its wiring does not fit this model: {error}") from error


def _versions() -> dict[str, str]:
    found = {"unskip": importlib.metadata.version("unskip")}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _class(model: nn.Module) -> str:
    cls = original_class(model)
    return f"{cls.__module__}.{cls.__qualname__}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
