"""Training of SiT, plain or with decayed shortcuts and long skips.

    the paper's method    --shortcut decay:0.8 --long-skips      (SiT-XL/2 on ImageNet: FID 17.2 to 11.8 at 400k steps)
    plain SiT             --shortcut keep --no-long-skips

"Residual Connections Harm Generative Representation Learning" (arXiv 2404.10947): decayed shortcuts improve the samples
and the features of a diffusion transformer. The paper does not say in which block the decay should end:

    over all blocks         --shortcut decay:0.8
    by effective decay      --shortcut decay:product=5e-3
    in the middle           --shortcut decay:0.8,until=0.5
    and back to 1           --shortcut decay:0.8,until=0.5,back

See `unskip.models.SiT` for the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unskip.models import SiT, load_published_sit
from unskip.recipes._flow import FlowConfig, FlowMatching
from unskip.recipes._models import named
from unskip.recipes._objective import Facts
from unskip.recipes._registry import Preset, Recipe, register


@dataclass(frozen=True)
class Sit(FlowConfig):
    """The config of a SiT run."""

    long_skips: bool = True  # pass outputs of the first half of the blocks to the second half
    weights: str | None = None  # a published checkpoint
    lr: float = 1e-4
    weight_decay: float = 0.0


_IMAGENET: dict[str, Any] = {
    "data": "imagenet",
    "size": 256,
    "latents": "sd-vae-ft-ema",
    "steps": 400_000,
    "batch": 256,
    "precision": "bf16",
    "compile": True,
    "evaluate_every": 20_000,
    "checkpoint_every": 10_000,
}
_PRESETS = {
    "digits": Preset(
        {"data": "digits", "size": 8, "model": "S/2", "model_args": "width=64,depth=4,heads=4", "flip": False}
        | {"batch": 64, "epochs": 60, "lr": 1e-3, "ema": 0.99, "online_images": 1000},
        "about a minute on one CPU core",
        "test loss 0.418 ± 0.005 (three seeds)",
    ),
    "cifar": Preset(
        {"data": "cifar10", "size": 32, "model": "S/4", "model_args": "width=384,depth=12,heads=6", "batch": 128}
        | {"steps": 15_000, "lr": 2e-4, "warmup": 0.02, "ema": 0.9995, "evaluate_every": 2500}
        | {"precision": "bf16", "graph": True},
        "under 15 minutes on one H200",
        "Fréchet distance over a classifier's features 5.53 (plain SiT 6.75), two seeds",
    ),
    "sit-b2": Preset(
        {"model": "B/2"} | _IMAGENET, "about 11 hours on one H200, by the measured step; not run here", "not measured"
    ),
    "sit-xl2": Preset(
        {"model": "XL/2"} | _IMAGENET,
        "about 58 hours on one H200, by the size of sit-b2; not run here",
        "the paper: FID 11.8 (plain SiT 17.2) at 400k steps",
    ),
}


def build_model(config: Sit, facts: Facts) -> SiT:
    """The diffusion transformer."""
    return named(SiT, config, facts, long_skips=config.long_skips)


class Velocity(FlowMatching):
    """SiT's objective, optionally starting from published weights."""

    def start(self, model: Any, sample: Any) -> list[str]:
        if self.config.weights is not None:
            load_published_sit(model, self.config.weights)
        return super().start(model, sample)


# A config of the recipe sit (SiT: flow matching with a diffusion transformer): `unskip.recipes.sit(preset, **fields)`.
sit = register(Recipe("sit", Sit, _PRESETS, build_model, Velocity))
