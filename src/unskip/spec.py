"""Builds a model from the text that names it on the command line:

    timm:vit_base_patch16_224    torchvision:vit_b_16    hf:NAME-or-FOLDER    diffusers:FOLDER    file.py:FUNCTION

Whatever is wrong with the text, or with what it names, is a `BadInput` of one line.
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
from unskip._words import nearest
from unskip.errors import BadInput, UnskipError

# How a model is named.
FORMS = "timm:NAME, torchvision:NAME, hf:NAME-or-FOLDER, diffusers:FOLDER or file.py:FUNCTION"
# Above this many parameters a light build has shapes only. With values, building and tracing a ViT-B takes seconds on
# two cores, a ViT-g more memory than 20 GiB: a trace keeps every activation.
LARGE = 100_000_000

_LIBRARY_FORMS = ("timm", "torchvision", "hf", "diffusers")
_Maker = Callable[..., nn.Module]  # (name, pretrained, **kwargs)
# Arguments of makers that name files or fetch them.
_READING = frozenset(
    "cache_dir checkpoint_path gguf_file pretrained pretrained_cfg pretrained_cfg_overlay weights".split()
)


def build(spec: str, pretrained: bool = False, light: bool = False, **kwargs: Any) -> nn.Module:
    """The model that a spec names, with random weights unless pretrained ones are asked for; `kwargs` go to its maker.

    With `light`, a model of a library with more than 100 million parameters stays on the meta device, without values.
    """
    make = _maker(spec)
    if light and not pretrained and make is not _from_file:
        model = _shapes(make, spec, kwargs)
        if model is not None and sum(p.numel() for p in model.parameters()) > LARGE:
            return model
    return _made(make, spec, pretrained, kwargs)


def is_file(spec: str) -> bool:
    """Whether a spec names a function of a Python file, which building it runs."""
    return spec.partition(":")[0] not in _LIBRARY_FORMS and spec.rpartition(":")[0].endswith(".py")


def reading(settings: Any, arguments: bool = False) -> Iterator[str]:
    """The settings that make a library read or fetch files: in arguments of a maker, or in those that a configuration
    holds for one, such as `model_args` for timm.
    """
    if isinstance(settings, dict):
        for key, value in settings.items():
            if arguments and key in _READING:
                yield key
            yield from reading(value, arguments or str(key).endswith("args"))
    elif isinstance(settings, list):
        for value in settings:
            yield from reading(value, arguments)


def kernels(settings: Any, named: bool = False) -> list[str]:
    """The kernels of the hub that settings, or parts of them, name as implementations of attention or experts."""
    if isinstance(settings, dict):
        ends = ("_implementation", "_implementation_internal")
        return [k for key, value in settings.items() for k in kernels(value, named or str(key).endswith(ends))]
    if isinstance(settings, list):
        return [kernel for value in settings for kernel in kernels(value, named)]
    return [settings] if named and isinstance(settings, str) and "/" in settings else []


def _shapes(make: _Maker, spec: str, kwargs: dict[str, Any]) -> nn.Module | None:
    """The model without values; None where its constructor needs them."""
    try:
        with torch.device("meta"):
            return _made(make, spec, False, kwargs)
    except BadInput:
        return None


def _made(make: _Maker, spec: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    name = spec if make is _from_file else spec.partition(":")[2]
    try:
        return make(name, pretrained, **kwargs)
    except UnskipError as error:
        raise BadInput(f"{spec}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:  # of a library, about a name or a config that it cannot use
        raise BadInput(f"{spec}: {type(error).__name__}: {_line(error)}") from error


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
            raise BadInput(f"{spec!r} names no model; write {FORMS}")
        return makers[head]
    if spec.endswith(".py"):
        raise BadInput(f"{spec}: write {spec}:FUNCTION, with a function of the file that returns the model")
    if is_file(spec):
        return _from_file
    if Path(spec).is_dir():
        raise BadInput(f"{spec} is a folder, and does not say of what; write {FORMS}")
    raise BadInput(f"{spec!r} is not a model{nearest(head, makers) if colon else _library_of(spec)}; write {FORMS}")


# --- Libraries --------------------------------------------------------------------------------------------------------


def _from_timm(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    timm = need("timm")
    base = name.partition(".")[0]  # what follows the dot is a tag of pretrained weights
    on_hub = name.startswith("hf-hub:")  # the hub has the name and arguments too, not only weights
    if not on_hub and not timm.is_model(base):
        raise BadInput(f"timm has no model of this name{nearest(base, timm.list_models())}")
    if (width := kwargs.pop("attn_head_dim", None)) is not None:
        kwargs["attn_layer"] = _attention_of(width)
    with hub(needed=pretrained or on_hub):
        return _module(timm.create_model(name, pretrained=pretrained, **kwargs))


def _attention_of(head_dim: int) -> type[nn.Module]:
    """timm's attention with heads of this width, for which its ViTs have no argument."""
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
        raise BadInput(f"needs the internet: it is not in the cache, and cannot be fetched ({_line(error)})") from error


