"""Measures the cost of rewiring: training-step time, peak memory and compilation; time of audit and rewire.

    python benchmarks/rewire.py                                        # timm ViT-S on the CPU
    python benchmarks/rewire.py --device cuda --only cost --compiled   # timm ViT-B, eager and compiled
    python benchmarks/rewire.py --only compile --variants decay cut    # kernels, and the time to the first step
    python benchmarks/rewire.py --only search                          # audit and rewire on meta tensors

Every variant is a copy of one model and runs in the same process; in each round all of them do one step, in random
order. The ratio is the median over rounds of (variant / original of the same round). The control is a second copy of
the original: the spread of its ratio is the measurement noise.

Compilation is measured in a new process for each variant and round, with an empty cache and one compile thread: wall
and CPU time of the first training step under torch.compile, and the number of kernels in its code. The ratio is that of
CPU time, which depends less on other load on the machine.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import timm
import torch
from _record import made_with, write_json
from torch import nn

import unskip
from unskip import Anneal, Cut, Decay, Keep

COMPILED = ("original", "original again", "alpha 1", "decay", "cut", "anneal")
RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def variants(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Copies of the model: the original twice, and one for each shortcut rule."""
    rules = {"alpha 1": Keep(), "decay": Decay(0.6), "cut": Cut(), "anneal": Anneal(Keep(), Decay(0.6), steps=1000)}
    copies = {name: copy.deepcopy(model) for name in names}
    for name in rules.keys() & copies.keys():
        unskip.rewire(copies[name], rules[name], force=name == "alpha 1").step(500)
    return copies


