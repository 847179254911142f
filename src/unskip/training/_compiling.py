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

import torch
from torch import nn

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
def timed_first_step(model: nn.Module, kind: str, say: Callable[[str], object]) -> Iterator[None]:
    """Reports that the first step compiles the model, how long that took last time, and how long now."""
    device = torch.cuda.get_device_name() if kind == "cuda" else kind
    sizes = [tuple(parameter.shape) for parameter in model.parameters()]
    key = f"{type(model).__name__} {sizes} {device} {torch.__version__}"
    file = _folder() / f"first-step-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    last = ""
    with suppress(OSError, ValueError):  # never compiled here, or a damaged file
        last = f"; last time it took {float(file.read_text()):.0f} s"
    say(f"compiling {type(model).__name__} in the first step{last}")
    begun = time.perf_counter()
    yield
    seconds = time.perf_counter() - begun
    say(f"the first step took {seconds:.0f} s")
    with suppress(OSError):  # a read-only home
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{seconds:.1f}\n")


def _folder() -> Path:
    return Path.home() / ".cache" / "unskip" / "compiled"
