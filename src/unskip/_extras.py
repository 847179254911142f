"""Optional dependencies, imported on use: `timm = need("timm")`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from unskip.errors import MissingPackage

EXTRAS = {  # the packages of each extra of pyproject.toml, by import name
    "train": ("accelerate", "timm", "torchvision", "PIL", "pyarrow", "tyro", "rich"),
    "report": ("matplotlib",),
    "hf": ("transformers", "datasets", "diffusers", "huggingface_hub"),
}


def need(module: str) -> Any:
    """A module of an optional package. Raises MissingPackage with the command that installs it."""
    package = module.partition(".")[0]
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise  # the package is installed, but one of its own imports is missing
        extra = next(extra for extra, packages in EXTRAS.items() if package in packages)
        raise MissingPackage(f"{package} is not installed: pip install 'unskip[{extra}]'") from error
    return import_module(module)
