"""Runs commands and scripts in a forked process, so that nothing has to be imported again."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import timm  # noqa: F401  (this and the next: imported before the fork)
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor
from accelerate.state import AcceleratorState

from unskip import cli, demo  # noqa: F401

# If the first backward pass comes after compiling, autograd starts threads, which do not survive a fork.
torch.ones(1, requires_grad=True).sum().backward()

Outcome = tuple[int, str, str]  # exit code, stdout, stderr


def unskip_in(folder: Path, *args: str) -> Outcome:
    """Runs `unskip ARGS` in a folder."""
    return _forked(folder, lambda: cli.main(list(args)))


def python_in(folder: Path, code: str) -> Outcome:
    """Runs a script in a folder, with that folder first in sys.path."""

    def run() -> int:
        sys.path.insert(0, str(folder))
        exec(code, {"__name__": "__main__"})
        return 0

    return _forked(folder, run)


def on_ranks(count: int, folder: Path, run: Callable[[], object]) -> None:
    """Runs a function in `count` processes with the environment that torchrun gives its workers, on the CPU."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "ACCELERATE_USE_CPU": "1"}
    shared["OMP_NUM_THREADS"] = "1"  # accelerate warns if it is unset

    def ranked(rank: int) -> int:
        os.environ |= {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
        AcceleratorState._reset_state(reset_partial_state=True)  # the state of the parent process
        return int(run() or 0)

    started = [_fork(folder, partial(ranked, rank)) for rank in range(count)]
    for outcome in [end() for end in started]:
        assert outcome[0] == 0, outcome[2][-3000:]


def _forked(folder: Path, run: Callable[[], int]) -> Outcome:
    return _fork(folder, run)()


def _fork(folder: Path, run: Callable[[], int]) -> Callable[[], Outcome]:
    """Starts a process. The returned function waits for its end."""
    files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  (closed where they are read)
    child = os.fork()
    if child == 0:
        _child(folder, run, *(file.fileno() for file in files))

    def end() -> Outcome:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in files:
            with file:
                file.seek(0)
                texts.append(file.read().decode())
        return code, texts[0], texts[1]

    return end


def _child(folder: Path, run: Callable[[], int], out: int, err: int) -> None:
    """Runs in the child and exits, so that pytest continues only in the parent."""
    code = 1
    try:
        os.chdir(folder)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        code = run()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
