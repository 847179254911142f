"""save and load: the files of `unskip.wiring`, and those that the hub and other libraries expect.

    folder/model.safetensors    the weights
    folder/unskip.json          builder, structure, wiring, preprocessing, recipe and results
    folder/config.json          for a timm or transformers model, in the format of its library
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
from unskip._words import brief
from unskip.data import known_preprocess
from unskip.errors import BadInput, LoadError
from unskip.evals import image_channels
from unskip.recipes._card import MARK, card
from unskip.recipes._open import is_run, open_run
from unskip.wiring import Builder, about
from unskip.wiring import load as load_saved
from unskip.wiring import save as save_model

_HUB = "hf-hub:"
# Keys of timm's pretrained_cfg about the architecture, without source and licence of timm's weights.
_KEPT = ("pool_size", "crop_mode", "fixed_input_size", "first_conv", "classifier")


def save(model: nn.Module, folder: str | os.PathLike[str], builder: Builder = None) -> Path:
    """Writes a model, its wiring and its preprocessing into a folder, with a model card.

    `builder` describes how to build the model again: a spec such as "timm:vit_tiny_patch16_224" or "file.py:function",
    or a mapping {"spec": ..., "kwargs": {...}}. Without one, a transformers or diffusers model is recorded by its
    config and a timm or torchvision model by its name and arguments, with a warning if these build another structure;
    any other model needs `model=` when it is loaded. The card of a model from a run states its recipe and results.
    """
    target = Path(folder)
    if is_run(target):
        raise BadInput(f"{target} is the folder of a run; choose another folder")
    channels = image_channels(model)
    preprocess = None if channels is None else known_preprocess(model, channels)
    facts = {**about(model), **({} if preprocess is None else {"preprocess": preprocess.to_dict()})}
    overwrites = (target / "unskip.json").is_file()
    save_model(model, target, builder, facts)
    record = json.loads((target / "unskip.json").read_text(encoding="utf-8"))
    config = _config(model, record)
    if config is not None:
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    elif overwrites:
        (target / "config.json").unlink(missing_ok=True)  # of the overwritten model
    readme = target / "README.md"
    if not readme.exists() or MARK in readme.read_text(encoding="utf-8", errors="replace"):
        parameters = sum(parameter.numel() for parameter in model.parameters())
        readme.write_text(card(target.resolve().name, record, parameters), encoding="utf-8")
    return target


def load(folder: str | os.PathLike[str], model: nn.Module | None = None, **options: Any) -> nn.Module:
    """The model in a folder of `unskip.save`, or the whole model of a run, with its weights and its wiring.

    "hf-hub:OWNER/NAME", or "hf-hub:OWNER/NAME@REVISION", is such a folder on the hub. See `unskip.wiring.load` for
    folders of `save` and their options. A run is loaded from its last intact checkpoint, with EMA weights if it has
    any, on the CPU; its data set is not needed.
    """
    if str(folder).startswith(_HUB):
        folder = _download(str(folder))
    if is_run(folder):
        if model is not None:
            raise BadInput(f"{folder} is a run, which builds its own model; leave model= out")
        return open_run(Path(folder), device="cpu", **options).model
    return load_saved(folder, model, **options)


def _download(name: str) -> Path:
    """The folder of a hub repository in the local cache: only data files, no code."""
    hub = need("huggingface_hub")
    repository, _, revision = name.removeprefix(_HUB).partition("@")
    try:
        with spec.hub(needed=True):
            files = ["*.json", "*.safetensors"]
            return Path(hub.snapshot_download(repository, revision=revision or None, allow_patterns=files))
    except (BadInput, OSError, ValueError) as error:
        reason = brief(error).rstrip(".")
        raise LoadError(f"{name}: {reason}. Check OWNER/NAME and the connection, or give a local folder.") from error


def _config(model: Any, record: Mapping[str, Any]) -> dict[str, Any] | None:
    """config.json of the model's library; None if it has none or would build another model."""
    builder = record["builder"] or {}
    if "transformers" in builder:
        return {**builder["config"], "architectures": [builder["transformers"]]}
    library, _, name = builder.get("spec", "").partition(":")
    timm_config = getattr(model, "pretrained_cfg", None)
    if library != "timm" or ":" in name or not isinstance(timm_config, Mapping):
        return None
    config = {key: timm_config[key] for key in _KEPT if timm_config.get(key) is not None}
    images = record.get("about", {}).get("preprocess")
    if images is not None:
        side = images["size"] or timm_config["input_size"][-1]
        config |= {"mean": images["mean"], "std": images["std"], "input_size": [len(images["mean"]), side, side]}
        config |= {"interpolation": images["interpolation"], "crop_pct": images["crop"]}
    if image_channels(model) != 3:
        config.pop("first_conv", None)  # with it, timm would convert the weights as if they had three channels
    return {
        "architecture": name.partition(".")[0],
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "pretrained_cfg": {**config, "num_classes": model.num_classes},
        "model_args": builder["kwargs"],
    }
