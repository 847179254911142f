"""Self-supervised training by DINO, with any shortcut: student and teacher, many crops, and a watch for collapse.

The second paper ("Cutting the Skip", arXiv 2510.00345) reports that a ViT without residuals, initialised for it, has
better dense features after DINO (arXiv 2104.14294) than one with them.

    residual             --shortcut keep
    without residuals    --shortcut cut --init skipless:vit-small --optimizer soap
    remedies             --shortcut anneal:keep>cut@5000 | decay:0.6 | --balance sinkhorn

The teacher is what is judged. A loss at which nothing is learnt, a teacher that says the same of every image, and
features of any block that lose their rank are logged and warned about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unskip.anatomy import Example, block_axes
from unskip.data import Drawn, DrawnFeed
from unskip.errors import BadInput
from unskip.models import DINO, load_dino
from unskip.optim import build as build_optimizer
from unskip.optim import schedules
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


@dataclass(frozen=True)
class Dino(Config):
    """The config of a DINO run."""

    size: int = 32  # of large views
    patch: int | None = 4  # sides of a patch in pixels; None: as the model has it
    small: int = 8  # how many small views
    small_size: int = 16
    scale: float = 0.4  # large views show at least this share of the area, small ones at most
    small_scale: float = 0.05  # and at least this
    source: int | None = None  # images are brought to this size before they are cropped; None: as they are held
    colour: float = 1.0  # strength of the changes of colour; 0 leaves colours alone
    weights: str | None = None  # a published checkpoint
    projection: int = 65536  # entries that student and teacher tell images apart by
    hidden: int = 2048  # width of the head
    bottleneck: int = 256  # width of its end
    head_layers: int = 3
    head_norm: bool = False  # batch norm within the head
    bottleneck_norm: bool = False  # and at its end: what all images have in common is taken away
    balance: str = "centre"  # centre | sinkhorn
    student_temperature: float = 0.1
    teacher_temperature: float = 0.07
    teacher_start: float = 0.04  # the temperature begins here
    teacher_warmup: float = 0.3  # and rises over this share of the steps
    momentum: float = 0.996  # of the teacher; it rises to 1
    centre_momentum: float = 0.9  # of balance="centre"
    freeze_last: float | None = 1.0  # epochs in which the last layer stands still; None: always, its rows spread evenly
    lr: float = 5e-4
    lr_end: float = 2e-3  # as a fraction of lr
    weight_decay: float = 0.04
    weight_decay_end: float = 0.4  # it rises to this
    clip: float | None = 3.0  # the largest norm of the gradient
    online_images: int = 10_000  # how many images of each split the neighbours and the rank are judged on in training
    health: bool = True  # look at features and attention with each evaluation, and warn; takes some seconds

    def idle(self) -> dict[str, str]:
        found = super().idle()
        if self.balance == "sinkhorn":
            found["centre_momentum"] = "balance is sinkhorn; take centre"
        if not self.small:
            found |= dict.fromkeys(("small_size", "small_scale"), "there are no small views; set small")
        if self.weights is not None:
            found["init"] = "weights take its place; leave those out"
        return found


_SMALL_DATA: dict[str, Any] = {
    # What keeps a small set from loss = log(out). Where views cannot be told apart the best answer is a uniform q, and
    # there are two ways to give it: rows of the last layer that are all alike, where its first epoch is over after some
    # steps, and a bottleneck that is the same for all images. So the last layer stands still, its rows spread evenly,
    # and the bottleneck is batch-normalised. Beside that: fewer entries, a teacher that stays sharp and moves faster, a
    # longer warm-up, small crops that still show something.
    "freeze_last": None,
    "bottleneck_norm": True,
    "head_norm": True,
    "hidden": 512,
    "bottleneck": 128,
    "projection": 4096,
    "teacher_temperature": 0.04,
    "teacher_warmup": 0.0,
    "momentum": 0.99,
    "small_scale": 0.15,
    "warmup": 0.15,
    "weight_decay_end": 0.2,
    "precision": "bf16",
}
_PRESETS = {
    "digits": Preset(
        {"data": "digits", "size": 8, "patch": 2, "model_args": "depth=4,embed_dim=64,num_heads=4", "small": 4}
        | {"small_size": 4, "small_scale": 0.2, "colour": 0.5, "batch": 64, "epochs": 30, "lr": 1e-3}
        | {"projection": 256, "hidden": 128, "bottleneck": 64, "momentum": 0.98, "teacher_temperature": 0.04}
        | {"teacher_warmup": 0.0, "weight_decay_end": 0.2, "head_norm": True, "bottleneck_norm": True}
        | {"freeze_last": None},
        "a few minutes on one CPU core",
        "no collapse: teacher entropy below 0.95 log(256), divergence above 0.3",
    ),
    "cifar": Preset(
        {"data": "cifar10", "size": 32, "patch": 4, "model_args": "depth=12,embed_dim=192,num_heads=3"}
        | {"small_size": 16, "epochs": 100, "evaluate_every": 2000}
        | _SMALL_DATA,
        "not measured",
        "not measured",
    ),
    "tiny-imagenet": Preset(
        {"data": "tiny-imagenet", "size": 64, "patch": 8, "model": "timm:vit_small_patch16_224", "small_size": 32}
        | {"epochs": 200, "evaluate_every": 5000}
        | _SMALL_DATA,
        "hours on one GPU; not run here",
        "not measured",
    ),
    "vit-small": Preset(
        {"data": "imagenet", "size": 224, "patch": None, "model": "timm:vit_small_patch16_224", "small_size": 96}
        | {
            "source": 256,
            "batch": 1024,
            "lr": 5e-4 * 1024 / 256,
            "lr_end": 1e-6 / 2e-3,
            "epochs": 100,
            "warmup": 0.1,
            "workers": 12,
        }
        | {"model_args": "drop_path_rate=0.1", "precision": "bf16", "compile": True, "evaluate_every": 5000},
        "days on 8 GPUs; not run here",
        "the paper on skips, second hand, VOC12 TokenCut: residual 49.4, without residuals 63.2",
    ),
}


def dino(preset: str = "digits", **overrides: Any) -> Dino:
    """The config of a DINO run: a preset with some fields changed."""
    config: Dino = resolve("dino", preset, overrides)
    return config


def build(config: Dino, opener: Opener | None = None) -> tuple[Task, Schedule]:
    """The task and schedule of a config."""
    _check(config)
    device = device_of(config.device)
    train, test, feed = view_data(config, device, opener)
    known, judged = still_feeds(config, train, test, device)
    sample = next(iter(judged.evaluate()))[0][:64]
    arguments = backbone_arguments(config, train.channels)
    encoder = backbone(config, arguments).to(device)
    prepare(config, encoder, sample)
    model = _model(config, encoder, device)
    student, teacher = (wired(tower.backbone, config, sample) for tower in (model.student, model.teacher))
    model.teacher.requires_grad_(False)  # a learnt shortcut has brought a parameter of its own
    axes = block_axes(model.teacher.backbone, Example.of(sample[:1]))  # once, and of the model before it is sharded
    optimizer = build_optimizer(model.student, config.optimizer, config.lr, config.weight_decay)
    steps = steps_of(config, feed.steps_per_epoch)
    schedule = schedule_of(config, steps)
    frozen = round((config.freeze_last or 0) * feed.steps_per_epoch)
    now = {"step": 0}

    def before(step: int) -> None:
        now["step"] = step
        rise = min(1.0, step / max(1, round(config.teacher_warmup * steps)))
        model.temperature.fill_(config.teacher_start + rise * (config.teacher_temperature - config.teacher_start))
        decay = schedules.cosine(step, total=steps, start=config.weight_decay, end=config.weight_decay_end)
        schedules.apply(optimizer, weight_decay=decay)
        if teacher is not None:
            teacher.step(step)

    def after(step: int) -> None:
        model.follow_(schedules.cosine(step, total=steps, start=config.momentum, end=1.0))

    frozen_until(optimizer, model.last_layer, lambda: now["step"] >= frozen)

    def loss(network: nn.Module, batch: Drawn) -> tuple[Tensor, dict[str, Tensor]]:
        found = network(*feed.made(*batch[:3]))
        return found.loss, {
            "teacher_entropy": found.entropy,
            "teacher_spread": found.spread,
            "divergence": found.divergence,
        }

    def write(network: Any, folder: Path) -> None:
        save_with_encoder(network, network.teacher.backbone, folder, config.model, arguments)

    evaluation = looked_at(known, judged, config.precision, axes, lambda net: net.teacher.backbone)
    task = Task(
        model=model,
        feed=DrawnFeed(feed),
        loss=loss,
        optimizer=optimizer,
        wiring=student,
        trivial=trivial(config),
        evaluations={"knn-dino-v1, rank-v1": evaluation},
        notes=(*train.report, *test.report),
        sample=sample[:8] if config.health else None,
        watched=model.teacher.backbone,
        before=before,
        after=after,
        watch=watch(config.projection, config.batch // config.accumulate),
        save=write,
    )
    return task, schedule


def _check(config: Dino) -> None:
    ranges: dict[str, tuple[float, float]] = dict.fromkeys(("teacher_warmup", "momentum", "centre_momentum"), (0, 1))
    ranges |= dict.fromkeys(("projection", "hidden", "bottleneck"), (1, math.inf)) | {"freeze_last": (0, math.inf)}
    check(config, ranges, ("student_temperature", "teacher_temperature", "teacher_start"))
    if (config.head_norm or config.bottleneck_norm) and config.small * config.batch == max(1, config.accumulate):
        raise BadInput(
            "one small view of one image: the head's batch norm needs two samples; raise batch or small, or leave out "
            "head_norm and bottleneck_norm"
        )
    if config.small and config.small_scale > config.scale:
        raise BadInput(
            f"small_scale is {config.small_scale!r} and scale {config.scale!r}: small views show at least the first "
            "share of the area, and at most the second"
        )


def _model(config: Dino, backbone: nn.Module, device: torch.device) -> DINO:
    model = DINO(
        backbone,
        out=config.projection,
        hidden=config.hidden,
        bottleneck=config.bottleneck,
        layers=config.head_layers,
        norm=config.head_norm,
        bottleneck_norm=config.bottleneck_norm,
        student_temperature=config.student_temperature,
        centre_momentum=config.centre_momentum,
        balance=config.balance,  # type: ignore[arg-type]
    ).to(device)
    if config.freeze_last is None:
        model.spread_(torch.Generator().manual_seed(config.seed))
        model.last_layer().requires_grad_(False)
    if config.weights is not None:
        load_dino(model, config.weights)
    return model


def frozen_until(optimizer: Any, weight: Callable[[], Tensor], free: Callable[[], bool]) -> None:
    """Hides the gradient of a weight from the optimizer until it is free.

    It is put back after the step: a CUDA graph writes gradients where they lay when it was recorded. The weight is
    asked for each time: sharding puts another tensor in its place.
    """
    hidden: list[Tensor | None] = []

    def hide(*_: Any) -> None:
        if not free():
            hidden.append(weight().grad)
            weight().grad = None

    def show(*_: Any) -> None:
        if hidden:
            weight().grad = hidden.pop()

    optimizer.register_step_pre_hook(hide)
    optimizer.register_step_post_hook(show)


def trivial(config: Dino) -> float:
    """The loss of a student that knows nothing of what the teacher says.

    With a last layer that is free that is log(out): its rows become alike, and q uniform. Rows that stand still, spread
    evenly, make no uniform q. Then <p, s> is 0 on average, and what is left is the log of a sum over rows w, which are
    every direction of b dimensions:

        log sum exp(<w, z> / T) = log(out) + log 0F1(b / 2, 1 / (2 T)^2)
    """
    if config.freeze_last is not None:
        return math.log(config.projection)
    half, argument = config.bottleneck / 2, 1 / (2 * config.student_temperature) ** 2
    index = torch.arange(round(4 * math.sqrt(argument)) + 100, dtype=torch.float64)  # of the terms of the series
    terms = index * math.log(argument) - torch.lgamma(index + 1) - torch.lgamma(index + half) + math.lgamma(half)
    return math.log(config.projection) + float(terms.logsumexp(0))


def watch(out: int, batch: int) -> Callable[[dict[str, Any], float], Iterator[tuple[str, str]]]:
    """What a collapse looks like in the numbers of a run."""
    most, possible = math.log(out), math.log(min(out, 2 * batch))

    def look(row: dict[str, Any], share: float) -> Iterator[tuple[str, str]]:
        if share < 0.05:
            return
        entropy, spread = row.get("teacher_entropy"), row.get("teacher_spread")
        if entropy is not None and entropy > 0.99 * most:
            yield "uniform-teacher", f"the teacher's entropy is {entropy:.3g} of at most {most:.3g}: it says nothing"
        if spread is not None and spread < 0.05 * possible:
            text = (
                f"the teacher says the same of every image: the entropy of its mean is {spread:.2g} of {possible:.3g}"
            )
            yield "one-answer", text
        if row.get("divergence", 1.0) < 1e-3:
            yield "nothing-to-learn", f"student and teacher agree to within {row['divergence']:.2g}"
        yield from collapsed_blocks(row)

    return look


register(Recipe("dino", Dino, _PRESETS, build))
