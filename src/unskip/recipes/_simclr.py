"""Contrastive training by SimCLR (arXiv 2002.05709), with any shortcut.

The boundary of decayed shortcuts: "Residual Connections Harm Generative Representation Learning" (arXiv 2404.10947)
finds that they help objectives which generate, and do not suit contrastive ones, which want a high rank. Here it can be
checked, and is warned about.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unskip._warn import warn
from unskip.anatomy import Example, block_axes
from unskip.data import Drawn, DrawnFeed
from unskip.errors import BadInput
from unskip.models import SimCLR
from unskip.optim import build as build_optimizer
from unskip.recipes._config import Config
from unskip.recipes._data import Opener
from unskip.recipes._registry import Preset, Recipe, register, resolve
from unskip.recipes._shared import device_of, save_with_encoder, schedule_of, steps_of, wired
from unskip.recipes._views import (
    backbone,
    backbone_arguments,
    check,
    collapsed_blocks,
    looked_at,
    prepare,
    still_feeds,
    view_data,
)
from unskip.training import Schedule, Task
from unskip.wiring import Anneal, Decay, parse


@dataclass(frozen=True)
class Simclr(Config):
    """The config of a contrastive run."""

    patch: int | None = 4  # sides of a patch in pixels; None: as the model has it
    scale: float = 0.2  # the least share of the area that a view shows
    source: int | None = None  # images are brought to this size before they are cropped; None: as they are held
    colour: float = 1.0  # strength of the changes of colour; 0 leaves colours alone
    hidden: int = 2048  # width of the head
    projection: int = 128  # dimensions of the sphere that views are compared on
    temperature: float = 0.2  # of the loss
    head_norm: bool = True  # batch norm within the head and at its end
    lr: float = 5e-4
    lr_end: float = 2e-3  # as a fraction of lr
    weight_decay: float = 0.1
    clip: float | None = 3.0  # the largest norm of the gradient
    online_images: int = 10_000  # how many images of each split the neighbours and the rank are judged on in training
    health: bool = True  # look at features and attention with each evaluation, and warn; takes some seconds


_PRESETS = {
    "digits": Preset(
        {"data": "digits", "size": 8, "patch": 2, "model_args": "depth=4,embed_dim=64,num_heads=4", "colour": 0.5}
        | {"scale": 0.4, "batch": 64, "epochs": 30, "lr": 1e-3, "hidden": 128, "projection": 32},
        "about a minute on one CPU core",
        "not measured",
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


def simclr(preset: str = "digits", **overrides: Any) -> Simclr:
    """The config of a contrastive run: a preset with some fields changed."""
    config: Simclr = resolve("simclr", preset, overrides)
    return config


def build(config: Simclr, opener: Opener | None = None) -> tuple[Task, Schedule]:
    """The task and schedule of a config."""
    caution = decay_caution(config.shortcut)
    if caution is not None:
        warn(caution)
    check(config, {"projection": (1, math.inf), "hidden": (1, math.inf)}, ("temperature",))
    if config.batch // max(1, config.accumulate) < 2:
        raise BadInput("one image at a time: there is no other to tell it from; raise batch, or lower accumulate")
    device = device_of(config.device)
    train, test, feed = view_data(config, device, opener)
    known, judged = still_feeds(config, train, test, device)
    sample = next(iter(judged.evaluate()))[0][:64]
    arguments = backbone_arguments(config, train.channels)
    encoder = backbone(config, arguments).to(device)
    prepare(config, encoder, sample)
    head: dict[str, Any] = {"hidden": config.hidden, "out": config.projection, "norm": config.head_norm}
    model = SimCLR(encoder, temperature=config.temperature, **head).to(device)
    wiring = wired(model.backbone, config, sample)
    axes = block_axes(model.backbone, Example.of(sample[:1]))  # once, and of the model before it is sharded
    optimizer = build_optimizer(model, config.optimizer, config.lr, config.weight_decay)
    steps = steps_of(config, feed.steps_per_epoch)

    def loss(network: nn.Module, batch: Drawn) -> tuple[Tensor, dict[str, Tensor]]:
        found = network(feed.made(*batch[:3])[0])
        return found.loss, {"aligned": found.aligned, "apart": found.apart}

    def write(network: Any, folder: Path) -> None:
        save_with_encoder(network, network.backbone, folder, config.model, arguments)

    evaluation = looked_at(known, judged, config.precision, axes, lambda net: net.backbone)
    task = Task(
        model=model,
        feed=DrawnFeed(feed),
        loss=loss,
        optimizer=optimizer,
        wiring=wiring,
        evaluations={"knn-dino-v1, rank-v1": evaluation},
        notes=(*train.report, *test.report, *((caution,) if caution else ())),
        sample=sample[:8] if config.health else None,
        watched=model.backbone,
        watch=watch,
        save=write,
    )
    return task, schedule_of(config, steps)


def watch(row: dict[str, Any], share: float) -> Iterator[tuple[str, str]]:
    """Where nothing is learnt, views of an image are no nearer to each other than to those of others.

    No value of the loss says so. With n images a batch it is, by Jensen's inequality, at least

        log(2n - 1) - (aligned - apart) / T

    and is just that where all views are the same; where they lie apart it is higher, and falls past it while the model
    learns.
    """
    aligned, apart = row.get("aligned"), row.get("apart")
    if share >= 0.2 and aligned is not None and apart is not None and aligned - apart < 0.01:
        text = f"views of one image are no nearer to each other ({aligned:.3f}) than to those of others ({apart:.3f})"
        yield "flat-loss", text
    if share >= 0.05:
        yield from collapsed_blocks(row)


def decay_caution(shortcut: str) -> str | None:
    """What is to be said where a decayed shortcut meets a contrastive loss."""
    rule = parse(shortcut)
    if isinstance(rule, Decay) or (isinstance(rule, Anneal) and isinstance(rule.last, Decay)):
        return (
            f"shortcut {shortcut} with a contrastive loss: decay lowers the rank of features, which contrastive "
            "objectives want high; arXiv 2404.10947 does not recommend it. Compare with --shortcut keep"
        )
    return None


register(Recipe("simclr", Simclr, _PRESETS, build))