def training_step(model: nn.Module, run: Callable[..., torch.Tensor], images: torch.Tensor) -> Callable[[], None]:
    """A function that does one training step: forward, loss, backward, AdamW."""
    device = images.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda")
    labels = torch.zeros(len(images), dtype=torch.long, device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = nn.functional.cross_entropy(run(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds(step: Callable[[], None], device: str) -> float:
    if device != "cuda":
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def peak(step: Callable[[], None]) -> int:
    """Peak bytes that a step allocates, in addition to those allocated before."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def compare(steps: dict[str, Callable[[], None]], device: str, rounds: int, seed: int) -> dict[str, dict[str, float]]:
    """Times the variants alternately; returns times and ratios to the original."""
    for step in steps.values():
        for _ in range(3):
            step()
    order, shuffle = list(steps), random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            times[name].append(seconds(steps[name], device))
    result = {}
    for name, values in times.items():
        ratios = sorted(value / base for value, base in zip(values, times["original"], strict=True))
        quarter = len(ratios) // 4
        result[name] = {
            "median_ms": 1e3 * statistics.median(values),
            "ratio": statistics.median(ratios),
            "ratio_low": ratios[quarter],
            "ratio_high": ratios[-quarter - 1],
        }
        if device == "cuda":
            result[name]["peak_mib"] = peak(steps[name]) / 2**20
    return result


def cost(device: str, names: list[str], compiled: bool, rounds: int, seed: int) -> dict[str, object]:
    """Step times and peak memory of every variant."""
    torch.manual_seed(seed)
    name, batch = ("vit_base_patch16_224", 128) if device == "cuda" else ("vit_small_patch16_224", 4)
    copies = variants(timm.create_model(name).to(device).train(), names)
    images = torch.randn(batch, 3, 224, 224, device=device)
    runs: dict[str, Callable[..., torch.Tensor]] = dict(copies)
    if compiled:
        for key, model in copies.items():
            torch._dynamo.reset()  # compile each variant without the guards of the others
            runs[key] = torch.compile(model)
            training_step(model, runs[key], images)()
    steps = {key: training_step(model, runs[key], images) for key, model in copies.items()}
    return {
        "model": name,
        "batch": batch,
        "mode": "compiled" if compiled else "eager",
        "rounds": rounds,
        "variants": compare(steps, device, rounds, seed),
    }


def first_step(name: str, device: str, seed: int) -> dict[str, float]:
    """Compiles one variant in this process: seconds until the first step is done, and kernels of both passes."""
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(seed)
    if device == "cuda":
        model, size = timm.create_model("vit_small_patch16_224"), 224
    else:  # a narrow model of the same depth
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "num_classes": 10}
        model, size = timm.create_model("vit_small_patch16_224", depth=12, **sizes), 32
    model = variants(model.to(device).train(), [name])[name]
    images = torch.randn(8, 3, size, size, device=device)
    step = training_step(model, torch.compile(model, fullgraph=True), images)
    begin, cpu = time.perf_counter(), cpu_seconds()
    _, codes = run_and_get_code(step)
    if device == "cuda":
        torch.cuda.synchronize()
    elapsed, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
    kernels = sum(len(re.findall(r"= async_compile\.(?:triton|cpp\w*)\(", code)) for code in codes)
    return {"seconds": elapsed, "cpu_seconds": cpu, "kernels": kernels}


def cpu_seconds() -> float:
    """CPU seconds of this process and its finished children, which include compilers."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def compiled_alone(name: str, device: str, seed: int) -> dict[str, float]:
    """Runs `first_step` in a new process with an empty compiler cache."""
    command = [sys.executable, __file__, "--device", device, "--seed", str(seed), "--first-step", name]
    with tempfile.TemporaryDirectory() as cache:
        caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def compilation(device: str, names: list[str], rounds: int, seed: int) -> dict[str, object]:
    """Measures the compilation of every variant, each in new processes, alternately."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    order, shuffle = list(names), random.Random(seed)
    for _ in range(rounds):
        shuffle.shuffle(order)
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:  # in parallel if there are enough cores
            for name, row in zip(order, pool.map(lambda name: compiled_alone(name, device, seed), order), strict=True):
                rows[name].append(row)
                print(f"  {name:15s} {row}", flush=True)
    seconds = {name: statistics.median(row["cpu_seconds"] for row in each) for name, each in rows.items()}
    return {
        "model": "vit_small_patch16_224" if device == "cuda" else "vit_small_patch16_224, width 64, 32 pixels",
        "mode": "compilation",
        "rounds": rounds,
        "variants": {
            name: {
                "cpu_seconds": seconds[name],
                "rounds": each,
                "ratio": seconds[name] / seconds["original"],
                "kernels": each[0]["kernels"],
                "kernel_ratio": each[0]["kernels"] / rows["original"][0]["kernels"],
            }
            for name, each in rows.items()
        },
    }


def search() -> list[dict[str, object]]:
    """Time of audit and rewire on meta tensors."""
    rows = []
    shapes = [(192, 12, 3), (192, 24, 3), (192, 48, 3), (768, 12, 12), (1024, 24, 16), (1408, 40, 16)]
    for width, depth, heads in shapes:
        with torch.device("meta"):
            model = timm.create_model("vit_base_patch16_224", embed_dim=width, depth=depth, num_heads=heads)
        times = []
        for call in (lambda m: unskip.audit(m), lambda m: unskip.rewire(m, Decay(0.6))):
            begin = time.perf_counter()
            call(model)
            times.append(time.perf_counter() - begin)
        parameters = sum(p.numel() for p in model.parameters())
        rows.append(
            {
                "width": width,
                "depth": depth,
                "sites": 2 * depth,
                "parameters": parameters,
                "audit_s": times[0],
                "rewire_s": times[1],
            }
        )
    return rows


def show(result: dict[str, object]) -> None:
    print(f"\n{result['model']}, batch {result['batch']}, {result['mode']}")
    for name, row in result["variants"].items():  # type: ignore[attr-defined]
        memory = f"  peak {row['peak_mib']:8.0f} MiB" if "peak_mib" in row else ""
        spread = f"[{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
        print(f"  {name:15s} {row['median_ms']:9.2f} ms  ratio {row['ratio']:.3f} {spread}{memory}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compiled", action="store_true", help="also compare compiled models")
    parser.add_argument("--only", choices=["search", "cost", "compile"], help="one part of the benchmark")
    parser.add_argument("--variants", nargs="+", default=list(COMPILED), choices=COMPILED, help="variants to compare")
    parser.add_argument(
        "--first-step", choices=COMPILED, help="compile one variant, and print time and number of kernels"
    )
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="keep the modes in the JSON, and add the others")
    parser.add_argument("--out", type=Path, default=None, help="folder of the JSON (default docs/results)")
    options = parser.parse_args()
    if "original" not in options.variants:
        options.variants.insert(0, "original")  # the reference of all ratios
    if options.first_step:
        print(json.dumps(first_step(options.first_step, options.device, options.seed)))
        return
    rounds = options.rounds or (60 if options.device == "cuda" else 20)
    out = options.out or RESULTS
    about = {**made_with(__file__, options.device, "timm"), "seed": options.seed}
    kind = "gpu" if options.device == "cuda" else "cpu"
    if options.only in (None, "compile"):
        result = compilation(options.device, options.variants, options.rounds or 3, options.seed)
        write_json(out / f"rewire-compile-{kind}.json", {**about, "results": [result]})
    if options.only in (None, "cost"):
        target = out / f"rewire-cost-{kind}.json"
        results = json.loads(target.read_text())["results"] if options.resume and target.exists() else []
        for compiled in [False, True] if options.compiled else [False]:
            if ("compiled" if compiled else "eager") in [row["mode"] for row in results]:
                continue
            results.append(cost(options.device, options.variants, compiled, rounds, options.seed))
            show(results[-1])
            write_json(target, {**about, "results": results})
    if options.only in (None, "search"):
        rows = search()
        for row in rows:
            print(
                f"  width {row['width']:5d} depth {row['depth']:3d}: audit {row['audit_s']:.2f} s, rewire "
                f"{row['rewire_s']:.2f} s"
            )
        write_json(out / "rewire-search.json", {**about, "results": rows})


if __name__ == "__main__":
    main()
