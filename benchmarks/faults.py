"""Fault injection: runs that are killed, fill the disk or lose a checkpoint must resume and reach the same weights.

    python benchmarks/faults.py --kills 100            # writes docs/results/faults.json; mounting disks needs root
    python benchmarks/faults.py --exits 200            # adds FSDP runs of two processes: none may abort

Tiny runs on digits, over recipes and optimizers, are killed by SIGKILL at a random time. The run is then resumed, and
must end with the same files as an uninterrupted run: weights, EMA and optimizer state, byte for byte, and the same
losses. After any other fault, there must be a one-line error message without a traceback, and the last good checkpoint
must remain. All processes are forked from this one, after all imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401  (this and the next imports: before the fork)
import timm  # noqa: F401
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
import tyro  # noqa: F401
from _record import made_with, write_json

from unskip import cli, recipes  # noqa: F401
from unskip.training import RunFolder

STEPS = 16
FILES = ("model.safetensors", "optimizer.safetensors", "ema.safetensors")
OPTIMIZERS = ("adamw", "soap", "muon")
_VIT = "depth=2,embed_dim=16,num_heads=2"
_FLOW = "width=16,depth=3,heads=2"
_FEW = {"online_images": 300}
RECIPES: dict[str, dict[str, Any]] = {
    "supervised": {"model_args": _VIT},
    "mae": {"model_args": _VIT} | _FEW,
    "dino": {"model_args": _VIT} | _FEW,
    "simclr": {"model_args": _VIT} | _FEW,
    "sit": {"model_args": _FLOW} | _FEW,
    "uvit": {"model_args": _FLOW} | _FEW,
}
COMMON: dict[str, Any] = {"steps": STEPS, "batch": 16, "checkpoint_every": 3, "log_every": 1, "ema": 0.9}
COMMON |= {"device": "cpu", "health": False, "preset": "digits"}


def forked(work: Callable[[], int], log: Path) -> int:
    """Starts `work` in a forked process, with its output in `log`; returns its process ID."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(recipe: str, optimizer: str, out: Path) -> int:
    fields = COMMON | RECIPES[recipe] | {"optimizer": optimizer}
    words = [
        f"--{key.replace('_', '-')}={value}" if value is not False else f"--no-{key}" for key, value in fields.items()
    ]
    return cli.main(["train", recipe, *words, "--quiet", "--out", str(out)])


def resume(out: Path) -> int:
    return cli.main(["resume", str(out), "--quiet"])


def resume_or_train(recipe: str, optimizer: str, out: Path) -> int:
    """Resumes a run, or restarts it if it was killed before its config was written."""
    if (out / "config.json").is_file():
        return resume(out)
    shutil.rmtree(out, ignore_errors=True)
    return train(recipe, optimizer, out)


def difference(whole: Path, other: Path) -> str | None:
    """The first file that differs between two runs, or "losses"; None if the runs are equal."""
    for name in FILES:
        ends = [run / "checkpoints" / f"step-{STEPS}" / name for run in (whole, other)]
        if ends[0].read_bytes() != ends[1].read_bytes():
            return name
    losses = [[(row["step"], row["loss"]) for row in RunFolder(run).read("metrics.jsonl")] for run in (whole, other)]
    return None if losses[0] == losses[1] else "losses"


