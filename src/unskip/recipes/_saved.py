"""save and load of whole folders: what `unskip.wiring` writes, and what a hub and other libraries look for.

    folder/model.safetensors    the weights
    folder/unskip.json          builder, structure, wiring, preprocessing, recipe and results
    folder/config.json          of a timm or transformers model: as its own library writes and reads it
    folder/README.md            the model card

`huggingface_hub.upload_folder` uploads such a folder as it is, and `load("hf-hub:OWNER/NAME")` reads it from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from unskip import spec
from unskip._extras import need
from unskip.data import known_preprocess
from unskip.errors import BadInput, LoadError
from unskip.evals import image_channels
from unskip.recipes._card import MARK, card
from unskip.recipes._open import is_run, open_run
from unskip.wiring import Builder, about
from unskip.wiring import load as load_saved
from unskip.wiring import save as save_model

_HUB = "hf-hub:"
# Of timm's pretrained_cfg, what belongs to the architecture: not the place and licence of other weights.
_KEPT = ("pool_size", "crop_mode", "fixed_input_size", "first_conv", "classifier")


def save(model: nn.Module, folder: str | os.PathLike[str], builder: Builder = None) -> Path:
    """Writes a model, its wiring and its preprocessing into a folder, with a model card.

    `builder` says how to build the model again: a spec such as "timm:vit_tiny_patch16_224" or "file.py:function", or a
    mapping {"spec": ..., "kwargs": {...}}. Without one, a transformers or diffusers model is recorded by its
    configuration and a timm or torchvision model by its name and arguments, where they build the same structure, and
    where they do not a warning says so; any other needs `model=` when it is loaded. The card of a model that comes from
    a run states its recipe and results.
    """
    target = Path(folder)
    if is_run(target):
        raise BadInput(f"{target} is the folder of a run; save the model into another one")
    channels = image_channels(model)
    made = None if channels is None else known_preprocess(model, channels)
    kept = {**about(model), **({} if made is None else {"preprocess": made.to_dict()})}
    again = (target / "unskip.json").is_file()
    save_model(model, target, builder, kept)
    record = json.loads((target / "unskip.json").read_text(encoding="utf-8"))
    config = _config(model, record)
    if config is not None:
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    elif again:
        (target / "config.json").unlink(missing_ok=True)  # of the model that the folder held before
    readme = target / "README.md"
    if not readme.exists() or MARK in readme.read_text(encoding="utf-8", errors="replace"):
        parameters = sum(each.numel() for each in model.parameters())
        readme.write_text(card(target.resolve().name, record, parameters), encoding="utf-8")
    return target


def load(folder: str | os.PathLike[str], model: nn.Module | None = None, **options: Any) -> nn.Module:
    """The model in a folder of `unskip.save`, or the whole model of a run, with its weights and its wiring.

    "hf-hub:OWNER/NAME", with @REVISION where another than the newest is wanted, is such a folder on the hub. See
    `unskip.wiring.load` for folders of `save` and their options. Of a run it is the last whole checkpoint, with EMA
    weights where the run keeps them, on the CPU; its data set is not needed.
    """
    if str(folder).startswith(_HUB):
        folder = _fetched(str(folder))
    if is_run(folder):
        if model is not None:
            raise BadInput(f"{folder} is a run, which builds its own model; leave model= out")
        return open_run(Path(folder), device="cpu", **options).model
    return load_saved(folder, model, **options)


def _fetched(name: str) -> Path:
    """The folder of a hub's repository in the local cache: data files alone, no code."""
    hub = need("huggingface_hub")
    repository, _, revision = name.removeprefix(_HUB).partition("@")
    try:
        with spec.hub(needed=True):
            files = ["*.json", "*.safetensors"]
            return Path(hub.snapshot_download(repository, revision=revision or None, allow_patterns=files))
    except (BadInput, OSError, ValueError) as error:
        line = str(error).strip().partition("\n")[0]
        raise LoadError(f"{name}: {line}. Check OWNER/NAME and the connection, or give a local folder.") from error


def _config(model: Any, record: Mapping[str, Any]) -> dict[str, Any] | None:
    """config.json of the model's own library; None where it has none, or builds another model."""
    builder = record["builder"] or {}
    if "transformers" in builder:
        return {**builder["config"], "architectures": [builder["transformers"]]}
    library, _, name = builder.get("spec", "").partition(":")
    described = getattr(model, "pretrained_cfg", None)
    if library != "timm" or ":" in name or not isinstance(described, Mapping):
        return None
    config = {key: described[key] for key in _KEPT if described.get(key) is not None}
    made = record.get("about", {}).get("preprocess")
    if made is not None:
        side = made["size"] or described["input_size"][-1]
        config |= {"mean": made["mean"], "std": made["std"], "input_size": [len(made["mean"]), side, side]}
        config |= {"interpolation": made["interpolation"], "crop_pct": made["crop"]}
    if image_channels(model) != 3:
        config.pop("first_conv", None)  # timm would convert its weights as if they were of three channels
    return {
        "architecture": name.partition(".")[0],
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "pretrained_cfg": {**config, "num_classes": model.num_classes},
        "model_args": builder["kwargs"],
    }
