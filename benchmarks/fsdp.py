"""Measures the overhead of FSDP2 at world size 1, and compares the trained weights with those of unsharded training.

    python benchmarks/fsdp.py                              # one GPU, two minutes; docs/results/fsdp-gpu.json
    python benchmarks/fsdp.py --device cpu --small --out FILE.json

Each optimizer is run by the command line without --fsdp, and under torchrun with it: ViT-B/16 at 224 px on digits that
are enlarged on the device, bf16, not compiled. Images per second are the median of the logged rows after the first;
losses and weights are compared at the end of a shorter run in float32. One process does all runs with or without FSDP,
so that imports and GPU start-up are needed twice and not twelve times.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from _record import made_with, write_json
from safetensors.torch import load_file

from unskip import cli
from unskip.training import RunFolder

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
OPTIMIZERS = ("adamw", "soap", "muon")
EXACT = 10  # steps of the runs in float32
LARGE = ["--model=timm:vit_base_patch16_224", "--model-args=", "--size=224", "--patch=16", "--batch=128"]
SMALL = ["--model-args=depth=2,embed_dim=32,num_heads=2", "--batch=32"]


def train(folder: Path, options: argparse.Namespace, fsdp: bool) -> None:
    """Does all runs with or without FSDP in this process."""
    for optimizer, (precision, steps) in product(OPTIMIZERS, lengths(options)):
        words = ["--preset=digits", *(SMALL if options.small else LARGE), f"--optimizer={optimizer}"]
        words += [f"--steps={steps}", f"--precision={precision}", "--log-every=10", "--lr=1e-4", "--ema=0.99"]
        words += ["--no-health", "--quiet", f"--device={options.device}", *(["--fsdp"] if fsdp else [])]
        code = cli.main(["train", "supervised", *words, f"--out={named(folder, optimizer, precision, fsdp)}"])
        if code:
            raise SystemExit(code)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


def lengths(options: argparse.Namespace) -> tuple[tuple[str, int], ...]:
    return ("bf16", options.steps), ("float32", EXACT)


def named(folder: Path, optimizer: str, precision: str, fsdp: bool) -> Path:
    return folder / f"{optimizer}-{precision}-{'fsdp' if fsdp else 'plain'}"


def launch(folder: Path, options: argparse.Namespace, fsdp: bool) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"] if fsdp else []
    words = [f"--device={options.device}", f"--steps={options.steps}", *(["--small"] if options.small else [])]
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    if options.device == "cpu":
        settings["ACCELERATE_USE_CPU"] = "1"
    part = [f"--part={'fsdp' if fsdp else 'plain'}", f"--folder={folder}"]
    subprocess.run([sys.executable, *launcher, __file__, *words, *part], check=True, env=settings)


def speed(folder: RunFolder) -> dict[str, float]:
    rows = folder.read("metrics.jsonl")
    found = {"images a second": statistics.median(row["samples_per_second"] for row in rows[1:])}
    return found | {key: max(row[key] for row in rows) for key in rows[0] if key.startswith("peak")}


def differences(one: RunFolder, other: RunFolder) -> dict[str, float]:
    """The largest absolute difference of weights, and of losses."""
    ends = [load_file(run.path / "checkpoints" / f"step-{EXACT}" / "model.safetensors") for run in (one, other)]
    weights = max(float((ends[0][key] - value).abs().max()) for key, value in ends[1].items())
    losses = [[row["loss"] for row in run.read("metrics.jsonl")] for run in (one, other)]
    return {"weights": weights, "losses": max(abs(a - b) for a, b in zip(*losses, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="smoke test with a model small enough for a CPU")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS / "fsdp-gpu.json")
    parser.add_argument("--part", choices=("plain", "fsdp"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        train(options.folder, options, options.part == "fsdp")
        return
    results: dict[str, Any] = {}
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="unskip-fsdp-") as name:
        folder = Path(name)
        for fsdp in (False, True):
            launch(folder, options, fsdp)
        for optimizer in OPTIMIZERS:
            fast, exact = (
                [RunFolder(named(folder, optimizer, precision, fsdp)) for fsdp in (False, True)]
                for precision, _ in lengths(options)
            )
            plain, sharded = (speed(each) for each in fast)
            results[optimizer] = {
                "plain": plain,
                "fsdp": sharded,
                "fsdp over plain": sharded["images a second"] / plain["images a second"],
                f"apart after {EXACT} steps in float32": differences(*exact),
            }
            print(optimizer, results[optimizer], flush=True)
    print(f"{time.perf_counter() - started:.0f} s")
    about = made_with(__file__, options.device, "timm", "accelerate")
    write_json(options.out, about | {"model": "small" if options.small else "vit_base_patch16_224", "results": results})


if __name__ == "__main__":
    main()
