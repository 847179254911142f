"""Measures the time and memory of `unskip.measure`: timm ViT-B at 224 px, 8 images.

    python benchmarks/measure.py                   # on the CPU
    python benchmarks/measure.py --device cuda

The targets are 10 minutes on two CPU cores and one minute on a GPU. Time is also given as a multiple of one forward and
backward pass over the same images, measured in the same process.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import timm
import torch
from _record import made_with, write_json

import unskip

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON (default docs/results)")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    torch.manual_seed(0)
    model = timm.create_model(options.model).to(options.device)
    images = unskip.data.batch(f"random:{options.images}", size=224).to(options.device)

    def passes() -> float:
        start = time.perf_counter()
        model(images).square().sum().backward()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    passes()
    reference = min(passes() for _ in range(3))
    model.zero_grad(set_to_none=True)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    measurement = unskip.measure(model, images)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    data = {
        **made_with(__file__, "cuda" if cuda else "cpu", "timm"),
        "seed": 0,
        "model": options.model,
        "images": options.images,
        "seconds": seconds,
        "forward_and_backward_seconds": reference,
        "ratio": seconds / reference,
        "peak_gib": peak / 2**30,
        "peak_is": "of the GPU's allocator" if cuda else "of the process",
        "network": measurement.network.to_dict() if measurement.network is not None else None,
        "notes": list(measurement.notes),
    }
    write_json(options.out / f"measure-{'gpu' if cuda else 'cpu'}.json", data)
    print(measurement)
    print(f"{seconds:.1f} s, {seconds / reference:.0f} forward and backward passes; peak {data['peak_gib']:.1f} GiB")


if __name__ == "__main__":
    main()
