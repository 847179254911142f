"""Builds a model from its name on the command line:

    timm:vit_base_patch16_224    torchvision:vit_b_16    hf:NAME-or-FOLDER    diffusers:FOLDER    file.py:FUNCTION

Any problem with the name or the model raises `BadInput` with a message of one line.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import socket
import sys
import traceback
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from unskip._extras import need
from unskip._words import brief, nearest
from unskip.errors import BadInput, UnskipError

# The forms of a model's name.
FORMS = "timm:NAME, torchvision:NAME, hf:NAME-or-FOLDER, diffusers:FOLDER or file.py:FUNCTION"
# A light build with more parameters than this has only shapes. With values, building and tracing a ViT-B takes seconds
# on two cores, and a ViT-g more than 20 GiB, because a trace keeps every activation.
LARGE = 100_000_000

_LIBRARY_FORMS = ("timm", "torchvision", "hf", "diffusers")
_Maker = Callable[..., nn.Module]  # (name, pretrained, **kwargs)
# Arguments that make a library read or download files.
_FILE_ARGUMENTS = frozenset(
    "cache_dir checkpoint_path gguf_file pretrained pretrained_cfg pretrained_cfg_overlay weights".split()
)


def build(spec: str, pretrained: bool = False, light: bool = False, **kwargs: Any) -> nn.Module:
    """Builds the model of a spec, with random weights unless `pretrained`; `kwargs` go to the function that builds it.

    With `light`, a library's model of more than 100 million parameters stays on the meta device, without values.
    """
    make = _maker(spec)
    if light and not pretrained and make is not _from_file:
        model = _shapes(make, spec, kwargs)
        if model is not None and sum(p.numel() for p in model.parameters()) > LARGE:
            return model
    return _build(make, spec, pretrained, kwargs)


def is_file(spec: str) -> bool:
    """Whether a spec names a function of a Python file, so that building runs the file."""
    return spec.partition(":")[0] not in _LIBRARY_FORMS and spec.rpartition(":")[0].endswith(".py")


def reading(settings: Any, arguments: bool = False) -> Iterator[str]:
    """The settings that make a library read or download files, among arguments, or among arguments inside a config such
    as timm's `model_args`.
    """
    if isinstance(settings, dict):
        for key, value in settings.items():
            if arguments and key in _FILE_ARGUMENTS:
                yield key
            yield from reading(value, arguments or str(key).endswith("args"))
    elif isinstance(settings, list):
        for value in settings:
            yield from reading(value, arguments)


def kernels(settings: Any, named: bool = False) -> list[str]:
    """The hub kernels that settings name, at any depth, as implementations of attention or experts."""
    if isinstance(settings, dict):
        ends = ("_implementation", "_implementation_internal")
        return [k for key, value in settings.items() for k in kernels(value, named or str(key).endswith(ends))]
    if isinstance(settings, list):
        return [kernel for value in settings for kernel in kernels(value, named)]
    return [settings] if named and isinstance(settings, str) and "/" in settings else []


def _shapes(make: _Maker, spec: str, kwargs: dict[str, Any]) -> nn.Module | None:
    """The model without values; None if its constructor needs them."""
    try:
        with torch.device("meta"):
            return _build(make, spec, False, kwargs)
    except BadInput:
        return None


def _build(make: _Maker, spec: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    name = spec if make is _from_file else spec.partition(":")[2]
    try:
        return make(name, pretrained, **kwargs)
    except UnskipError as error:
        raise BadInput(f"{spec}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # raised by a library for an unusable name or config
        raise BadInput(f"{spec}: {type(error).__name__}: {brief(error)}") from error


def _maker(spec: str) -> _Maker:
    makers: dict[str, _Maker] = {
        "timm": _from_timm,
        "torchvision": _from_torchvision,
        "hf": _from_hf,
        "diffusers": _from_diffusers,
    }
    head, colon, rest = spec.partition(":")
    if colon and head in makers:
        if not rest:
            raise BadInput(f"{spec!r} has no model name; write {FORMS}")
        return makers[head]
    if spec.endswith(".py"):
        raise BadInput(f"{spec}: write {spec}:FUNCTION, with a function of the file that returns the model")
    if is_file(spec):
        return _from_file
    if Path(spec).is_dir():
        raise BadInput(f"{spec} is a folder of unknown kind; write {FORMS}")
    raise BadInput(f"{spec!r} is not a model{nearest(head, makers) if colon else _library_of(spec)}; write {FORMS}")


# --- Libraries --------------------------------------------------------------------------------------------------------


def _from_timm(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    timm = need("timm")
    base = name.partition(".")[0]  # the rest is a tag of pretrained weights
    on_hub = name.startswith("hf-hub:")  # name and arguments are on the hub too
    if not on_hub and not timm.is_model(base):
        raise BadInput(f"timm has no model of this name{nearest(base, timm.list_models())}")
    if (width := kwargs.pop("attn_head_dim", None)) is not None:
        kwargs["attn_layer"] = _attention_of(width)
    with hub(needed=pretrained or on_hub):
        return _module(timm.create_model(name, pretrained=pretrained, **kwargs))


def _attention_of(head_dim: int) -> type[nn.Module]:
    """timm's attention with another head width, for which its ViTs have no argument."""
    from timm.layers.attention import Attention

    class WideAttention(Attention):
        def __init__(self, dim: int, **options: Any) -> None:
            super().__init__(dim, attn_head_dim=head_dim, **options)

    return WideAttention


