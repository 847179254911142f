"""Compares the speed of the whole supervised training loop with that of the bare compiled step.

    python benchmarks/train.py                         # on a GPU: ViT-B/16 at 224 px, and 192 x 12 at 32 px
    python benchmarks/train.py --small --device cpu    # smoke test at a size for a CPU

    bare      the compiled timm model, one float batch on the device, cross-entropy, bf16 autocast, fused AdamW
    + clip    the same with gradient clipping and training accuracy, as in the recipe
    loop      `unskip.training.train`: bytes on the device, random resized crop and flip, clip, log, schedule
    feed      only the batches of the loop, without a model

The bare step and the loop alternate, and the ratio is of adjacent measurements. The JSON is written to
docs/results/train-gpu.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from _record import made_with, write_json
from _turns import seconds
from torch.nn import functional as F

import unskip
from unskip.data import Augment, Feed, ImageSet
from unskip.training import RunFolder, Schedule, Task, run_task

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
CASES: dict[str, dict[str, Any]] = {
    "vit_base_patch16_224, 224 px, batch 256": {"name": "vit_base_patch16_224", "size": 224, "batch": 256},
    "ViT 192 x 12, 32 px, batch 512": {
        "name": "vit_tiny_patch16_224",
        "size": 32,
        "batch": 512,
        "arguments": {"img_size": 32, "patch_size": 4},
    },
}
SMALL: dict[str, dict[str, Any]] = {
    "ViT 48 x 2, 32 px, batch 16": {
        "name": "vit_tiny_patch16_224",
        "size": 32,
        "batch": 16,
        "arguments": {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48},
    }
}


class Case:
    """A model and batch size, with methods that measure images per second."""

    def __init__(self, name: str, size: int, batch: int, arguments: dict[str, Any] | None = None) -> None:
        self.name, self.size, self.batch, self.arguments = name, size, batch, arguments or {}

    def model(self, device: str) -> torch.nn.Module:
        torch.manual_seed(0)
        return timm.create_model(self.name, num_classes=1000, **self.arguments).to(device).train()

    def images(self) -> ImageSet:
        random = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (8 * self.batch, 3, self.size, self.size), dtype=torch.uint8, generator=random)
        labels = torch.randint(0, 1000, (len(pixels),), generator=random)
        return ImageSet("made", "train", tuple(map(str, range(1000))), labels, pixels)

    def bare(self, device: str, steps: int, clip: bool) -> Callable[[], float]:
        model = self.model(device)
        forward = torch.compile(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=True)
        images = torch.randn(self.batch, 3, self.size, self.size, device=device)
        labels = torch.randint(0, 1000, (self.batch,), device=device)

        def step() -> None:
            with torch.autocast(device, torch.bfloat16):
                logits = forward(images)
            loss = F.cross_entropy(logits.float(), labels, label_smoothing=0.1)
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                (logits.argmax(-1) == labels).float().mean()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for _ in range(5):
            step()
        return lambda: self.batch * steps / seconds(lambda: [step() for _ in range(steps)], device)

    def loop(self, device: str, steps: int, compiled: torch.nn.Module, feed: Feed, graph: bool = False) -> float:
        """Images per second of the whole loop with a new optimizer, without the first third of the steps."""
        optimizer = unskip.optim.build(compiled, "adamw", 1e-4, 0.05)

        def loss(network: Any, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            images, labels = batch
            logits = network(images).float()
            right = (logits.argmax(-1) == labels).float().mean()
            return F.cross_entropy(logits, labels, label_smoothing=0.1), {"train_accuracy": right}

        task = Task(compiled, feed, loss, optimizer, save=lambda model, folder: None)
        third = max(1, steps // 2)
        schedule = Schedule(
            3 * third,
            warmup=third,
            precision="bf16",
            clip=1.0,
            compile=True,
            graph=graph,
            log_every=third,
            checkpoint_every=10**9,
        )
        with tempfile.TemporaryDirectory() as folder:
            run = RunFolder.create(f"{folder}/run", {}, device)
            run_task(task, schedule, run, quiet=True)
            rows = run.read("metrics.jsonl")[1:]
        return sum(third * self.batch for _ in rows) / sum(row["seconds"] for row in rows)

    def feed(self, device: str) -> Feed:
        return Feed(self.images(), self.batch, self.size, seed=0, augment=Augment(crop="resized"), device=device)


def compare(case: Case, device: str, steps: int, rounds: int) -> dict[str, Any]:
    """Median images per second of each variant over rounds, and ratios of adjacent measurements."""
    bare, clipped = case.bare(device, steps, clip=False), case.bare(device, steps, clip=True)
    model, feed = case.model(device), case.feed(device)
    rates: dict[str, list[float]] = {"bare": [], "+ clip": [], "loop": [], "loop, one graph": [], "feed": []}
    case.loop(device, 4, model, feed)  # compilation
    for _ in range(rounds):
        rates["bare"].append(bare())
        rates["+ clip"].append(clipped())
        rates["loop"].append(case.loop(device, steps, model, feed))
        rates["loop, one graph"].append(case.loop(device, steps, model, feed, graph=True))
        batches = 4 * steps
        rates["feed"].append(
            case.batch * batches / seconds(lambda: [None for _ in feed.iterate(0, batches)], device)  # noqa: B023
        )
    ratios = [a / b for a, b in zip(rates["loop"], rates["bare"], strict=True)]
    overheads = [b / a - 1 for a, b in zip(rates["loop"], rates["+ clip"], strict=True)]
    result: dict[str, Any] = {key: statistics.median(values) for key, values in rates.items()}
    result |= {"loop over bare": statistics.median(ratios), "ratios": ratios}
    result |= {"overhead over bare + clip": statistics.median(overheads), "rounds": rates}
    if device == "cuda":
        result["kernels"] = kernels(lambda: case.loop(device, 4, model, feed))
    return result


def kernels(work: Callable[[], object]) -> dict[str, float]:
    """Share of device time by kind of kernel, in a few steps of the loop."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    kinds = {"attention": ("flash", "fmha", "cudnn_generated"), "matrix products": ("gemm", "nvjet", "cutlass")}
    kinds |= {"optimizer, clip": ("multi_tensor", "foreach", "lpnorm"), "fused by the compiler": ("triton",)}
    kinds |= {"copies": ("memcpy", "memset")}
    times: dict[str, float] = {}
    for event in trace.key_averages():
        name = event.key.lower()
        if "dtoh" in name:  # the checkpoint at the end, not part of a step
            continue
        kind = next((kind for kind, words in kinds.items() if any(word in name for word in words)), "other")
        times[kind] = times.get(kind, 0.0) + event.self_device_time_total
    return {kind: time / sum(times.values()) for kind, time in sorted(times.items(), key=lambda item: -item[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--small", action="store_true", help="smoke test with a model for a CPU; writes no JSON")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; use --small --device cpu for a smoke test")
    record: dict[str, Any] = {
        **made_with(__file__, options.device, "timm"),
        "unit": "images a second",
        "results": {},
    }
    for key, settings in (SMALL if options.small else CASES).items():
        result = compare(Case(**settings), options.device, options.steps, options.rounds)
        record["results"][key] = result
        print(f"\n{key}")
        for name in ("bare", "+ clip", "loop", "loop, one graph", "feed"):
            print(f"  {name:15s} {result[name]:10.0f} img/s")
        print(f"  loop over bare {result['loop over bare']:.3f}, overhead {result['overhead over bare + clip']:+.2%}")
        for kind, share in result.get("kernels", {}).items():
            print(f"    {kind:24s} {share:6.1%}")
        if not options.small:
            write_json(options.out / "train-gpu.json", record)


if __name__ == "__main__":
    main()
