"""Writes synthetic run folders, valid or damaged, without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "recipe": "mae",
    "data": "digits",
    "model": "timm:vit_tiny_patch16_224",
    "shortcut": "keep",
    "lr": 1e-3,
    "steps": 100,
    "seed": 0,
}


def folder(
    path: Path,
    losses: Sequence[object] = (1.0, 0.5, 0.25),
    evals: Sequence[dict[str, Any]] = (),
    warnings: Sequence[dict[str, Any]] = (),
    weights: Sequence[float] = (),
    **config: Any,
) -> Path:
    """Writes a run with a loss at steps 10, 20, ...; `weights` are the alphas of a checkpoint."""
    path.mkdir(parents=True)
    about = {"device": "cpu", "versions": {"torch": "2"}, "git": None, "plugins": []}
    (path / "config.json").write_text(json.dumps({"config": {**CONFIG, **config}, **about}))
    rows = [
        {"step": 10 * (place + 1), "loss": loss, "seconds": 2.0, "samples_per_second": 50.0, "peak_memory_gib": 1.5}
        for place, loss in enumerate(losses)
    ]
    for name, lines in (("metrics.jsonl", rows), ("evals.jsonl", evals), ("warnings.jsonl", warnings)):
        if lines:
            (path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if weights:
        checkpoint = path / "checkpoints" / "step-30" / "encoder"
        checkpoint.mkdir(parents=True)
        sites = [{"index": i, "path": f"blocks.{i}"} for i, _ in enumerate(weights)]
        wiring = {"sites": sites, "alphas": list(weights), "betas": [1.0] * len(weights)}
        (checkpoint / "unskip.json").write_text(json.dumps({"wiring": wiring}))
    return path


def by_block(values: Sequence[float], name: str = "knn20", step: int = 30) -> list[dict[str, Any]]:
    """Rows like those that `unskip eval` appends."""
    return [
        {"step": step, "evaluation": "knn-dino-v1", "block": block, "pool": "mean", name: value}
        for block, value in enumerate(values)
    ]
