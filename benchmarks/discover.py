"""Compares the speed of batched TokenCut, `unskip.evals.tokencut`, with scipy's eigensolver on single images.

    python benchmarks/discover.py                                   # on the CPU, 2 threads
    python benchmarks/discover.py --device cuda                     # on a GPU, compared with scipy on its host
    python benchmarks/discover.py --images DATA/pets-{split}.parquet   # graphs of real images

    solver    second eigenvectors of given graphs, compared with eigh(D - A, D, subset_by_index=[1, 1])
    whole     features to masks, compared with the published algorithm in numpy and scipy

scipy runs with 1, 2, 4, ... threads, and its best time is used. Features are normalised patches of pixels with some
noise. Graphs of --images have spectra as varied as those of real features, and the targets are for them. Synthetic
images, an object in noise, are the worst case: the second eigenvalue lies at the edge of a bulk, and most graphs need
the dense solver. The JSON is written to docs/results/discover-{cpu,gpu}.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from _record import made_with, write_json
from _turns import seconds
from scipy import linalg, ndimage
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn import functional as F

import unskip
from unskip.evals._eigen import second_eigenvectors
from unskip.evals._tokencut import _edges

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def features(side: int, count: int, images: str | None) -> Tensor:
    """Features (count, side * side, 192): patches of 8 x 8 pixels."""
    draw = torch.Generator().manual_seed(0)
    if images is None:
        rows, columns = torch.meshgrid(torch.arange(8 * side), torch.arange(8 * side), indexing="ij")
        middle = torch.rand(count, 2, 1, 1, generator=draw) * 8 * side
        inside = (rows - middle[:, 0]) ** 2 + (columns - middle[:, 1]) ** 2 < (2.2 * side) ** 2
        colours = torch.rand(count, 2, 3, 1, 1, generator=draw) * 255
        pixels = torch.where(inside[:, None], colours[:, 0], colours[:, 1])
        pixels = pixels + 60 * torch.randn(pixels.shape, generator=draw)
    else:
        loaded = unskip.data.open_images(images, "test").images
        assert loaded is not None
        pixels = F.interpolate(loaded[torch.arange(count) % len(loaded)].float(), (8 * side, 8 * side), mode="bilinear")
    patches = F.unfold(pixels - pixels.mean((2, 3), keepdim=True), 8, stride=8).mT
    unit = F.normalize(patches, dim=2)
    return unit + 0.06 * torch.randn(unit.shape, generator=draw)


def published(x: numpy.ndarray, side: int) -> numpy.ndarray:
    """The mask (side, side) that the published algorithm gives for the features of one image."""
    x = x / numpy.linalg.norm(x, axis=1, keepdims=True)
    affinity = numpy.where(x @ x.T > 0.2, 1.0, 1e-5)
    degrees = numpy.diag(affinity.sum(1))
    _, vectors = linalg.eigh(degrees - affinity, degrees, subset_by_index=[1, 1])
    y = vectors[:, 0]
    seed, cut = int(numpy.argmax(numpy.abs(y))), y > y.mean()
    labels, _ = ndimage.label((cut if cut[seed] else ~cut).reshape(side, side))
    return labels == labels.flatten()[seed]


def median_seconds(work: Callable[[], object], rounds: int, device: str) -> float:
    times = [seconds(work, device) for _ in range(rounds + 1)]
    return statistics.median(times[1:])  # without the warm-up


def measured(side: int, options: argparse.Namespace) -> dict[str, Any]:
    cuda = options.device == "cuda"
    count = options.batch or ((4096 if side < 20 else 512) if cuda else (128 if side < 20 else 16))
    x = features(side, count, options.data).to(options.device)
    edges = torch.cat([_edges(part, 0.2) for part in x.split(256)])
    compared = x[: options.compared].cpu().numpy()
    graphs = numpy.where(edges[: options.compared].cpu().numpy(), 1.0, 1e-5)

    def solve() -> list[numpy.ndarray]:
        result = []
        for graph in graphs:
            degrees = numpy.diag(graph.sum(1))
            result.append(linalg.eigh(degrees - graph, degrees, subset_by_index=[1, 1])[1][:, 0])
        return result

    scipy_seconds: dict[str, Any] = {"solver": {}, "whole": {}}
    threads = [n for n in (1, 2, 4, 8, 16) if n <= (os.cpu_count() or 1)]
    for number in threads:
        with threadpool_limits(number):
            for name, work in (("solver", solve), ("whole", lambda: [published(each, side) for each in compared])):
                each = median_seconds(work, options.rounds, "cpu") / len(compared)
                scipy_seconds[name][str(number)] = each
    chunk = 256 if cuda else count

    def ours() -> None:
        for part in edges.split(chunk if side > 20 else 4 * chunk):
            second_eigenvectors(part, 1e-5)

    with threadpool_limits(options.threads):
        torch.set_num_threads(options.threads)
        own_seconds = {
            "solver": median_seconds(ours, options.rounds, options.device) / count,
            "whole": median_seconds(lambda: unskip.evals.tokencut(x, (side, side)), options.rounds, options.device)
            / count,
        }
        result = unskip.evals.tokencut(x[: options.compared], (side, side))
    equal = [
        bool((published(each, side) == mask).all())
        for each, mask in zip(compared, result.masks.cpu().numpy(), strict=True)
    ]
    sure = result.sure.cpu().tolist()
    row: dict[str, Any] = {"tokens": f"{side} x {side}", "batch": count, "gap, median": float(result.gaps.median())}
    for name in ("solver", "whole"):
        best = min(scipy_seconds[name].values())
        row[name] = {
            "ours_ms": 1e3 * own_seconds[name],
            "scipy_ms": 1e3 * best,
            "times": best / own_seconds[name],
            "scipy": scipy_seconds[name],
        }
    row["masks"] = {
        "compared": len(equal),
        "sure": sum(sure),
        "equal": sum(equal),
        "sure and different": sum(s and not e for s, e in zip(sure, equal, strict=True)),
    }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--images", dest="data", help="a parquet file of images (default: synthetic images)")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="CPU threads of torch")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--compared", type=int, default=16, help="number of images for scipy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", default="14,28")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    rows = []
    for side in map(int, options.sides.split(",")):
        rows.append(measured(side, options))
        print(json.dumps(rows[-1]), flush=True)
    record = {
        **made_with(__file__, options.device, "scipy"),
        "cores": os.cpu_count(),
        "settings": {
            "threads": options.threads,
            "images": options.data.rpartition("/")[2] if options.data else "made up",
        },
        "bars": {"cuda": 50, "cpu": 3}[options.device],
        "results": rows,
    }
    if not options.dry:
        out = options.out or RESULTS / f"discover-{'gpu' if options.device == 'cuda' else 'cpu'}.json"
        write_json(out, record)


if __name__ == "__main__":
    main()