def kills(count: int, seed: int, folder: Path, until: float) -> dict[str, Any]:
    """Kills runs at random times, resumes them, and compares them with uninterrupted runs."""
    draw = random.Random(seed)
    pairs = [*product(RECIPES, OPTIMIZERS)]
    draw.shuffle(pairs)
    whole: dict[tuple[str, str], tuple[Path, float]] = {}
    rows: list[dict[str, Any]] = []
    late = 0  # runs that ended before they were killed
    while len(rows) < count and time.time() < until:
        recipe, optimizer = pair = pairs[(len(rows) + late) % len(pairs)]
        if pair not in whole:
            out, started = folder / f"{recipe}-{optimizer}", time.time()
            assert exit_code(forked(partial(train, *pair, out), folder / "log")) == 0, (folder / "log").read_text()
            whole[pair] = out, time.time() - started
        out, log = folder / "run", folder / "log"
        shutil.rmtree(out, ignore_errors=True)
        child = forked(partial(train, *pair, out), log)
        time.sleep(draw.uniform(0, whole[pair][1]))
        os.kill(child, signal.SIGKILL)
        if exit_code(child) != -signal.SIGKILL:
            late += 1
            continue
        last = RunFolder(out).last_checkpoint() if out.exists() else None
        code = exit_code(forked(partial(resume_or_train, *pair, out), log))
        off = difference(whole[pair][0], out) if code == 0 else f"exit {code}: {log.read_text()[-300:]}"
        rows.append({"recipe": recipe, "optimizer": optimizer, "resumed_from": last and last[0], "difference": off})
    where = Counter("before the first checkpoint" if row["resumed_from"] is None else "after it" for row in rows)
    return {
        "kills": len(rows),
        "bitwise equal": sum(row["difference"] is None for row in rows),
        "pairs of recipe and optimizer": len(whole),
        "moments": dict(where),
        "failures": [row for row in rows if row["difference"] is not None],
    }


def error_line(log: Path, start: str = "unskip:") -> tuple[bool, str]:
    """Whether the log has exactly one error line and no traceback, and that line."""
    text = log.read_text()
    lines = [line for line in text.splitlines() if line.startswith(start)]
    return "Traceback" not in text and len(lines) == 1, lines[-1] if lines else text[-300:]


def small_disk(folder: Path, whole: Path) -> dict[str, Any]:
    """Fills the disk of a run after some checkpoints, then resumes it with more space."""
    size = sum(file.stat().st_size for file in (whole / "checkpoints").rglob("*") if file.is_file())
    disk = folder / "disk"
    with mounted(disk, f"size={int(1.3 * size)}"):
        code = exit_code(forked(partial(train, "mae", "soap", disk / "run"), folder / "log"))
        clear, line = error_line(folder / "log")
        last = RunFolder(disk / "run").last_checkpoint()
        subprocess.run(["mount", "-o", f"remount,size={8 * size}", str(disk)], check=True)
        after = exit_code(forked(partial(resume, disk / "run"), folder / "log"))
        same = after == 0 and difference(whole, disk / "run") is None
    return {"exit": code, "one clear line": clear, "line": shown(line, disk), "kept": last and last[0], "resumed": same}


def read_only(folder: Path, whole: Path) -> dict[str, Any]:
    """Resumes a run in a read-only folder, then in a writable one."""
    disk = folder / "disk"
    with mounted(disk, "size=64m"):
        shutil.copytree(whole, disk / "run")
        shutil.rmtree(disk / "run" / "checkpoints" / f"step-{STEPS}")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        code = exit_code(forked(partial(resume, disk / "run"), folder / "log"))
        clear, line = error_line(folder / "log")
        last = RunFolder(disk / "run").last_checkpoint()
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        after = exit_code(forked(partial(resume, disk / "run"), folder / "log"))
        same = after == 0 and difference(whole, disk / "run") is None
    return {"exit": code, "one clear line": clear, "line": shown(line, disk), "kept": last and last[0], "resumed": same}


