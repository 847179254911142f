"""Breaks down the time of a training step of each recipe: kernels by kind, launch gaps, and share of peak matrix rate.

    python benchmarks/roofline.py                         # on a GPU
    python benchmarks/roofline.py --only dino,lm
    python benchmarks/roofline.py --small --device cpu    # smoke test with tiny models, not compiled

    supervised    ViT-B/16, 224 px, mixup, cutmix and random erasing as in the preset
    mae           plain MAE ViT-B/16
    sit           plain SiT-B/2 on 4 x 32 x 32, with EMA
    dino          ViT-S/16, 2 global crops of 224 px and 8 local crops of 96 px, from bytes on the device
    lm            the preset stdlib-small: GPT-2 of 10.8 million parameters, 256 tokens
    tiny          the study skipless_tiny.py: supervised, ViT-S with patches of 8, 64 px, SOAP, one CUDA graph
    dino-graph    dino and lm with forward and backward as one CUDA graph
    lm-graph

Steps are those of the recipe in its training loop: bf16, compiled, AdamW (SOAP for tiny), with the feed, clipping, EMA
and schedules. On a GPU each recipe has its own process: they compile in parallel, and are measured one after the other.
Some steps are timed, then others are traced. Launch gaps are the part of the step time in which no kernel runs.
Operations are those of matrix products, convolutions and attention in the forward and backward pass, counted by torch;
causal attention is counted in full. The matrix rate is that of an 8192 x 8192 x 8192 product in bf16, measured in the
same run. The JSON is docs/results/roofline-gpu.json, or build/roofline-cpu.json without a GPU; recipes that --only
excludes keep their rows.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from _kernels import DATA, KINDS, busy, by_kind, kernels_of, largest
from _record import made_with, write_json
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile, record_function
from torch.utils.flop_counter import FlopCounterMode

import unskip
from unskip import recipes
from unskip.data import ImageSet
from unskip.recipes import build_task
from unskip.training import RunFolder, run_task

ROOT = Path(__file__).resolve().parent.parent
PLAIN = {"shortcut": "keep", "long_skips": False}
WIDE = "class_token=false,global_pool=avg,depth=12,embed_dim=384,num_heads=12,attn_head_dim=64"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {  # recipe, preset, fields
    "supervised": ("supervised", "vit-b16", {"batch": 256, "randaugment": None}),  # RandAugment is for images on disk
    "mae": ("mae", "vit-b16", {"batch": 512, "init": "default", **PLAIN}),
    "sit": ("sit", "sit-b2", {"batch": 128, "size": 32, "latents": None, "online_images": 0, **PLAIN}),
    "dino": ("dino", "vit-small", {"batch": 64}),
    "lm": ("lm", "stdlib-small", {}),
    "tiny": ("supervised", "tiny-imagenet", {"optimizer": "soap", "lr": 3e-3, "graph": True, "model_args": WIDE}),
}
CASES |= {f"{name}-graph": (*CASES[name][:2], {**CASES[name][2], "graph": True}) for name in ("dino", "lm")}
TINY = "depth=2,embed_dim=48,num_heads=2"
SMALL: dict[str, dict[str, Any]] = {
    "supervised": {"size": 32, "patch": 8, "model_args": TINY, "batch": 8},
    "mae": {"size": 32, "patch": 8, "model_args": TINY, "batch": 8, "decoder_width": 32, "decoder_depth": 2}
    | {"decoder_heads": 2},
    "sit": {"size": 8, "model_args": "width=32,depth=2,heads=2", "batch": 8},
    "dino": {"size": 32, "patch": 8, "local_size": 16, "model_args": TINY, "batch": 8, "projection": 256, "hidden": 64},
    "lm": {"model_args": "hidden_size=64,num_hidden_layers=2,num_attention_heads=2", "context": 32, "batch": 4},
    "tiny": {"size": 32, "model_args": TINY, "batch": 8, "graph": False},
}
SMALL |= {f"{name}-graph": {**SMALL[name], "graph": False} for name in ("dino", "lm")}
LARGEST = 12  # number of kernels listed in the record
_SHARED: list[Any] = []  # the barrier and the lock of this process, if there are several


class Finished(Exception):
    """Ends the training loop when all steps are measured."""


class ProfiledFeed:
    """A feed whose batches are created in a profiler range."""

    def __init__(self, feed: Any) -> None:
        self.feed = feed
        self.steps_per_epoch = feed.steps_per_epoch

    def iterate(self, *where: Any) -> Iterator[Any]:
        batches = self.feed.iterate(*where)
        while True:
            with record_function(DATA):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


def config_of(name: str, folder: Path, options: argparse.Namespace) -> Any:
    """The config of a recipe at full size, or for --small at a size for a CPU."""
    recipe, preset, fields = CASES[name]
    fields = {**fields, **(SMALL[name] if options.small else {}), "device": options.device, "health": False}
    if recipe == "lm":  # faster than reading the standard library
        text = folder / "squares.txt"
        text.write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(100_000)))
        fields |= {"data": str(text), "cache": str(folder / "cache")}
    fields |= {"compile": not options.small, "evaluate_every": None, "checkpoint_every": 10**9, "log_every": 10**9}
    return getattr(recipes, recipe)(preset, steps=1000, **fields)


def opener(config: Any, channels: int) -> Callable[..., ImageSet]:
    """A replacement for `open_images` that returns random images of the size in a config."""

    def opened(name: str, split: str, **_: Any) -> ImageSet:
        random = torch.Generator().manual_seed(0)
        count = config.batch if split == "train" else 64
        pixels = torch.randint(256, (count, channels, config.size, config.size), dtype=torch.uint8, generator=random)
        labels = torch.arange(count) % 16  # kNN needs training images of every test class
        return ImageSet(name, split, tuple(map(str, range(1000))), labels, pixels)

    return opened


def operations(task: Any, samples: int = 4) -> float:
    """Floating-point operations per sample of the forward and backward pass, without augmentation."""
    part = [each[:samples] for each in next(iter(task.feed.iterate(0, 1)))]
    crops = getattr(task.loss.__self__, "crops", None)
    if crops is not None:
        made = crops.made(*part[:3])
        crops.made = lambda *_: made
    task.model.train()
    counter = FlopCounterMode(display=False)
    with torch.autocast(part[0].device.type, torch.bfloat16), sdpa_kernel(SDPBackend.MATH), counter:
        task.loss(task.model, part)[0].backward()
    task.optimizer.zero_grad(set_to_none=True)
    if crops is not None:
        del crops.made  # restores the method
    return counter.get_total_flops() / samples


def measured(name: str, options: argparse.Namespace, ready: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Measures the steps of one recipe, by kind of work; calls `ready` when its model is compiled."""
    wait = torch.cuda.synchronize if options.device == "cuda" else (lambda: None)
    with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore", unskip.errors.UnskipWarning)
        folder = Path(temporary)
        config = config_of(name, folder, options)
        torch.manual_seed(config.seed)
        task, schedule = build_task(config, opener(config, 4 if name == "sit" else 3))
        flops = operations(task)
        task.feed = ProfiledFeed(task.feed)
        if (crops := getattr(task.loss.__self__, "crops", None)) is not None:
            crops.made = record_function(DATA)(crops.made)
        after, trace, marks = task.after_step, profile(), [0.0, 0.0]

        def watched(step: int) -> None:
            if after is not None:
                after(step)
            if step == min(1, options.warm):
                wait()
                ready()
            if step == options.warm:
                wait()
                marks[0] = time.perf_counter()
            elif step == options.warm + options.steps:
                wait()
                marks[1] = time.perf_counter()
                trace.start()
            elif step == options.warm + options.steps + options.traced:
                wait()
                trace.stop()
                raise Finished

        task.after_step = watched
        with contextlib.suppress(Finished):
            run_task(task, schedule, RunFolder.create(folder / "run", {}, options.device), quiet=True)
        trace.export_chrome_trace(str(folder / "trace.json"))
        kernels = kernels_of(folder / "trace.json")
        step = 1000 * (marks[1] - marks[0]) / options.steps
        each = 1 / 1000 / options.traced  # converts microseconds of the trace to milliseconds per step
        kernel_ms = each * busy(kernels)
        return {
            "batch": config.batch,
            "ms a step": step,
            "ms a step by kind": {kind: each * found for kind, found in by_kind(kernels).items()},
            "ms a step without a kernel": max(0.0, step - kernel_ms),
            "ms a step with a kernel": kernel_ms,
            "kernels a step": len(kernels) / options.traced,
            "samples a second": 1000 * config.batch / step,
            "TFLOP a step": flops * config.batch / 1e12,
            "TFLOP/s": flops * config.batch / step / 1e9,
            "largest": [[kernel, kind, each * found] for kernel, kind, found in largest(kernels, LARGEST)],
        }