def _from_torchvision(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    models = need("torchvision").models
    if name not in models.list_models():
        raise BadInput(f"torchvision has no model of this name{nearest(name, models.list_models())}")
    options = {"weights": "DEFAULT" if pretrained else None}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None  # the default would be downloaded
    try:
        return _module(models.get_model(name, **options, **kwargs))
    except OSError as error:
        raise BadInput(f"needs the internet: it is not in the cache, and cannot be fetched ({brief(error)})") from error


def _from_hf(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    transformers = need("transformers")
    folder = Path(name).expanduser()
    if folder.is_dir():
        if "_class_name" in _config(folder):
            raise BadInput(f"the config is one of diffusers; write diffusers:{name}")
        name = str(folder)
    elif name.startswith(("/", ".", "~")):
        raise BadInput("there is no such folder")
    options = {"trust_remote_code": False}  # otherwise it may prompt the user
    with hub(needed=not folder.is_dir()):
        settings, _ = transformers.PreTrainedConfig.get_config_dict(name, **kwargs)
        external = [*kernels(settings), *reading(settings)]
        if external:
            raise BadInput(f"its config.json names {external[0]}, which would be downloaded or read; build it yourself")
        if pretrained:
            return _module(transformers.AutoModel.from_pretrained(name, **options, **kwargs))
        config = transformers.AutoConfig.from_pretrained(name, **options, **kwargs)
        # Not the precision of the checkpoint, which not every CPU supports.
        return _module(transformers.AutoModel.from_config(config, dtype=torch.float32, **options))


def _from_diffusers(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    diffusers = need("diffusers")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise BadInput("there is no such folder")
    if (folder / "model_index.json").is_file():
        parts = sorted(path.parent.name for path in folder.glob("*/config.json"))
        choices = " or ".join(f"diffusers:{name.rstrip('/')}/{part}" for part in parts)
        raise BadInput(
            f"the folder is a whole pipeline; name one of its models, {choices or 'a folder with a config.json'}"
        )
    config = _config(folder)
    cls = getattr(diffusers, str(config.get("_class_name")), None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise BadInput(f"its config.json has _class_name {config.get('_class_name')!r}, not a model of diffusers")
    loader: Any = cls
    return _module(loader.from_pretrained(folder, **kwargs) if pretrained else loader.from_config(config, **kwargs))


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput("the folder has no config.json") from None
    except ValueError as error:
        raise BadInput(f"its config.json is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadInput("its config.json is not a mapping")
    return config


@contextlib.contextmanager
def hub(needed: bool) -> Iterator[None]:
    """Uses only the hub's cache if the hub cannot be reached, which avoids a minute of retries and their messages."""
    if not needed or _reaches_hub():
        yield
        return
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except OSError as error:
        raise BadInput("needs the internet: it is not in the cache, and the hub cannot be reached") from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _reaches_hub() -> bool:
    constants: Any = importlib.import_module("huggingface_hub.constants")
    if constants.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():
        return True  # only the proxy can tell
    address = urllib.parse.urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True


# --- Files ------------------------------------------------------------------------------------------------------------


def import_file(path: str | Path) -> ModuleType:
    """Imports a Python file. Raises BadInput with a message of one line if that fails."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise BadInput("there is no such file")
    name, root = _import_name(file)
    with _on_path(root):
        module: ModuleType = _run(file, f"importing {file.name}", lambda: _import(file, name))
    return module


def _from_file(spec: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    path, _, function = spec.rpartition(":")
    module, file = import_file(path), Path(path).expanduser().resolve()
    make = getattr(module, function, None)
    if make is None:
        names = [
            n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise BadInput(f"the file has no {function!r}{nearest(function, names)}{_all(names)}")
    if isinstance(make, nn.Module) or not callable(make):
        raise BadInput(f"{function} is of type {type(make).__name__}; name a function that returns the model")
    with _on_path(_import_name(file)[1]):
        return _module(_run(file, f"{function}()", lambda: make(**kwargs)))


def _import_name(file: Path) -> tuple[str, Path]:
    """The module name of a file, including its packages, and the folder that has to be on the path."""
    parts, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts), folder


def _other_name(file: Path) -> str:
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^0-9a-zA-Z]', '_', file.stem)}_{digest}"


def own_name(module: str) -> str:
    """The name of a module, even if its file was imported under another because the name was taken."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or module != _other_name(file := Path(path).resolve()):
        return module
    return _import_name(file)[0]


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """Puts the folder first on the path, as for a script, so that the file can import its neighbours."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def _import(file: Path, name: str) -> ModuleType:
    """Imports the file into sys.modules, so that its classes have source and can be pickled."""
    try:
        module_spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        module_spec = None
    if module_spec is None or module_spec.origin is None or Path(module_spec.origin).resolve() != file:
        # The name is taken by another module, such as a model.py of another folder.
        name = _other_name(file)
        module_spec = importlib.util.spec_from_file_location(name, file)
    if name in sys.modules:
        return sys.modules[name]
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _run(file: Path, what: str, function: Callable[[], Any]) -> Any:
    """Runs user code; its errors become one line, with the line number in the file."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == os.fspath(file)
        ]
        where = f" (line {lines[-1]})" if lines else ""
        raise BadInput(f"{what} failed{where}: {type(error).__name__}: {brief(error)}") from error


# --- Words ------------------------------------------------------------------------------------------------------------


def _module(value: object) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise BadInput(f"it returns a {type(value).__name__}, not a torch.nn.Module")
    return value


def _all(names: list[str]) -> str:
    return f"; its functions: {', '.join(names)}" if 0 < len(names) <= 8 else ""


def _library_of(name: str) -> str:
    """A hint for the name of a library's model without its prefix."""
    with contextlib.suppress(BadInput):
        if need("timm").is_model(name):
            return f"; perhaps timm:{name}"
        if name in need("torchvision").models.list_models():
            return f"; perhaps torchvision:{name}"
    return ""
