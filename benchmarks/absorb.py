"""Measures the time and memory of an absorption verdict and of the verification of its certificate.

    python benchmarks/absorb.py                    # on the CPU; some minutes
    python benchmarks/absorb.py --device cuda
    python benchmarks/absorb.py --only growth      # only the growth with width, and its figure
    python benchmarks/absorb.py --threads 1 --beside OTHER   # CPU seconds, alternating with another checkout

The targets are: generic weights at 768 > 3072 in 2 s on two cores, heavy-tailed ones in 5 s, a planted positive in
15 s; 4096 > 16384 in 15 s and 4 GiB on two cores and in 0.1 s on a GPU; the 12 MLPs of a ViT-B, with and without their
norms, in 10 s. No other program solves this problem, so times are compared with one float64 product W_down W_up of the
same size, timed in the same process. Every case runs in its own process, which makes its peak memory measurable.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unskip import absorption
from unskip.absorption import Block, absorb

ROOT = Path(__file__).resolve().parent.parent
SIZES = (64, 128, 256, 512, 768)
# name: (description, target in seconds on the CPU, on a GPU)
CASES: dict[str, tuple[str, float | None, float | None]] = {
    "generic": ("768 > 3072, gelu, float32, N(0, 0.02)", 2.0, None),
    "trained-scale": ("768 > 3072, gelu, float32, N(0, 2): the trace test does not fire", 2.0, None),
    "heavy": ("768 > 3072, gelu, float32, log-normal rows and 8 outlier channels x 20", 5.0, None),
    "planted": ("768 > 3072, gelu, float32, a flip set of 1536 units", 15.0, None),
    "spare": ("768 > 3072, gelu, float32, N(0, 0.02), 384 dead units", 2.0, None),
    "large": ("4096 > 16384, gelu, float32, N(0, 0.02)", 15.0, 0.1),
    "large-hard": ("4096 > 16384, gelu, float32, N(0, 2)", 15.0, 0.1),
    "vit-b": ("scan of timm vit_base_patch16_224, random weights, 12 MLPs and their bare forms", 10.0, None),
}


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def block(case: str, device: str, d: int = 768) -> Block:
    g = torch.Generator().manual_seed(0)
    d = 4096 if case.startswith("large") else d
    h = 4 * d
    up, down = normal(g, h, d), normal(g, d, h)
    if case in ("generic", "large", "spare"):
        up, down = 0.02 * up, 0.02 * down
        if case == "spare":
            down[:, : h // 8] = 0
    elif case in ("trained-scale", "large-hard"):
        up, down = 2 * up, 2 * down
    elif case == "heavy":
        up, down = 2 * up * torch.exp(normal(g, h, 1)), 2 * down
        up[:, :8] *= 20
        down[:8] *= 20
    else:
        up, down = up.double() / d**0.5, down.double() / h**0.5
        chosen = torch.randperm(h, generator=g)[: h // 2]
        inverse = torch.linalg.pinv(up[chosen])
        down[:, chosen] += -inverse - down[:, chosen] @ up[chosen] @ inverse
        up, down = up.float(), down.float()
    zeros = torch.zeros(h, device=device), torch.zeros(d, device=device)
    return Block(up.to(device), down.to(device), up_bias=zeros[0], down_bias=zeros[1], activation="gelu")


def clock(device: str) -> float:
    """The time in seconds; CPU time if there is one thread, since other load on the machine does not change it."""
    if device == "cuda":
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


def measure(case: str, device: str, d: int = 768) -> dict[str, Any]:
    """Measures one case: seconds of the verdict and of its verification, and peak memory."""
    if case == "vit-b":
        import timm

        torch.manual_seed(0)
        model = timm.create_model("vit_base_patch16_224").to(device).eval()
        start = clock(device)
        scan = absorption.scan(model)
        middle = clock(device)
        verified = scan.verify()
        out: dict[str, Any] = {"status": scan.counts(), "sites": len(scan)}
    else:
        target = block(case, device, d)
        for first in ("generic", "trained-scale"):  # warm-up: imports and first kernel launches
            absorb(block(first, device, 256)).verify()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = clock(device)
        verdict = absorb(target)
        middle = clock(device)
        verified = verdict.verify()
        certificate = verdict.certificate
        out = {"status": verdict.status, "certificate": None if certificate is None else certificate.kind}
    end = clock(device)
    if case != "vit-b":
        out["flip_bound"] = verdict.flip_bound
        out["flip_bound_seconds"] = clock(device) - end
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    out |= {"seconds": end - start, "verdict_seconds": middle - start, "verify_seconds": end - middle}
    out |= {"verified": verified, "peak_gib": peak, "load_average": os.getloadavg()[0]}
    if device == "cuda":
        out["peak_gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if case != "vit-b":
        up, down = target.up.double(), target.down.double()
        start = clock(device)
        down @ up
        out["product_seconds"] = clock(device) - start
        out["ratio_to_product"] = out["seconds"] / out["product_seconds"]
    return out


def measure_in_process(case: str, device: str, d: int = 768, tree: Path = ROOT) -> dict[str, Any]:
    """Measures a case in a new process, with the sources of a checkout."""
    command = [sys.executable, __file__, "--device", device, "--case", case, "--d", str(d)]
    paths = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=paths)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare_checkouts(case: str, device: str, other: Path, times: int = 3) -> dict[str, Any]:
    """Runs this checkout and another one alternately; returns the best time of each and their ratio."""
    own, others = [], []
    for _ in range(times):
        own.append(measure_in_process(case, device))
        others.append(measure_in_process(case, device, tree=other))
    now, before = (min(each["seconds"] for each in runs) for runs in (own, others))
    statuses = [runs[0]["status"] for runs in (own, others)]
    commits = [_commit(tree) for tree in (ROOT, other)]
    out = {"seconds": now, "other_seconds": before, "ratio": now / before, "times": times, "statuses": statuses}
    return {**out, "commits": commits}


def _commit(tree: Path) -> str:
    words = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    from _study import drawing

    sheet, axes = drawing("absorb").subplots(figsize=(5, 3.2), constrained_layout=True)
    for case in dict.fromkeys(row["case"] for row in rows):
        points = [row for row in rows if row["case"] == case]
        axes.loglog([row["d"] for row in points], [row["seconds"] for row in points], marker="o", label=case)
    reference = [row for row in rows if row["case"] == rows[0]["case"]]
    axes.loglog(
        [row["d"] for row in reference], [row["product_seconds"] for row in reference], "k--", label="one product"
    )
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.minorticks_off()
    axes.set(xlabel="width d (hidden width 4 d)", ylabel="seconds, verified")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(path, metadata={"Date": None})


def write(path: Path, data: dict[str, Any], device: str) -> None:
    """Writes the JSON; called after every case, so that an interrupted run keeps its results."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine() + " CPU"
    about = {
        "script": "benchmarks/absorb.py",
        "device": f"{name}, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seed": 0,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, **data}, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", help="one case, or growth")
    parser.add_argument("--beside", type=Path, help="another checkout, run alternately with this one")
    parser.add_argument("--figure", action="store_true", help="draw the figure from the JSON without measuring")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--d", type=int, default=768, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder of the JSON")
    parser.add_argument("--threads", type=int, help="CPU threads; with 1 the times are CPU seconds")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.case:
        print(json.dumps(measure(options.case, options.device, options.d)))
        return
    path = options.out / f"absorb-{'gpu' if options.device == 'cuda' else 'cpu'}.json"
    part = options.only is not None or options.figure
    data = json.loads(path.read_text(encoding="utf-8")) if part and path.exists() else {"cases": {}, "growth": []}
    growth = ROOT / "docs" / "img" / f"absorb-growth-{path.stem.split('-')[1]}.svg"
    if options.figure:
        figure(data["growth"], growth)
        return
    for case, (what, on_cpu, on_gpu) in CASES.items():
        if options.only in (None, case):
            bar = on_gpu if options.device == "cuda" else on_cpu
            data["cases"][case] = {"what": what, "bar_seconds": bar, **measure_in_process(case, options.device)}
            if options.beside is not None:
                data["cases"][case]["beside"] = compare_checkouts(case, options.device, options.beside.resolve())
            print(case, json.dumps(data["cases"][case]))
            write(path, data, options.device)
    if options.only in (None, "growth"):
        data["growth"] = [
            {"case": case, "d": d, "h": 4 * d, **measure_in_process(case, options.device, d)}
            for case in ("trained-scale", "planted")
            for d in SIZES
        ]
        figure(data["growth"], growth)
        write(path, data, options.device)


if __name__ == "__main__":
    main()
