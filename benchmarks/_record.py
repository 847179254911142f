"""The metadata in the JSON record of a benchmark, and the function that writes the record."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import unskip


def made_with(script: str, device: str, *libraries: str) -> dict[str, Any]:
    """The script, the name of the device ("cuda" or "cpu"), the versions of Python, torch, unskip and `libraries`."""
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "unskip": unskip.__version__}
    for name in libraries:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # importable from a folder, without package metadata
            versions[name] = "unknown"
    return {
        "script": f"benchmarks/{Path(script).name}",
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu,
        "versions": versions,
    }


def write_json(file: Path, record: dict[str, Any]) -> None:
    """Writes a record, and creates its folder if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
