"""save and load: weights as safetensors, everything else as JSON. No pickle.

    folder/model.safetensors    the weights
    folder/unskip.json          builder, structure and wiring of the model, versions, digests of the rewritten source,
                                checksums of the weights

Loading checks both files, the structure of the model and the source of its classes before it changes anything.
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


class Mismatch(LoadError):
    """The model is not the saved one; `difference` says how, without advice for callers of `load`."""

    def __init__(self, folder: Path, difference: str, advice: str = "") -> None:
        self.difference = difference
        super().__init__(f"{folder}: {difference}.{advice}")


def save(
    model: nn.Module, folder: str | os.PathLike[str], builder: Builder = None, kept: dict[str, Any] | None = None
) -> Path:
    """Writes a model and its wiring into a folder.

    `builder` is how to rebuild the model: a spec such as "timm:vit_tiny_patch16_224" or "file.py:function", or a
    mapping {"spec": ..., "kwargs": {...}}. Without one, a transformers or diffusers model is recorded by its
    configuration and a timm or torchvision model by its name and arguments, with a warning if these do not build the
    same structure; loading any other model needs `model=`. `kept` is plain data to store, `about(model)` by default.
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
    weights, text = target / (WEIGHTS + ".new"), target / (RECORD + ".new")
    save_model(model, str(weights), metadata={"format": "pt"})  # transformers requires the format
    _record.write(text, {**record, "sha256": {WEIGHTS: sha256(weights)}})
    # The record is renamed last: an interrupted save leaves the old record, whose checksum no longer matches.
    weights.replace(target / WEIGHTS)
    text.replace(target / RECORD)
    return target


def save_record(model: nn.Module, folder: str | os.PathLike[str], pretrained: bool) -> bool:
    """Writes unskip.json beside weights that another tool wrote, so that `load` accepts the folder.

    `pretrained` means that save_pretrained of transformers wrote them. Returns False if no model*.safetensors is found.
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
    """The record of a model without the checksums of its weights."""
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
    """Loads a model that `save` wrote: builds it from its recorded builder, or fills the freshly built `model`.

    The dtypes are the saved ones; train or eval mode is left to the caller. Raises LoadError, and leaves a given model
    as it was, if the folder is damaged or from another format, or if the structure of the model differs. Python files
    named in the folder run only with `trust`. `strict=False` accepts differences in module settings and computed
    buffers, as between versions of a library; rewired source must be the same. `Wiring.of(model)` returns the wiring.
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
        raise BadInput(f"{class_name(model)} is already rewired. Undo its wiring, or pass a freshly built model.")
    elif any(value.is_meta for value in _values(model)):
        raise BadInput(
            "the model is on the meta device, without values. Allocate it first: model.to_empty(device='cpu')"
        )
    if class_name(model) != record["class"]:
        raise Mismatch(source, f"contains a {record['class']}, but the model is a {class_name(model)}")
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
            _cast(model, tensors, record, before)  # for the learned weights, which are new
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
            f"{folder}: no builder is recorded for the {record['class']}. Build it as when it was saved and pass "
            "model=, or save it with builder=."
        )
    code = _builders.foreign_code(record["builder"])
    if code is not None and not trust:
        raise LoadError(
            f"{folder}: building its model would run {code}. Pass trust=True (--trust) if you trust it, or build the "
            "model yourself and pass model=."
        )
    reads = _builders.reads_files(record["builder"])
    if reads and not trust:
        raise LoadError(
            f"{folder}: its model is built with {', '.join(reads)}, which reads or downloads other files. Pass "
            "trust=True (--trust) if you trust them, or build the model yourself and pass model=."
        )
    try:
        return _builders.rebuild(record["builder"])
    except MemoryError:
        raise
    except Exception as error:  # any error of the library about its arguments
        raise LoadError(f"{folder}: building the {record['class']} failed: {error}. Fix it, or pass model=.") from error


