"""Measures the cost of skips at inference: latency, peak activation memory and FLOPs with and without them.

    python benchmarks/absorb_cost.py                  # writes docs/results/absorb-cost-cpu.json
    python benchmarks/absorb_cost.py --device cuda    # writes docs/results/absorb-cost-gpu.json

It compares a block without norms, one with a norm before its MLP, and a ViT, each with its MLP skips, without them
(cut, which costs the same as an absorbed block of the same width), and widened by d units. The variants alternate in
one process. A time is the median over the turns, and its ratio is to the variant with skips in the same turn. On the
CPU it runs one thread and reports CPU seconds, which do not depend on other load on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import unskip

ROOT = Path(__file__).resolve().parent.parent


class Block(nn.Module):
    """x + MLP(x), or MLP(x) without the skip; optionally with a norm before the MLP."""

    def __init__(self, d: int, h: int, skip: bool, norm: bool) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(d, h), nn.GELU(), nn.Linear(h, d)
        self.norm: nn.Module = nn.LayerNorm(d) if norm else nn.Identity()
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.down(self.act(self.up(self.norm(x))))
        return x + branch if self.skip else branch


class PeakMemory(TorchDispatchMode):
    """Tracks the peak number of bytes of live tensors that were created in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.users: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for created in (x for x in tree_leaves(out) if isinstance(x, Tensor)):
            pointer, size = created.untyped_storage().data_ptr(), created.untyped_storage().nbytes()
            if pointer in inputs and pointer not in self.users:
                continue  # a view of a weight or of the input
            self.users[pointer] = self.users.get(pointer, 0) + 1
            if self.users[pointer] == 1:
                self.now += size
                self.peak = max(self.peak, self.now)
            weakref.finalize(created, self._drop, pointer, size)
        return out

    def _drop(self, pointer: int, size: int) -> None:
        self.users[pointer] -= 1
        if not self.users[pointer]:
            del self.users[pointer]
            self.now -= size


def peak_bytes(run: Callable[[], Any], device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with PeakMemory() as tracked:
        run()
    return tracked.peak


def compare(variants: dict[str, nn.Module], x: Tensor, turns: int, device: str) -> dict[str, Any]:
    """Times the variants alternately; ratios are to the first variant."""

    def once(model: nn.Module) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(x)
            torch.cuda.synchronize()
            return time.perf_counter() - start
        start = time.process_time()
        model(x)
        return time.process_time() - start

    with torch.no_grad():
        for model in variants.values():
            for _ in range(3):
                model(x)
        times: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(turns):
            order = list(variants) if turn % 2 else list(variants)[::-1]
            for name in order:
                times[name].append(once(variants[name]))
        first = next(iter(variants))
        out = {}
        for name, model in variants.items():
            ratios = sorted(a / b for a, b in zip(times[name], times[first], strict=True))
            out[name] = {
                "milliseconds": 1e3 * statistics.median(times[name]),
                "ratio": statistics.median(ratios),
                "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
                "peak_mib": peak_bytes(lambda model=model: model(x), device) / 2**20,
                "parameters": sum(p.numel() for p in model.parameters()),
            }
        return out


def flops(d: int, h: int, tokens: int, skip: bool) -> int:
    """FLOPs of one block: two matrix products, and the addition of the skip."""
    return tokens * (4 * d * h + (d if skip else 0))


def products(model: nn.Module, x: torch.Tensor) -> int:
    """FLOPs of the matrix products and attention of a model."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model(x)
    return counted.get_total_flops()


def blocks(d: int, norm: bool, device: str, dtype: torch.dtype) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    h = 4 * d
    created = {"skip": Block(d, h, True, norm), "cut or absorbed": Block(d, h, False, norm)}
    if not norm:
        created["widened by d"] = Block(d, h + d, False, norm)
    return {name: model.to(device, dtype).eval() for name, model in created.items()}


def models(name: str, device: str, dtype: torch.dtype) -> dict[str, nn.Module]:
    import timm

    out = {}
    for what in ("skip", "MLP skips cut or absorbed", "MLPs widened by d", "all skips cut"):
        torch.manual_seed(0)
        model = timm.create_model(name, mlp_ratio=5 if "widened" in what else 4).eval()
        if what != "skip":
            unskip.rewire(model, unskip.Cut(), where=None if what.startswith("all") else "mlp")
        out[what] = model.to(device, dtype)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=101)
    parser.add_argument("--d", type=int, default=768)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        default=None,
        help="images per batch (default 1 and 32 on the CPU, 1 and 256 on a GPU)",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    options = parser.parse_args()
    device = options.device
    if device == "cpu":
        torch.set_num_threads(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    batches = options.batches or ([1, 256] if device == "cuda" else [1, 32])
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    record: dict[str, Any] = {
        "script": "benchmarks/absorb_cost.py",
        "device": f"{name}, {torch.get_num_threads()} threads",
        "dtype": str(dtype),
        "turns": options.turns,
        "load_average": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "unskip": unskip.__version__},
        "cases": [],
    }
    path = options.out / f"absorb-cost-{'gpu' if device == 'cuda' else 'cpu'}.json"
    g, d = torch.Generator().manual_seed(1), options.d
    for batch in batches:
        tokens = 197 * batch
        for norm in (False, True):
            x = torch.randn(batch, 197, d, generator=g).to(device, dtype)
            turns = options.turns if batch == 1 else max(options.turns // 5, 9)
            result = compare(blocks(d, norm, device, dtype), x, turns, device)
            for what, row in result.items():
                row["gflops"] = flops(d, 5 * d if "widened" in what else 4 * d, tokens, what == "skip") / 1e9
            what = "block behind a norm" if norm else "block without norms"
            record["cases"].append({"what": what, "d": d, "batch": batch, "tokens": tokens, "turns": turns, **result})
            print(json.dumps(record["cases"][-1]), flush=True)
        images = torch.randn(batch, 3, 224, 224, generator=g).to(device, dtype)
        turns = max(options.turns // (5 if batch == 1 else 20), 5)
        variants = models(options.model, device, dtype)
        result = compare(variants, images, turns, device)
        for what, row in result.items():
            row["gflops"] = products(variants[what], images) / 1e9
        record["cases"].append({"what": options.model, "batch": batch, "turns": turns, **result})
        print(json.dumps(record["cases"][-1]), flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
