"""Short runs of every recipe, compared with the losses and evaluations recorded in golden.json.

python -m tests.golden --check     # all steps and evaluations to 1e-6, on the machine that recorded them
python -m tests.golden --record    # after a change that is meant to change them; give the reason in the commit

Runs use one thread and float32. Other CPUs round differently, so tests/test_golden.py compares only ten steps, at 1e-3.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import unskip

FILE = Path(__file__).with_name("golden.json")
STEPS = 24
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "supervised residual": ("supervised", {}),
    "supervised cut": ("supervised", {"shortcut": "cut", "init": "skipless", "optimizer": "soap"}),
    "supervised decay": ("supervised", {"shortcut": "decay:0.6", "optimizer": "muon"}),
    "mae": ("mae", {}),
    "dino": ("dino", {}),
    "simclr": ("simclr", {}),
    "sit": ("sit", {}),
    "uvit": ("uvit", {}),
    "lm": ("lm", {"shortcut": "decay:0.6", "context": 32, "batch": 8, "online_sequences": 16}),
}


def config_of(name: str) -> Any:
    """The config of a recorded run."""
    recipe, fields = RUNS[name]
    preset = "digits"
    if recipe == "lm":  # the standard library differs between versions of Python
        preset, folder = "stdlib-tiny", Path(tempfile.gettempdir()) / "unskip-golden"
        folder.mkdir(exist_ok=True)
        (folder / "squares.txt").write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(2000)))
        fields = {**fields, "data": str(folder / "squares.txt"), "cache": str(folder / "cache")}
    return getattr(unskip.recipes, recipe)(preset, steps=STEPS, log_every=1, device="cpu", **fields)


def run(name: str) -> dict[str, Any]:
    """The loss of every step, and the final evaluation."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", unskip.errors.UnskipWarning)  # a run of so few steps gives health warnings
        outcome = unskip.train(config_of(name), f"{folder}/run", quiet=True)
        rows = unskip.training.RunFolder(f"{folder}/run").read("metrics.jsonl")
    return {"loss": [row["loss"] for row in rows], "evaluation": dict(sorted(outcome.evaluations.items()))}


def first_losses(name: str, count: int) -> list[float]:
    """The losses of the first `count` steps of a run, which is then stopped."""
    config = config_of(name)
    torch.manual_seed(config.seed)
    task, schedule = unskip.recipes.build_task(config)
    after = task.after_step or (lambda step: None)

    def stop(step: int) -> None:
        after(step)
        if step == count:  # the loss of the step before is logged
            raise _Stop

    task.after_step = stop
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(_Stop), warnings.catch_warnings():
        warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
        run = unskip.training.RunFolder.create(f"{folder}/run", {}, "cpu")
        try:
            unskip.training.run_task(task, schedule, run, quiet=True)
        finally:
            losses = [row["loss"] for row in run.read("metrics.jsonl")]
    return losses[:count]


class _Stop(Exception):
    pass


def differences(new: dict[str, Any], old: dict[str, Any], tolerance: float) -> list[str]:
    """The numbers that differ by more than `tolerance`, relative or absolute."""
    pairs = {f"loss[{step}]": pair for step, pair in enumerate(zip(new["loss"], old["loss"], strict=True))}
    names = new["evaluation"].keys() | old["evaluation"].keys()
    pairs |= {key: (new["evaluation"].get(key, math.nan), old["evaluation"].get(key, math.nan)) for key in names}
    return [
        f"{key}: {now!r}, recorded {before!r}"
        for key, (now, before) in sorted(pairs.items())
        if not math.isclose(now, before, rel_tol=tolerance, abs_tol=tolerance)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*", default=list(RUNS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: run(name) for name in options.names}
    if options.record:
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        FILE.write_text(json.dumps({**known, **results}, indent=1) + "\n")
        return
    known = json.loads(FILE.read_text())
    wrong = {name: differences(results[name], known[name], 1e-6) for name in results}
    for name, lines in wrong.items():
        print(f"{name}: {'same' if not lines else ''}", *lines[:12], sep="\n  ")
    raise SystemExit(any(wrong.values()))


if __name__ == "__main__":
    main()
