"""Commands and scripts in a process of their own, forked from the tests' so that nothing is imported again."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import accelerate  # noqa: F401  (with the next: what commands import, before the fork)
import sklearn.datasets  # noqa: F401
import timm  # noqa: F401

from unskip import cli, demo  # noqa: F401

Outcome = tuple[int, str, str]  # the exit code, what was printed, and what was printed as errors


def unskip_in(folder: Path, *args: str) -> Outcome:
    """Runs `unskip ARGS` in a folder."""
    return _forked(folder, lambda: cli.main(list(args)))


def python_in(folder: Path, code: str) -> Outcome:
    """Runs a script in a folder, from which it also imports."""

    def run() -> int:
        sys.path.insert(0, str(folder))
        exec(code, {"__name__": "__main__"})
        return 0

    return _forked(folder, run)


def _forked(folder: Path, run: Callable[[], int]) -> Outcome:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _child(folder, run, out.fileno(), err.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        return code, texts[0], texts[1]


def _child(folder: Path, run: Callable[[], int], out: int, err: int) -> None:
    """Never returns, so that nothing of pytest runs twice."""
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
