"""Sharded against whole weights on one GPU: what FSDP2 costs at world size 1, and whether it trains the same model.

    python benchmarks/fsdp.py                              # one GPU, some minutes; docs/results/fsdp-gpu.json
    python benchmarks/fsdp.py --device cpu --small --out FILE.json

The same runs by the command line with each optimizer, without --fsdp and under torchrun with it: ViT-B/16 at 224 px on
digits that are enlarged on the device, bf16, not compiled. Images a second are the median of the logged rows after the
first; losses and weights are compared at the end of a shorter run in float32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _record import made_with, write_json
from safetensors.torch import load_file

from unskip.training import RunFolder

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
OPTIMIZERS = ("adamw", "soap", "muon")
LARGE = ["--model=timm:vit_base_patch16_224", "--model-args=", "--size=224", "--patch=16", "--batch=128"]
SMALL = ["--model-args=depth=2,embed_dim=32,num_heads=2", "--batch=32"]


def run(out: Path, options: argparse.Namespace, optimizer: str, steps: int, precision: str, fsdp: bool) -> RunFolder:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"] if fsdp else []
    words = ["--preset=digits", *(SMALL if options.small else LARGE), f"--optimizer={optimizer}", f"--steps={steps}"]
    words += [f"--precision={precision}", "--log-every=10", "--lr=1e-4", "--ema=0.99", "--no-health", "--quiet"]
    words += [f"--device={options.device}", f"--out={out}", *(["--fsdp"] if fsdp else [])]
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    if options.device == "cpu":
        settings["ACCELERATE_USE_CPU"] = "1"
    subprocess.run([sys.executable, *launcher, "-m", "unskip", "train", "supervised", *words], check=True, env=settings)
    return RunFolder(out)


def speed(folder: RunFolder) -> dict[str, float]:
    rows = folder.read("metrics.jsonl")
    found = {"images a second": statistics.median(row["samples_per_second"] for row in rows[1:])}
    return found | {key: max(row[key] for row in rows) for key in rows[0] if key.startswith("peak")}


def apart(one: RunFolder, other: RunFolder, steps: int) -> dict[str, float]:
    """The largest difference of weights, and of losses."""
    ends = [load_file(run.path / "checkpoints" / f"step-{steps}" / "model.safetensors") for run in (one, other)]
    weights = max(float((ends[0][key] - value).abs().max()) for key, value in ends[1].items())
    losses = [[row["loss"] for row in run.read("metrics.jsonl")] for run in (one, other)]
    return {"weights": weights, "losses": max(abs(a - b) for a, b in zip(*losses, strict=True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a size for a CPU, to see that it runs")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS / "fsdp-gpu.json")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    both = (False, True)  # without and with --fsdp
    with tempfile.TemporaryDirectory(prefix="unskip-fsdp-") as name:
        folder = Path(name)
        for optimizer in OPTIMIZERS:
            fast, exact = (
                [run(folder / f"{optimizer}-{precision}-{on}", options, optimizer, steps, precision, on) for on in both]
                for precision, steps in (("bf16", options.steps), ("float32", 10))
            )
            plain, sharded = (speed(each) for each in fast)
            results[optimizer] = {
                "plain": plain,
                "fsdp": sharded,
                "fsdp over plain": sharded["images a second"] / plain["images a second"],
                "apart after 10 steps in float32": apart(*exact, 10),
            }
            print(optimizer, results[optimizer], flush=True)
    about = made_with(__file__, options.device, "timm", "accelerate")
    write_json(options.out, about | {"model": "small" if options.small else "vit_base_patch16_224", "results": results})


if __name__ == "__main__":
    main()
