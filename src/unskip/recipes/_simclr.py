"""Contrastive training by SimCLR (arXiv 2002.05709), with any shortcut.

"Residual Connections Harm Generative Representation Learning" (arXiv 2404.10947) finds that decayed shortcuts help
generative objectives and not contrastive ones, which need features of high rank. A run with a decayed shortcut warns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unskip._warn import warn
from unskip.data import Drawn
from unskip.errors import BadInput
from unskip.models import SimCLR
from unskip.recipes._config import Config
from unskip.recipes._crops import CropsObjective, backbone
from unskip.recipes._models import check_ranges
from unskip.recipes._objective import Facts
from unskip.recipes._registry import Preset, Recipe, register
from unskip.wiring import Anneal, Decay, parse


@dataclass(frozen=True)
class Simclr(Config):
    """The config of a contrastive run."""

    patch: int | None = 4  # side of a patch in pixels; None: the model's own
    scale: float = 0.2  # minimum fraction of the area in a crop
    source: int | None = None  # small sets of images of several sizes are stored as squares of this side; None: size
    jitter: float = 1.0  # strength of the color jitter; 0: no color augmentation
    hidden: int = 2048  # width of the head
    projection: int = 128  # outputs of the head
    temperature: float = 0.2  # of the loss
    head_norm: bool = True  # batch norm within the head and at its end
    lr: float = 5e-4
    lr_end: float = 2e-3  # as a fraction of lr
    weight_decay: float = 0.1
    clip: float | None = 3.0  # largest norm of the gradient


_PRESETS = {
    "digits": Preset(
        {"data": "digits", "size": 8, "patch": 2, "model_args": "depth=4,embed_dim=64,num_heads=4", "jitter": 0.5}
        | {"scale": 0.4, "batch": 64, "epochs": 30, "lr": 1e-3, "hidden": 128, "projection": 32},
        "about a minute on one CPU core",
        "kNN of the class token 81.2 ± 1.0 (three seeds)",
    ),
    "cifar": Preset(
        {"data": "cifar10", "size": 32, "patch": 4, "model_args": "depth=12,embed_dim=192,num_heads=3"}
        | {"precision": "bf16", "evaluate_every": 2000},
        "not measured",
        "not measured",
    ),
    "tiny-imagenet": Preset(
        {"data": "tiny-imagenet", "size": 64, "patch": 8, "model": "timm:vit_small_patch16_224", "epochs": 200}
        | {"precision": "bf16", "evaluate_every": 5000},
        "hours on one GPU; not run here",
        "not measured",
    ),
}


def build_model(config: Simclr, facts: Facts) -> SimCLR:
    """A backbone and its projection head."""
    head: dict[str, Any] = {"hidden": config.hidden, "out": config.projection, "norm": config.head_norm}
    return SimCLR(backbone(config, facts), temperature=config.temperature, **head)


class Contrast(CropsObjective):
    """InfoNCE of two crops of each image."""

    config: Simclr

    def check(self) -> None:
        super().check()
        check_ranges(self.config, {"projection": (1, math.inf), "hidden": (1, math.inf)}, ("temperature",))
        if self.config.batch // max(1, self.config.accumulate) < 2:
            raise BadInput("a batch of one image has no negatives; raise batch, or lower accumulate")
        if self.config.weights is not None:
            raise BadInput("weights: SimCLR cannot start from weights; leave them out")

    def encoder(self, model: Any) -> nn.Module:
        encoder: nn.Module = model.backbone
        return encoder

    def start(self, model: nn.Module, sample: Tensor) -> list[str]:
        self.initialise(self.encoder(model), sample[:2], "vit-small")
        caution = decay_caution(self.config.shortcut)
        if caution is None:
            return []
        warn(caution)
        return [caution]

    def loss(self, model: nn.Module, batch: Drawn) -> tuple[Tensor, dict[str, Tensor]]:
        output = model(self.crops.made(*batch[:3])[0])
        return output.loss, {"aligned": output.aligned, "apart": output.apart}

    def warnings(self, row: dict[str, Any], share: float) -> Iterator[tuple[str, str]]:
        """Warns if crops of one image are no more similar than crops of different images: then nothing is learned.

        The loss alone does not show this. With n images per batch it is, by Jensen's inequality, at least

            log(2n - 1) - (aligned - apart) / T

        with equality if all crops have the same output. If outputs differ it is higher, and falls below log(2n - 1)
        during training.
        """
        aligned, apart = row.get("aligned"), row.get("apart")
        if share >= 0.2 and aligned is not None and apart is not None and aligned - apart < 0.01:
            text = f"crops of one image are no more similar ({aligned:.3f}) than those of different ones ({apart:.3f})"
            yield "flat-loss", text
        yield from super().warnings(row, share)


def decay_caution(shortcut: str) -> str | None:
    """A warning about a decayed shortcut with a contrastive loss, or None."""
    rule = parse(shortcut)
    if isinstance(rule, Decay) or (isinstance(rule, Anneal) and isinstance(rule.last, Decay)):
        return (
            f"shortcut {shortcut} with a contrastive loss: decay lowers the rank of features, but contrastive "
            "objectives need a high rank (arXiv 2404.10947). Compare with --shortcut keep"
        )
    return None


# A config of the recipe simclr (SimCLR: contrast of two crops): `unskip.recipes.simclr(preset, **fields)`.
simclr = register(Recipe("simclr", Simclr, _PRESETS, build_model, Contrast))
