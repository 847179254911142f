"""torch.compile in the first step: a cache that survives restarts, and how long compilation took last time.

torch keeps compiled code in the system's temporary folder, which a restart of the machine may clear. During a run it is
kept in ~/.cache/unskip/compiled instead, unless TORCHINDUCTOR_CACHE_DIR names a folder.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unskip.training._task import Task

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def lasting_cache() -> Iterator[None]:
    """Keeps compiled code across restarts of the machine, unless the user has chosen a folder for it."""
    before = os.environ.get(_VARIABLE)
    # Importing torch's compiler sets the variable to its default.
    if before is not None and not Path(before).match(f"{tempfile.gettempdir()}/torchinductor_*"):
        yield
        return
    os.environ[_VARIABLE] = str(_folder())
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE)
        if before is not None:
            os.environ[_VARIABLE] = before


@contextmanager
def timed_first_step(
    task: Task, kind: str, precision: str, parts: Iterator[Any], say: Callable[[str], object]
) -> Iterator[Iterator[Any]]:
    """Reports that the first step compiles the model, how long that took last time, and how long now.

    Yields the parts of the step. The first is needed to tell what was compiled last time: code depends on its shapes.
    """
    files: list[Path] = []

    def reported() -> Iterator[Any]:
        for part in parts:
            if not files:
                files.append(_record_of(task, kind, precision, part))
                last = ""
                with suppress(OSError, ValueError):  # never compiled here, or a damaged file
                    last = f"; last time it took {float(files[0].read_text()):.0f} s"
                say(f"compiling {type(task.model).__name__} in the first step{last}")
            yield part

    begun = time.perf_counter()
    yield reported()
    seconds = time.perf_counter() - begun
    say(f"the first step took {seconds:.0f} s")
    for file in files:
        with suppress(OSError):  # a read-only home
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{seconds:.1f}\n")


def _record_of(task: Task, kind: str, precision: str, part: Any) -> Path:
    """The file with the time of the first step that compiles the same code."""
    device = torch.cuda.get_device_name() if kind == "cuda" else kind
    weights = [tuple(parameter.shape) for parameter in task.model.parameters()]
    inputs = [tuple(each.shape) for each in part if isinstance(each, Tensor)]
    rules = [wiring.to_dict()["rules"] for wiring in task.wirings]
    key = f"{type(task.model).__name__} {weights} {inputs} {rules} {precision} {device} {torch.__version__}"
    return _folder() / f"first-step-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"


def _folder() -> Path:
    return Path.home() / ".cache" / "unskip" / "compiled"
