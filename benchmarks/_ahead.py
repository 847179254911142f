"""Compiles several models in parallel, one process each, before a single process measures them in turn.

Compiling a model uses about one core and takes longer than measuring it. The results are in torch's compile cache,
which the measuring process then reads.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable

_INSIDE = "UNSKIP_BENCHMARK_AHEAD"  # set in the compiling processes


def compile_ahead(script: str, names: Iterable[str], *options: str) -> None:
    """Runs the script with `--only=NAME` and the options, all names in parallel. A run that it started returns."""
    if _INSIDE in os.environ:
        return
    begin = time.perf_counter()
    command = [sys.executable, script, *options, f"--out={os.devnull}"]
    environment = {**os.environ, _INSIDE: "1"}
    running = {
        name: subprocess.Popen([*command, f"--only={name}"], stdout=subprocess.DEVNULL, env=environment)
        for name in names
    }
    for name, process in running.items():
        if process.wait():
            print(f"{name}: compilation in a separate process failed; it is compiled here", flush=True)
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
