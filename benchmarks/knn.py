"""Compares the time of `unskip.evals.knn` with that of its matrix product alone.

    python benchmarks/knn.py                          # on a GPU: 1.28 million by 50,000 at 768 dims, ImageNet's size
    python benchmarks/knn.py --small --device cpu     # smoke test at a size for a CPU

    product   the cosine similarities of every chunk, not used further
    topk      the product and torch.topk over whole rows, the usual implementation
    knn       `unskip.evals.knn`: product, neighbours, votes, for all k

The JSON is written to docs/results/knn-gpu.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _record import made_with, write_json
from _turns import seconds

import unskip
from unskip.evals._knn import _CHUNK_BYTES

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--small", action="store_true", help="smoke test at a size for a CPU; writes no JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "knn-gpu.json")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; use --small --device cpu for a smoke test")
    count, queries, dim, classes = (40_000, 500, 384, 100) if options.small else (1_281_167, 50_000, 768, 1000)
    draw = torch.Generator(options.device).manual_seed(0)
    labels, truth = (torch.arange(n, device=options.device) % classes for n in (count, queries))
    x = torch.randn(count, dim, device=options.device, generator=draw)
    y = torch.randn(queries, dim, device=options.device, generator=draw)
    rows = max(1, _CHUNK_BYTES[options.device] // (4 * count))

    def product(top: bool) -> None:
        for part in y.split(rows):
            cosines = part @ x.T
            if top:
                cosines.topk(200)

    tasks: dict[str, Callable[[], Any]] = {
        "product": lambda: product(False),
        "topk": lambda: product(True),
        "knn": lambda: unskip.evals.knn(x, labels, y, truth),
    }
    result: dict[str, list[float]] = {name: [] for name in tasks}
    memory = 0.0
    for turn in range(options.rounds + 1):
        for name, each in tasks.items():
            if options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            elapsed = seconds(each, options.device)
            if turn:  # the first turn is warm-up
                result[name].append(elapsed)
            if options.device == "cuda" and name == "knn":
                memory = torch.cuda.max_memory_allocated() / 2**30
    results: dict[str, Any] = {name: statistics.median(values) for name, values in result.items()}
    results |= {"knn over product": results["knn"] / results["product"], "GiB at most": memory, "rounds": result}
    results["TFLOP/s of the product"] = 2 * count * queries * dim / results["product"] / 1e12
    for name in tasks:
        print(f"{name:8s} {results[name]:8.3f} s")
    print(f"knn over product {results['knn over product']:.2f}, {memory:.1f} GiB at most")
    record = {
        **made_with(__file__, options.device),
        "settings": {"train": count, "test": queries, "dim": dim, "classes": classes, "precision": "float32, no TF32"},
        "results": results,
    }
    if not options.small:
        write_json(options.out, record)


if __name__ == "__main__":
    main()
