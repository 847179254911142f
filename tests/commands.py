"""Commands in a process of their own, forked from the tests' so that nothing is imported again."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path

import accelerate  # noqa: F401  (with the next: what commands import, before the fork)
import sklearn.datasets  # noqa: F401
import timm  # noqa: F401

from unskip import cli, demo  # noqa: F401


def unskip_in(folder: Path, *args: str) -> tuple[int, str, str]:
    """Runs `unskip ARGS` in a folder: the exit code, what it printed, and what it printed as errors."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _run(folder, args, out.fileno(), err.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        return code, texts[0], texts[1]


def _run(folder: Path, args: tuple[str, ...], out: int, err: int) -> None:
    """The child: never returns, so that nothing of pytest runs twice."""
    code = 1
    try:
        os.chdir(folder)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        code = cli.main(list(args))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