def _check_structure(model: nn.Module, record: dict[str, Any], folder: Path) -> None:
    """Compares module settings and computed buffers, because equal shapes do not imply equal models."""
    built = _structure.structure(model)
    try:
        wrong = _structure.difference(_structure.unpack(record["structure"]), built)
        wrong = wrong or _structure.buffer_difference(record["buffers"], model)
    except MALFORMED as error:
        raise LoadError(f"{folder / RECORD}: damaged, its structure or buffers are invalid ({error}).") from error
    if wrong:
        now = versions_of(_LIBRARIES)
        changed = [f"{name} {version}" for name, version in record["versions"].items() if now.get(name) != version]
        saved_with = f" It was saved with {', '.join(changed)}." if changed else ""
        raise Mismatch(
            folder,
            f"the model differs from the saved one: {wrong}",
            f"{saved_with} Build it as when it was saved, and pass model=; or pass strict=False if the difference is "
            "harmless.",
        )


# --- Weights ----------------------------------------------------------------------------------------------------------


def _weights(folder: Path, name: str = WEIGHTS) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / name)
    except (SafetensorError, OSError, *MALFORMED) as error:
        raise LoadError(f"{folder / name}: damaged, it is not a safetensors file ({error}).") from error


def _pretrained(model: nn.Module, folder: Path, record: dict[str, Any]) -> dict[str, Tensor]:
    """The weights that save_pretrained wrote, under the model's own names, and the learned shortcut weights."""
    cls: Any = type(model)
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        raise LoadError(f"{adapter}: from_pretrained would load an adapter, which is not in the record. Remove it.")
    try:
        # Use the configuration of the record, which was checked: a config.json may name code.
        options = {"config": copy.deepcopy(model.config), "use_safetensors": True, "local_files_only": True}
        state = cls.from_pretrained(folder, **options).state_dict()
    except Exception as error:  # any error of the library about the files
        raise LoadError(f"{folder}: {cls.__name__}.from_pretrained cannot read it ({error}).") from error
    first_name = {value.data_ptr(): name for name, value in reversed(state.items())}  # of a tied weight
    tensors = {name: value for name, value in state.items() if first_name[value.data_ptr()] == name}
    for file in record["sha256"]:
        weights = _weights(folder, file).items()
        tensors |= {name: value for name, value in weights if name.rpartition(".")[2].startswith("unskip_")}
    return tensors


def _cast(
    model: nn.Module, tensors: dict[str, Tensor], record: dict[str, Any], before: list[tuple[Tensor, Tensor]]
) -> None:
    """Casts the model to the saved dtypes. Changed tensors are added to `before` with their old data."""
    state = model.state_dict(keep_vars=True)
    computed = _structure.computed(model)
    dtypes = {state[name].data_ptr(): value.dtype for name, value in tensors.items() if name in state}
    wanted = [(value, dtypes.get(value.data_ptr(), value.dtype)) for value in state.values()]
    try:
        names = {name: _structure.dtype_of(facts["dtype"]) for name, facts in record["buffers"].items()}
    except MALFORMED as error:
        raise LoadError(f"{RECORD}: damaged, its buffers are invalid ({error}).") from error
    wanted += [(value, names.get(name, value.dtype)) for name, value in computed.items()]
    cast: dict[tuple[Any, ...], Tensor] = {}  # tied weights keep sharing memory
    for value, dtype in wanted:
        if value.dtype != dtype:
            memory = (value.data_ptr(), value.shape, value.stride(), dtype)
            data = cast.get(memory)
            before.append((value, value.data))
            cast[memory] = value.data = value.data.to(dtype) if data is None else data


def _fill(model: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    """Copies the weights after a check of names and shapes, so that nothing is partly loaded."""
    state = model.state_dict()
    wrong = [name for name, value in tensors.items() if name not in state or state[name].shape != value.shape]
    # Tied weights are stored once, under one of their names.
    stored = Counter(state[name].data_ptr() for name in tensors if name in state and state[name].numel())
    wrong += [
        name
        for name, value in state.items()
        if name not in tensors and value.numel() and value.data_ptr() not in stored
    ]
    wrong += [name for name in tensors if name in state and stored[state[name].data_ptr()] > 1]  # tied only in `model`
    if wrong:
        raise Mismatch(
            folder, f"the model does not fit the weights: {', '.join(wrong[:4])}", " Build it as when it was saved."
        )
    model.load_state_dict(tensors, strict=False)


def _refuse_odd_state(model: nn.Module) -> None:
    if any(value.is_meta for value in _values(model)):
        raise BadInput("the model is on the meta device and has no values to save")
    odd = [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]
    if odd:
        raise BadInput(f"{odd[0]} of the state_dict is not a tensor (get_extra_state); safetensors cannot store it")


def _values(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