def matrix_rate(device: str, size: int) -> float:
    """TFLOP/s of the product of two random square bf16 matrices; the median of five."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    rates = []
    for _ in range(6):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        rates.append(20 * 2 * size**3 / (time.perf_counter() - begin) / 1e12)
    return sorted(rates[1:])[2]


def share(*turn: Any) -> None:
    """Stores what the processes share: a barrier for compiled models, and a lock held while measuring."""
    _SHARED[:] = turn


def in_turn(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs `measured` in one of several processes."""
    barrier, lock = _SHARED
    with contextlib.ExitStack() as held:

        def ready() -> None:
            with contextlib.suppress(threading.BrokenBarrierError):  # another process failed
                barrier.wait()
            held.enter_context(lock)

        try:
            return measured(name, options, ready)
        except BaseException:
            barrier.abort()
            raise


def all_measured(names: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The results of each recipe, measured in one process each, or all in this process."""
    if not options.together:
        rows = {}
        for name in names:
            rows[name] = measured(name, options)
            torch.compiler.reset()
            gc.collect()
        return rows
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    start = multiprocessing.get_context("spawn")
    shared = (start.Barrier(len(names)), start.Lock())
    with ProcessPoolExecutor(len(names), start, initializer=share, initargs=shared) as pool:
        running = {name: pool.submit(in_turn, name, options) for name in names}
        done = {}
        for name, each in running.items():
            try:
                done[name] = each.result()
            except Exception as error:  # the others are still measured
                print(f"{name} could not be measured: {error!r}", flush=True)
        return done


def show(record: dict[str, Any]) -> None:
    """Prints the most expensive kernels of each recipe, then the table."""
    results = record["results"]
    for name, row in results.items():
        print(f"\n{name}: {row['kernels a step']:.0f} kernels a step, the largest:")
        for kernel, kind, found in row["largest"]:
            print(f"  {found:8.3f} ms  {kind:24s} {kernel[:100]}")
    print(f"\nbf16 matrix products: {record['matrix products, TFLOP/s']:.0f} TFLOP/s\n")
    print(f"{'share of the step':26s}" + "".join(f"{name:>12s}" for name in results))
    shares = {kind: [row["ms a step by kind"][kind] / row["ms a step"] for row in results.values()] for kind in KINDS}
    shares["launch gaps"] = [row["ms a step without a kernel"] / row["ms a step"] for row in results.values()]
    shares["of the matrix rate"] = [row["share of the matrix rate"] for row in results.values()]
    for kind, values in shares.items():
        print(f"{kind:26s}" + "".join(f"{value:12.1%}" for value in values))
    for key in ("ms a step", "samples a second", "TFLOP/s"):
        print(f"{key:26s}" + "".join(f"{row[key]:12.1f}" for row in results.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--small", action="store_true", help="smoke test with tiny models, not compiled")
    parser.add_argument("--only", default=",".join(CASES), help="recipes, separated by commas")
    parser.add_argument("--warm", type=int, default=5, help="warm-up steps")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--traced", type=int, default=3, help="traced steps")
    parser.add_argument(
        "--together", action=argparse.BooleanOptionalAction, help="one process per recipe (default on a GPU)"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; use --small --device cpu for a smoke test")
    gpu = options.device == "cuda"
    out = options.out or (ROOT / "docs/results/roofline-gpu.json" if gpu else ROOT / "build/roofline-cpu.json")
    names = options.only.split(",")
    options.together = gpu if options.together is None else options.together
    rate = matrix_rate(options.device, 8192 if gpu else 256)
    settings = {"steps": options.steps, "traced": options.traced, "precision": "bf16", "compile": not options.small}
    record: dict[str, Any] = {**made_with(__file__, options.device, "timm", "transformers"), "settings": settings}
    before = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    old_results = before["results"] if before.get("settings") == settings else {}
    record |= {"matrix products, TFLOP/s": rate, "results": old_results}
    done = all_measured(names, options)
    for name, row in done.items():
        record["results"][name] = {**row, "share of the matrix rate": row["TFLOP/s"] / rate}
    write_json(out, record)
    show(record)
    if missing := set(names) - done.keys():
        raise SystemExit(f"not measured: {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
