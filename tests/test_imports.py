"""`import unskip` stays light, and everything but the command line works without tyro."""

import subprocess
import sys

import pytest

HEAVY = [
    "accelerate",
    "datasets",
    "diffusers",
    "matplotlib",
    "pyarrow",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "timm",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torchvision",
    "transformers",
    "tyro",
]


def python(code: str, *args: str) -> str:
    """What `code` prints in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    loaded = python("import sys, unskip; print(*(name for name in sys.argv[1:] if name in sys.modules))", *HEAVY)
    assert loaded.split() == []


# None in sys.modules makes every later import of that name fail.
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules[sys.argv[1]] = None
import unskip
for module in pkgutil.walk_packages(unskip.__path__, "unskip."):
    if module.name != "unskip.__main__" and not module.name.startswith("unskip.cli"):
        importlib.import_module(module.name)
        print(module.name)
"""


@pytest.mark.parametrize("missing", ["tyro", "rich"])
def test_modules_import_without(missing: str) -> None:
    modules = python(IMPORT_ALL, missing).split()
    assert "unskip.errors" in modules
    assert "unskip.anatomy" in modules
    assert "unskip.wiring" in modules