def _from_hf(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    transformers = need("transformers")
    folder = Path(name).expanduser()
    if folder.is_dir():
        if "_class_name" in _config(folder):
            raise BadInput(f"the config is one of diffusers; write diffusers:{name}")
        name = str(folder)
    elif name.startswith(("/", ".", "~")):
        raise BadInput("there is no such folder")
    options = {"trust_remote_code": False}  # else it would stop and ask
    with hub(needed=not folder.is_dir()):
        settings, _ = transformers.PreTrainedConfig.get_config_dict(name, **kwargs)
        foreign = [*kernels(settings), *reading(settings)]
        if foreign:
            raise BadInput(f"its config.json names {foreign[0]}, which would be fetched or read; build it yourself")
        if pretrained:
            return _module(transformers.AutoModel.from_pretrained(name, **options, **kwargs))
        config = transformers.AutoConfig.from_pretrained(name, **options, **kwargs)
        # The precision of the checkpoint says nothing about the model, and not every CPU has it.
        return _module(transformers.AutoModel.from_config(config, dtype=torch.float32, **options))


def _from_diffusers(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    diffusers = need("diffusers")
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise BadInput("there is no such folder")
    if (folder / "model_index.json").is_file():
        parts = sorted(path.parent.name for path in folder.glob("*/config.json"))
        each = " or ".join(f"diffusers:{name.rstrip('/')}/{part}" for part in parts)
        raise BadInput(
            f"the folder is a whole pipeline; name one of its models, {each or 'a folder with a config.json'}"
        )
    config = _config(folder)
    cls = getattr(diffusers, str(config.get("_class_name")), None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise BadInput(f"its config.json has _class_name {config.get('_class_name')!r}, which is no model of diffusers")
    loader: Any = cls
    return _module(loader.from_pretrained(folder, **kwargs) if pretrained else loader.from_config(config, **kwargs))


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput("the folder has no config.json") from None
    except ValueError as error:
        raise BadInput(f"its config.json is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadInput("its config.json does not hold the fields of a config")
    return config


@contextlib.contextmanager
def hub(needed: bool) -> Iterator[None]:
    """Without a way to the hub, only its cache is asked; else it would be tried for most of a minute, aloud."""
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
        return True  # only the proxy knows
    address = urllib.parse.urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True


# --- Files ------------------------------------------------------------------------------------------------------------


def import_file(path: str | Path) -> ModuleType:
    """A Python file as a module. Raises BadInput in one line, whatever is wrong with the file."""
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
    """The name a file is imported by, with the packages it lies in, and the folder to put on the path for it."""
    parts, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts), folder


def _other_name(file: Path) -> str:
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^0-9a-zA-Z]', '_', file.stem)}_{digest}"


def own_name(module: str) -> str:
    """The name of a module, also where its file had to be imported by another because the name was taken."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None or module != _other_name(file := Path(path).resolve()):
        return module
    return _import_name(file)[0]


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """As for a script, the folder comes first, so that the file finds its neighbours."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def _import(file: Path, name: str) -> ModuleType:
    """The file as a module in sys.modules: its classes have source there, and can be pickled."""
    try:
        module_spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        module_spec = None
    if module_spec is None or module_spec.origin is None or Path(module_spec.origin).resolve() != file:
        # The name belongs to something else, such as a model.py that another folder gave.
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
    """Runs code of the user's; what it raises is told in one line, with the line of the file."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == os.fspath(file)
        ]
        where = f" (line {lines[-1]})" if lines else ""
        raise BadInput(f"{what} failed{where}: {type(error).__name__}: {_line(error)}") from error


# --- Words ------------------------------------------------------------------------------------------------------------


def _module(value: object) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise BadInput(f"it gives something of type {type(value).__name__}, not a torch.nn.Module")
    return value


def _all(names: list[str]) -> str:
    return f"; its functions: {', '.join(names)}" if 0 < len(names) <= 8 else ""


def _library_of(name: str) -> str:
    """A hint for a bare name that a library knows."""
    with contextlib.suppress(BadInput):
        if need("timm").is_model(name):
            return f"; perhaps timm:{name}"
        if name in need("torchvision").models.list_models():
            return f"; perhaps torchvision:{name}"
    return ""


def _line(error: BaseException) -> str:
    """The message on one line; the first paragraph is enough of a long one."""
    return " ".join(str(error).strip().split("\n\n")[0].split())
