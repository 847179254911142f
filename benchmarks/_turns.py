"""Shared by the benchmarks of training steps (train_*.py): times several models in turn in one process."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _record import made_with, write_json
from torch import Tensor, nn

Step = Callable[[], None]


def arguments(about: str | None, batch: int, steps: int, out: Path) -> argparse.Namespace:
    """Parses the command line of a benchmark of training steps."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--small", action="store_true", help="a smoke test that also runs on a CPU; nothing is written")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--mode", default="default", help="mode of torch.compile for all models, such as max-autotune-no-cudagraphs"
    )
    parser.add_argument(
        "--attention", choices=["any", "cudnn", "flash"], default="any", help="attention kernel for all models"
    )
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; --small --device cpu is a smoke test")
    return options


def vit(name: str, sizes: dict[str, int], **more: Any) -> nn.Module:
    """A timm backbone without a classifier."""
    import timm

    shape = {"img_size": sizes["size"], "patch_size": sizes["patch"], "embed_dim": sizes["dim"]}
    shape |= {"depth": sizes["depth"], "num_heads": sizes["heads"]}
    model: nn.Module = timm.create_model(name, num_classes=0, **shape, **more)
    return model


def attention(name: str) -> contextlib.AbstractContextManager[object]:
    """A context with one attention kernel of torch, or with its own choice ("any")."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    return sdpa_kernel(kernels[name]) if name in kernels else contextlib.nullcontext()


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall time of a call, including its work on the GPU."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    begin = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begin


def pace(step: Step, steps: int, images: Tensor) -> float:
    """Images per second of a training step."""

    def loop() -> None:
        for _ in range(steps):
            step()

    return len(images) * steps / seconds(loop, images.device.type)


def turns(makers: dict[str, Callable[[], Step]], images: Tensor, steps: int, rounds: int) -> dict[str, Any]:
    """Images per second of each model, the median over rounds, and its ratio to the fastest "published" one."""
    result: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    prepared: dict[str, Step] = {}
    for name, make in makers.items():
        torch.manual_seed(0)
        prepared[name] = make()
        if images.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        pace(prepared[name], 5, images)  # compiles
        if images.is_cuda:
            memory[name] = (torch.cuda.max_memory_allocated() - held) / 2**30
        print(f"{name}: compiled", flush=True)
    for _ in range(rounds):
        for name, step in prepared.items():
            result.setdefault(name, []).append(pace(step, steps, images))
    peers = [name for name in result if name.startswith("published")]
    fastest = max(peers, key=lambda name: statistics.median(result[name]), default=None)
    results: dict[str, Any] = {}
    for name, values in result.items():
        row: dict[str, Any] = {"images a second": statistics.median(values), "rounds": values}
        if name in memory:
            row["GiB"] = memory[name]
        if fastest is not None:
            ratios = [a / b for a, b in zip(values, result[fastest], strict=True)]
            row["over the fastest published"] = statistics.median(ratios)
        ratio = row.get("over the fastest published", float("nan"))
        print(f"{name:18s} {row['images a second']:8.0f} img/s  {ratio:.3f}  {memory.get(name, 0):.1f} GiB")
        results[name] = row
    return results


def write(script: str, options: argparse.Namespace, settings: dict[str, Any], **result: Any) -> None:
    """Writes the record, unless --small."""
    if options.small:
        return
    settings = {"mode": options.mode, "attention": options.attention, **settings}
    write_json(options.out, {**made_with(script, options.device, "timm"), "settings": settings, **result})
