"""save and load: weights as safetensors, everything else as JSON that can be read and checked. No pickle.

    folder/model.safetensors    the weights
    folder/unskip.json          how to build the model, what it is made of, its wiring, versions, digests of its source,
                                checksums of the weights and of itself

A model is more than its shapes. Loading checks the two files, then the structure of the model and the source of its
classes, and only then changes anything.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unskip._provenance import sha256, versions_of
from unskip.anatomy import refuse_wrapped
from unskip.errors import BadInput, LoadError
from unskip.wiring import _builders, _record, _structure
from unskip.wiring._about import about
from unskip.wiring._builders import Builder
from unskip.wiring._record import MALFORMED, PRETRAINED, RECORD, WEIGHTS
from unskip.wiring._restore import put_wiring
from unskip.wiring._structure import class_name
from unskip.wiring._wiring import Wiring, find_wiring

_LIBRARIES = ("unskip", "torch", "timm", "torchvision", "transformers", "diffusers")


def save(
    model: nn.Module, folder: str | os.PathLike[str], builder: Builder = None, kept: dict[str, Any] | None = None
) -> Path:
    """Writes a model and its wiring into a folder.

    `builder` says how to build the model again: a spec such as "timm:vit_tiny_patch16_224" or "file.py:function", or a
    mapping {"spec": ..., "kwargs": {...}}. Without one, a transformers or diffusers model is recorded by its
    configuration and a timm or torchvision model by its name and arguments, where they build the same structure, and
    where they do not a warning says so; any other needs `model=` when it is loaded. `kept` is plain data that is kept
    with it, `about(model)` by default.
    """
    from safetensors.torch import save_model

    wiring = find_wiring(model)
    if wiring is None:
        refuse_wrapped(model)
    else:
        wiring.refuse_replaced()
    _refuse_odd_state(model)
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise BadInput(f"{target} is a file. Give a folder, or a name for a new one.")
    record = _describe(model, builder)
    if kept is not None:
        record["about"] = kept
    target.mkdir(parents=True, exist_ok=True)
    aside, text = target / (WEIGHTS + ".new"), target / (RECORD + ".new")
    save_model(model, str(aside), metadata={"format": "pt"})  # which transformers asks for
    _record.write(text, {**record, "sha256": {WEIGHTS: sha256(aside)}})
    # The record is renamed last: a save that broke off leaves the old record, whose checksum no longer fits.
    aside.replace(target / WEIGHTS)
    text.replace(target / RECORD)
    return target


def save_record(model: nn.Module, folder: str | os.PathLike[str], pretrained: bool) -> bool:
    """Writes unskip.json beside the weights that another tool has just written, so that `load` takes the folder.

    `pretrained` says that save_pretrained of transformers wrote them. False where the folder has no whole weights.
    """
    target = Path(folder)
    files = sorted(target.glob("model*.safetensors"))
    if files:
        record = _describe(model, None) | ({"weights": PRETRAINED} if pretrained else {})
        text = target / (RECORD + ".new")
        _record.write(text, {**record, "sha256": {file.name: sha256(file) for file in files}})
        text.replace(target / RECORD)
    return bool(files)


def _describe(model: nn.Module, builder: Builder) -> dict[str, Any]:
    """The record of a model, all but the checksums of its weights."""
    wiring = find_wiring(model)
    return {
        "format": _record.FORMAT,
        "class": class_name(model),
        "builder": _builders.record_of(model, builder),
        "wiring": None if wiring is None else _record.wiring_record(wiring),
        "structure": _structure.pack(_structure.structure(model)),
        "buffers": _structure.buffers(model),
        "about": about(model),
        "versions": versions_of(_LIBRARIES),
    }


def load(
    folder: str | os.PathLike[str], model: nn.Module | None = None, trust: bool = False, *, strict: bool = True
) -> nn.Module:
    """Reads a model that `save` wrote: builds it where the folder says how, or fills the freshly built `model`.

    The dtypes are those that were saved; train or eval mode is left to the caller. Raises LoadError, and leaves a given
    model as it was, for a folder that is damaged or from another version, and for a model of another structure. No
    Python file that the folder names is run unless `trust` is set. `strict=False` goes on where settings of modules, or
    the buffers they compute, differ from the saved ones, as they may under another version of a library; the source of
    what the wiring rewrote has to be the same. `Wiring.of(model)` gives the wiring back.
    """
    source = Path(folder)
    record = _record.read(source)
    data = record["wiring"]
    recorded = None if data is None else _record.wiring_of(data, source / RECORD, trust)
    pretrained = record.get("weights") == PRETRAINED
    tensors = {} if pretrained else _weights(source)
    if model is None:
        model = _built(record, source, trust)
    elif find_wiring(model) is not None:
        raise BadInput(f"{class_name(model)} is rewired already. Undo its wiring, or pass a freshly built model.")
    elif any(value.is_meta for value in _values(model)):
        raise BadInput("the model is on the meta device, without values. Give it some: model.to_empty(device='cpu')")
    if class_name(model) != record["class"]:
        raise LoadError(f"{source}: holds a {record['class']}, but the model is a {class_name(model)}.")
    if strict:
        _check_structure(model, record, source)
    if pretrained:
        tensors = _pretrained(model, source, record)
    before: list[tuple[Tensor, Tensor]] = []
    wiring: Wiring | None = None
    try:
        _cast(model, tensors, record, before)
        if recorded is not None:
            wiring = put_wiring(model, *recorded, data, source)
            _cast(model, tensors, record, before)  # the learned weights, which are new
        _fill(model, tensors, source)
        about(model).update(record.get("about", {}))
    except BaseException:
        if wiring is not None:
            wiring.undo()
        for value, data in reversed(before):
            value.data = data
        raise
    return model


# --- Checks -----------------------------------------------------------------------------------------------------------


def _built(record: dict[str, Any], folder: Path, trust: bool) -> nn.Module:
    if record["builder"] is None:
        raise LoadError(
            f"{folder}: it is not recorded how to build the {record['class']}. Build it as when it was saved and pass "
            "model=, or save it with builder=."
        )
    code = _builders.foreign_code(record["builder"])
    if code is not None and not trust:
        raise LoadError(
            f"{folder}: its model is built by {code}, which would be run. Pass trust=True (--trust) if you know what "
            "it does, or build the model yourself and pass model=."
        )
    reads = _builders.reads_files(record["builder"])
    if reads and not trust:
        raise LoadError(
            f"{folder}: its model is built with {', '.join(reads)}, which reads or fetches other files. Pass "
            "trust=True (--trust) if you know them, or build the model yourself and pass model=."
        )
    try:
        return _builders.rebuild(record["builder"])
    except MemoryError:
        raise
    except Exception as error:  # of the library, about arguments that it cannot use
        raise LoadError(
            f"{folder}: building the {record['class']} failed: {error}. Put that right, or pass model=."
        ) from error


def _check_structure(model: nn.Module, record: dict[str, Any], folder: Path) -> None:
    """Equal shapes do not make equal models: settings of modules and computed buffers are compared."""
    built = _structure.structure(model)
    try:
        wrong = _structure.difference(_structure.unpack(record["structure"]), built)
        wrong = wrong or _structure.buffer_difference(record["buffers"], model)
    except MALFORMED as error:
        raise LoadError(f"{folder / RECORD}: damaged, its structure or buffers do not read ({error}).") from error
    if wrong:
        now = versions_of(_LIBRARIES)
        changed = [f"{name} {was}" for name, was in record["versions"].items() if now.get(name) != was]
        under = f" It was saved under {', '.join(changed)}." if changed else ""
        raise LoadError(
            f"{folder}: the model is not the one that was saved: {wrong}.{under} Build it as when it was saved, and "
            "pass model=; or pass strict=False if the difference is harmless."
        )


# --- Weights ----------------------------------------------------------------------------------------------------------


def _weights(folder: Path, name: str = WEIGHTS) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / name)
    except (SafetensorError, OSError, *MALFORMED) as error:
        raise LoadError(f"{folder / name}: damaged, it does not read as safetensors ({error}).") from error


def _pretrained(model: nn.Module, folder: Path, record: dict[str, Any]) -> dict[str, Tensor]:
    """The weights that save_pretrained wrote, under the names that the model has for them, and the learned ones."""
    cls: Any = type(model)
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        raise LoadError(f"{adapter}: from_pretrained would load an adapter that is no part of the record. Remove it.")
    try:
        # By the configuration of the record, which was checked: a config.json may name code.
        options = {"config": copy.deepcopy(model.config), "use_safetensors": True, "local_files_only": True}
        state = cls.from_pretrained(folder, **options).state_dict()
    except Exception as error:  # of the library, about files that it cannot read
        raise LoadError(f"{folder}: {cls.__name__}.from_pretrained cannot read it ({error}).") from error
    once = {value.data_ptr(): name for name, value in reversed(state.items())}  # a tied weight under its first name
    learned = [_weights(folder, file) for file in record["sha256"]]
    return {name: value for name, value in state.items() if once[value.data_ptr()] == name} | {
        name: value for each in learned for name, value in each.items() if name.rpartition(".")[2].startswith("unskip_")
    }


def _cast(
    model: nn.Module, tensors: dict[str, Tensor], record: dict[str, Any], before: list[tuple[Tensor, Tensor]]
) -> None:
    """Gives the model the saved dtypes. What it changes is noted in `before`, with the old data."""
    state = model.state_dict(keep_vars=True)
    computed = _structure.computed(model)
    dtypes = {state[name].data_ptr(): value.dtype for name, value in tensors.items() if name in state}
    wanted = [(value, dtypes.get(value.data_ptr(), value.dtype)) for value in state.values()]
    try:
        names = {name: _structure.dtype_of(facts["dtype"]) for name, facts in record["buffers"].items()}
    except MALFORMED as error:
        raise LoadError(f"{RECORD}: damaged, its buffers do not read ({error}).") from error
    wanted += [(value, names.get(name, value.dtype)) for name, value in computed.items()]
    made: dict[tuple[Any, ...], Tensor] = {}
    for value, dtype in wanted:
        if value.dtype != dtype:
            # Tied weights stay one memory.
            memory = (value.data_ptr(), value.shape, value.stride(), dtype)
            data = made.get(memory)
            before.append((value, value.data))
            made[memory] = value.data = value.data.to(dtype) if data is None else data


def _fill(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Copies the weights, names and shapes compared first: nothing is half loaded."""
    state = model.state_dict()
    wrong = [name for name, value in tensors.items() if name not in state or state[name].shape != value.shape]
    # Tied weights are stored once, under one of their names.
    stored = Counter(state[name].data_ptr() for name in tensors if name in state and state[name].numel())
    wrong += [
        name
        for name, value in state.items()
        if name not in tensors and value.numel() and value.data_ptr() not in stored
    ]
    wrong += [name for name in tensors if name in state and stored[state[name].data_ptr()] > 1]  # tied only here
    if wrong:
        raise LoadError(
            f"{folder}: the model does not fit the weights: {', '.join(wrong[:4])}. Build it as when it was saved."
        )
    model.load_state_dict(tensors, strict=False)


def _refuse_odd_state(model: nn.Module) -> None:
    if any(value.is_meta for value in _values(model)):
        raise BadInput("the model is on the meta device: there are no values to save")
    odd = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if odd:
        raise BadInput(f"{odd[0]} of the state_dict is no tensor (get_extra_state); safetensors cannot hold it")


def _values(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