def damaged(folder: Path, whole: Path, seed: int) -> dict[str, Any]:
    """Damages each file of the last checkpoint: truncates it, or flips one random bit."""
    draw = random.Random(seed)
    found: dict[str, Any] = {}
    for how in ("truncated", "bit flipped"):
        rows = []
        for file in sorted(each.name for each in (whole / "checkpoints" / f"step-{STEPS}").iterdir() if each.is_file()):
            out = folder / "run"
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(whole, out)
            target = out / "checkpoints" / f"step-{STEPS}" / file
            data = bytearray(target.read_bytes())
            if how == "truncated":
                data = data[: draw.randrange(len(data))]
            else:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            target.write_bytes(bytes(data))
            code = exit_code(forked(partial(resume, out), folder / "log"))
            clear, line = error_line(folder / "log", "warning:")
            off = difference(whole, out) if code == 0 else f"exit {code}"
            rows.append({"file": file, "one clear line": clear, "difference": off, "line": shown(line, out)})
        found[how] = {
            "files": len(rows),
            "one clear line": sum(row["one clear line"] for row in rows),
            "bitwise equal": sum(row["difference"] is None for row in rows),
            "example": rows[-1]["line"],
            "failures": [row for row in rows if row["difference"] or not row["one clear line"]],
        }
    return found


def exits(count: int, at_once: int = 4) -> dict[str, Any]:
    """Runs FSDP with two processes, which must exit normally. Several runs share the CPU, which varies the timing."""
    folder, failures = Path(tempfile.mkdtemp(prefix="unskip-exits-")), list[str]()
    running: dict[int, Path] = {}
    load = 0.0
    for turn in range(count + at_once):
        while running and (len(running) >= 2 * at_once or turn >= count):
            child, status = os.wait()
            log, load = running.pop(child), max(load, os.getloadavg()[0])
            if code := os.waitstatus_to_exitcode(status):
                failures.append(f"exit {code}: {log.read_text()[-300:]}")
        if turn >= count:
            continue
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        for rank in range(2):
            log = folder / f"{turn}-{rank}.log"
            child = os.fork()
            if child:
                running[child] = log
                continue
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
            os.environ |= {"LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
            words = ["--model-args", _VIT, "--steps=2", "--batch=128", "--no-health", "--device=cpu", "--fsdp"]
            out = str(folder / f"run-{turn}")
            sys.exit(cli.main(["train", "supervised", "--preset=digits", *words, "--quiet", "--out", out]))
    shutil.rmtree(folder)
    return {"runs": count, "processes": 2 * count, "runs at once": at_once, "failures": failures, "load average": load}


def shown(line: str, folder: Path) -> str:
    return line.replace(str(folder), "FOLDER")


class mounted:
    """A context with a tmpfs mounted at `folder`; needs root."""

    def __init__(self, folder: Path, options: str) -> None:
        self.folder, self.options = folder, options

    def __enter__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", self.options, "tmpfs", str(self.folder)], check=True)

    def __exit__(self, *error: object) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=60, help="time limit for starting a kill test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/results/faults.json"))
    parser.add_argument("--exits", type=int, default=0, help="only test that this many FSDP runs exit without an abort")
    options = parser.parse_args()
    if options.exits:  # no context manager is open here, so a forked process cannot exit one
        found = exits(options.exits)
        write_json(options.out, json.loads(options.out.read_text()) | {"exits": found})
        return
    started = time.time()
    record = made_with(__file__, "cpu", "timm", "accelerate") | {"seed": options.seed, "config": COMMON}
    with tempfile.TemporaryDirectory(prefix="unskip-faults-") as name:
        folder = Path(name)
        whole = folder / "whole"
        assert exit_code(forked(partial(train, "mae", "soap", whole), folder / "log")) == 0, (
            folder / "log"
        ).read_text()
        record["damaged checkpoints"] = damaged(folder, whole, options.seed)
        for title, fault in (("full disk", small_disk), ("read-only folder", read_only)):
            try:
                record[title] = fault(folder, whole)
            except (OSError, subprocess.CalledProcessError) as error:
                record[title] = {"not run": f"no small file system can be mounted here: {error}"}
        record["SIGKILL"] = kills(options.kills, options.seed, folder, started + 60 * options.minutes)
    write_json(options.out, record | {"seconds": round(time.time() - started)})


if __name__ == "__main__":
    main()
