"""Compiling several models at once, each in a process of its own, before one process measures them in turn.

Compiling a model takes about one core, and longer than the measurement. What each process compiles lies in torch's
cache afterwards, where the process that measures finds it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable

_INSIDE = "UNSKIP_BENCHMARK_AHEAD"  # set in the processes that compile


def compile_ahead(script: str, names: Iterable[str], *options: str) -> None:
    """Runs the script with `--only=NAME` and the options for all names at once; does nothing within such a run."""
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
            print(f"{name}: compiling it in a process of its own failed; it is compiled here", flush=True)
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
