"""Training of U-ViT, whose long skips are its own, with any shortcut. See `_generate` and `unskip.models.UViT`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from unskip.errors import BadInput
from unskip.models import UViT
from unskip.recipes._data import Opener
from unskip.recipes._generate import Generative, build_task
from unskip.recipes._registry import Preset, Recipe, register, resolve
from unskip.recipes._shared import named
from unskip.training import Schedule, Task


@dataclass(frozen=True)
class Uvit(Generative):
    """The config of a U-ViT run; its optimizer settings, and betas, are those of the U-ViT paper (arXiv 2209.12152)."""

    lr: float = 2e-4
    weight_decay: float = 0.03


_PRESETS = {
    "digits": Preset(
        {"data": "digits", "size": 8, "model": "S/2", "model_args": "width=64,depth=5,heads=4", "flip": False}
        | {"batch": 64, "epochs": 60, "lr": 1e-3, "average": 0.99, "online_images": 1000},
        "two minutes on one CPU core",
        "not measured",
    ),
    "cifar": Preset(
        {"data": "cifar10", "size": 32, "model": "S/4", "model_args": "width=448,depth=11,heads=7", "batch": 128}
        | {"steps": 15_000, "warmup": 0.02, "average": 0.9995, "evaluate_every": 2500}
        | {"precision": "bf16", "graph": True},
        "at most 9 minutes on one H200",
        "Fréchet distance over a classifier's features 7.65 (skips kept 8.63), one seed",
    ),
}


def uvit(preset: str = "digits", **overrides: Any) -> Uvit:
    """The config of a U-ViT run: a preset with some fields changed."""
    config: Uvit = resolve("uvit", preset, overrides)
    return config


def build(config: Uvit, opener: Opener | None = None) -> tuple[Task, Schedule]:
    """The task and schedule of a config."""
    if config.weights is not None:
        raise BadInput("weights: published checkpoints of U-ViT predict noise at discrete times and are not loaded")

    def make(shape: dict[str, Any]) -> nn.Module:
        return named(UViT, config, shape)

    return build_task(config, make, opener, betas="0.99,0.999")


register(Recipe("uvit", Uvit, _PRESETS, build))
