"""Times a ViT with some of its skips removed: latency, training step and memory, with all wirings in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
from rewire import compare, training_step

import unskip

Step = Callable[[], None]
BATCHES = (1, 256)


def costs(arguments: dict[str, Any], sites: dict[str, str | None], device: str) -> dict[str, Any]:
    """Forward pass (eager, and compiled in one CUDA graph) and training step of each wiring.

    `sites` maps a name to the sites that are cut. The original and a second copy of it, the control, are added.
    """
    torch.manual_seed(0)
    rounds = 200 if device == "cuda" else 5
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = (arguments.get("in_chans", 3), arguments["img_size"], arguments["img_size"])

    def models(dtype: torch.dtype) -> dict[str, Any]:
        made = {}
        for name in ("original", "original again", *sites):
            model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **arguments).to(device).eval()
            if name in sites:
                unskip.rewire(model, "cut", torch.randn(2, *shape, device=device), sites[name])
            made[name] = model.to(dtype)
        return made

    result: dict[str, Any] = {}
    for batch in BATCHES:
        images = torch.randn(batch, *shape, device=device, dtype=dtype)
        steps = {name: forward(model, images) for name, model in models(dtype).items()}
        result[f"eager, batch {batch}"] = compare(steps, device, rounds, 0)
        if device == "cuda":
            steps = {name: captured(torch.compile(model), images) for name, model in models(dtype).items()}
            result[f"compiled, one graph, batch {batch}"] = compare(steps, device, rounds, 0)
            torch.compiler.reset()  # otherwise the next batch size would be compiled with dynamic shapes
    images = torch.randn(BATCHES[-1], *shape, device=device)
    steps = {name: training_step(model.train(), model, images) for name, model in models(torch.float32).items()}
    result[f"training step, batch {BATCHES[-1]}"] = compare(steps, device, max(5, rounds // 4), 0)
    return result


def forward(model: Any, images: torch.Tensor) -> Step:
    @torch.no_grad()
    def step() -> None:
        model(images)

    return step


def captured(model: Any, images: torch.Tensor) -> Step:
    """A forward pass replayed as a CUDA graph, without launch overhead."""
    step, side = forward(model, images), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Step = graph.replay
    return replay
