"""Measures how the cost of each tool grows with the depth, width and number of tokens of a ViT.

    python benchmarks/growth.py               # docs/results/growth-cpu.json, docs/img/growth.svg; about ten minutes
    python benchmarks/growth.py --quick       # two sizes each, writes nothing
    python benchmarks/growth.py --figure      # only draws the figure from the JSON

Times are CPU seconds of one thread, the minimum of three rounds, for `audit`, `rewire`, `measure` without Jacobians,
`absorption.scan` and a training step (forward, backward, AdamW) on two images. The exponent is the slope of log seconds
over log size, fitted to all sizes by least squares. The cost of a transformer's training step is linear in depth and,
for large widths, quadratic in width.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from _record import made_with, write_json
from _study import drawing

import unskip

ROOT = Path(__file__).resolve().parent.parent
BASE = {"depth": 12, "width": 192, "tokens": 64}
SIZES = {"depth": (6, 12, 24, 48, 96), "width": (96, 192, 384, 768), "tokens": (16, 64, 256, 1024)}
TOOLS = ("audit", "rewire", "measure", "absorption.scan", "training step")
ROUNDS = 3


def timed(work: Callable[[], Any], undo: Callable[[Any], None] = lambda result: None) -> float:
    """CPU seconds of `work`, the minimum over rounds."""
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        result = work()
        found.append(time.process_time() - start)
        undo(result)
    return min(found)


def costs(depth: int, width: int, tokens: int) -> dict[str, float]:
    side = round(math.sqrt(tokens))
    torch.manual_seed(0)
    shape = {"depth": depth, "embed_dim": width, "num_heads": width // 32, "img_size": 4 * side, "patch_size": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, class_token=False, global_pool="avg", **shape)
    images = torch.randn(2, 3, 4 * side, 4 * side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    return {
        "training step": timed(step),
        "audit": timed(lambda: unskip.audit(model, images)),
        "rewire": timed(lambda: unskip.rewire(model, "decay:0.6", images), lambda wiring: wiring.undo()),
        "measure": timed(lambda: unskip.measure(model, images, jacobians="off")),
        "absorption.scan": timed(lambda: unskip.absorption.scan(model, images)),
    }


def figure(rows: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Draws a panel for each of depth, width and tokens, with a line and an exponent for each tool."""
    pyplot = drawing("growth")
    image, axes = pyplot.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True, sharey=True)
    for panel, (name, found) in zip(axes, rows.items(), strict=True):
        for tool in TOOLS:
            values = [row[tool] for row in found]
            label = f"{tool}: {exponent(found, name, tool):.1f}"
            panel.plot([row[name] for row in found], values, "o-", label=label)
        fixed = ", ".join(f"{key} {value}" for key, value in BASE.items() if key != name)
        panel.set(xscale="log", yscale="log", xlabel=name, title=fixed)
        panel.set_xticks([row[name] for row in found], [str(row[name]) for row in found])
        panel.minorticks_off()
        panel.legend(title="exponent", fontsize=8)
    axes[0].set_ylabel("CPU seconds")
    file.parent.mkdir(parents=True, exist_ok=True)
    image.savefig(file, metadata={"Date": None})
    pyplot.close(image)


def exponent(rows: list[dict[str, Any]], size: str, tool: str) -> float:
    """The slope of log seconds over log size, by least squares."""
    sizes, seconds = ([math.log(row[name]) for row in rows] for name in (size, tool))
    return statistics.linear_regression(sizes, seconds).slope


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two sizes each; write nothing")
    parser.add_argument("--figure", action="store_true", help="only draw the figure from the JSON")
    options = parser.parse_args()
    file = ROOT / "docs" / "results" / "growth-cpu.json"
    if options.figure:
        figure(json.loads(file.read_text())["results"], ROOT / "docs" / "img" / "growth.svg")
        return
    torch.set_num_threads(1)
    costs(2, 96, 16)  # warm-up
    results: dict[str, list[dict[str, Any]]] = {}
    for name, sizes in SIZES.items():
        results[name] = []
        for size in sizes[:2] if options.quick else sizes:
            row = {name: size, **costs(**{**BASE, name: size})}
            results[name].append(row)
            print({key: round(value, 3) for key, value in row.items()}, flush=True)
    if options.quick:
        return
    write_json(file, {**made_with(__file__, "cpu", "timm"), "seed": 0, "base": BASE, "images": 2, "results": results})
    figure(results, ROOT / "docs" / "img" / "growth.svg")


if __name__ == "__main__":
    main()
