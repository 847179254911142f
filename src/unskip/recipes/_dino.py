"""Self-supervised training by DINO, with any shortcut: student, teacher, several crops, and warnings of collapse.

"Cutting the Skip" (arXiv 2510.00345) reports that a suitably initialised ViT without residual connections has better
dense features after DINO (arXiv 2104.14294) than a ViT with them.

    residual             --shortcut keep
    without residuals    --shortcut cut --init skipless:vit-small --optimizer soap
    remedies             --shortcut anneal:keep>cut@5000 | decay:0.6 | --balance sinkhorn

The teacher is evaluated. A run warns of a loss at which nothing is learned, a teacher with the same output for every
image, and rank collapse in any block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unskip.data import Drawn
from unskip.errors import BadInput
from unskip.models import DINO, load_dino
from unskip.optim import group_of, own_group, schedules
from unskip.recipes._config import Config
from unskip.recipes._crops import CropsObjective, backbone
from unskip.recipes._models import check_ranges
from unskip.recipes._objective import Facts, Progress
from unskip.recipes._registry import Preset, Recipe, register


@dataclass(frozen=True)
class Dino(Config):
    """The config of a DINO run."""

    size: int = 32  # of global crops, in pixels
    patch: int | None = 4  # side of a patch in pixels; None: the model's own
    local_crops: int = 8  # number of local crops per image
    local_size: int = 16  # of local crops, in pixels
    scale: float = 0.4  # global crops show at least this fraction of the area, local ones at most
    local_scale: float = 0.05  # local crops show at least this fraction of the area
    source: int | None = None  # small sets of images of several sizes are stored as squares of this side; None: size
    jitter: float = 1.0  # strength of the color jitter; 0: no color augmentation
    weights: str | None = None  # a published checkpoint
    projection: int = 65536  # outputs of the head
    hidden: int = 2048  # width of the head
    bottleneck: int = 256  # width of its last layer's input
    head_layers: int = 3  # of the head's MLP
    head_norm: bool = False  # batch norm within the head
    bottleneck_norm: bool = False  # batch norm of the bottleneck
    balance: Literal["centre", "sinkhorn"] = "centre"  # how the teacher's outputs are balanced over the batch
    student_temperature: float = 0.1  # of the student's softmax
    teacher_temperature: float = 0.07  # of the teacher's softmax, after its warmup
    teacher_start: float = 0.04  # the teacher's temperature at the first step
    teacher_warmup: float = 0.3  # fraction of the steps over which that temperature rises
    momentum: float = 0.996  # of the teacher's EMA; rises to 1
    centre_momentum: float = 0.9  # of balance="centre"
    freeze_last: float | None = 1.0  # initial epochs with a frozen last layer; None: all, with evenly spread rows
    lr: float = 5e-4
    lr_end: float = 2e-3  # as a fraction of lr
    weight_decay: float = 0.04
    weight_decay_end: float = 0.4  # value at the end of the schedule
    clip: float | None = 3.0  # largest norm of the gradient

    def unused(self) -> dict[str, str]:
        reasons = super().unused()
        if self.balance == "sinkhorn":
            reasons["centre_momentum"] = "balance is sinkhorn; use centre"
        if not self.local_crops:
            reasons |= dict.fromkeys(("local_size", "local_scale"), "there are no local crops; set local_crops")
        if self.weights is not None:
            reasons["init"] = "weights replace it; leave weights out"
        if not self.weight_decay:
            reasons["weight_decay_end"] = "weight_decay is 0, so that nothing decays; set it above 0"
        return reasons


_SMALL_DATA: dict[str, Any] = {
    # These prevent training on a small set from ending at loss = log(out). A student that cannot distinguish crops
    # does best with a uniform q, which it can reach by equal rows of the last layer or by a constant bottleneck. So
    # the last layer is frozen with evenly spread rows, and the bottleneck is batch-normalised. Also: fewer outputs, a
    # sharper teacher with a lower momentum, a longer warm-up, larger local crops.
    "freeze_last": None,
    "bottleneck_norm": True,
    "head_norm": True,
    "hidden": 512,
    "bottleneck": 128,
    "projection": 4096,
    "teacher_temperature": 0.04,
    "teacher_warmup": 0.0,
    "momentum": 0.99,
    "local_scale": 0.15,
    "warmup": 0.15,
    "weight_decay_end": 0.2,
    "precision": "bf16",
}
_PRESETS = {
    "digits": Preset(
        {"data": "digits", "size": 8, "patch": 2, "model_args": "depth=4,embed_dim=64,num_heads=4", "local_crops": 4}
        | {"local_size": 4, "local_scale": 0.2, "jitter": 0.5, "batch": 64, "epochs": 30, "lr": 1e-3}
        | {"projection": 256, "hidden": 128, "bottleneck": 64, "momentum": 0.98, "teacher_temperature": 0.04}
        | {"teacher_warmup": 0.0, "weight_decay_end": 0.2, "head_norm": True, "bottleneck_norm": True}
        | {"freeze_last": None},
        "about a minute on one CPU core",
        "no collapse: kNN of the class token 46.9 ± 2.4 (three seeds)",
    ),
    "cifar": Preset(
        {"data": "cifar10", "size": 32, "patch": 4, "model_args": "depth=12,embed_dim=192,num_heads=3"}
        | {"local_size": 16, "epochs": 100, "evaluate_every": 2000}
        | _SMALL_DATA,
        "not measured",
        "not measured",
    ),
    "tiny-imagenet": Preset(
        {"data": "tiny-imagenet", "size": 64, "patch": 8, "model": "timm:vit_small_patch16_224", "local_size": 32}
        | {"epochs": 200, "evaluate_every": 5000}
        | _SMALL_DATA,
        "hours on one GPU; not run here",
        "not measured",
    ),
    "vit-small": Preset(
        {"data": "imagenet", "size": 224, "patch": None, "model": "timm:vit_small_patch16_224", "local_size": 96}
        | {"interpolation": "bicubic", "batch": 1024, "lr": 5e-4 * 1024 / 256, "lr_end": 1e-6 / 2e-3, "epochs": 100}
        | {"warmup": 0.1, "model_args": "drop_path_rate=0.1", "precision": "bf16", "compile": True}
        | {"evaluate_every": 5000},
        "days on 8 GPUs; not run here",
        "the paper on skips, second hand, VOC12 TokenCut: residual 49.4, without residuals 63.2",
    ),
}


def build_model(config: Dino, facts: Facts) -> DINO:
    """Student and teacher, with equal weights."""
    model = DINO(
        backbone(config, facts),
        out=config.projection,
        hidden=config.hidden,
        bottleneck=config.bottleneck,
        layers=config.head_layers,
        norm=config.head_norm,
        bottleneck_norm=config.bottleneck_norm,
        student_temperature=config.student_temperature,
        centre_momentum=config.centre_momentum,
        balance=config.balance,
    )
    if config.freeze_last is None:
        model.spread_(torch.Generator().manual_seed(config.seed))
        model.last_layer().requires_grad_(False)
    return model


class Distillation(CropsObjective):
    """Cross entropy between the teacher's output on global crops and the student's on all other crops."""

    config: Dino
    model: DINO
    optimizer: Any
    progress: Progress

    def check(self) -> None:
        super().check()
        config = self.config
        fractions = ("teacher_warmup", "momentum", "centre_momentum")
        ranges: dict[str, tuple[float, float]] = dict.fromkeys(fractions, (0, 1))
        ranges |= dict.fromkeys(("projection", "hidden", "bottleneck"), (1, math.inf)) | {"freeze_last": (0, math.inf)}
        check_ranges(config, ranges, ("student_temperature", "teacher_temperature", "teacher_start"))
        single = config.local_crops * config.batch == max(1, config.accumulate)
        if single and (config.head_norm or config.bottleneck_norm):
            raise BadInput(
                "one local crop of one image: the head's batch norm needs two samples; raise batch or local_crops, or "
                "leave out head_norm and bottleneck_norm"
            )
        if config.local_crops and config.local_scale > config.scale:
            raise BadInput(
                f"local_scale is {config.local_scale!r}, and scale is {config.scale!r}: local crops show a fraction of "
                "the area between them; lower local_scale"
            )

    def encoder(self, model: Any) -> nn.Module:
        teacher: nn.Module = model.teacher.backbone
        return teacher

    def rewired(self, model: Any) -> tuple[nn.Module, ...]:
        return model.student.backbone, model.teacher.backbone

    def trained(self, model: Any) -> nn.Module:
        student: nn.Module = model.student
        return student

    def start(self, model: Any, sample: Tensor) -> list[str]:
        self.initialise(model.student.backbone, sample[:2], "vit-small")
        model.teacher.load_state_dict(model.student.state_dict())
        if self.config.weights is not None:
            load_dino(model, self.config.weights)
        return []

    def begin(self, model: Any, optimizer: Any, progress: Progress) -> None:
        self.model, self.optimizer, self.progress = model, optimizer, progress
        model.teacher.requires_grad_(False)  # learnable shortcuts have added parameters
        if self.frozen_steps:
            own_group(optimizer, model.last_layer(), "last_layer")

    @property
    def frozen_steps(self) -> int:
        """First steps, in which a learning rate of 0 freezes the last layer."""
        return round((self.config.freeze_last or 0) * self.progress.steps_per_epoch)

    def before_step(self, step: int) -> None:
        config, steps = self.config, self.progress.steps
        rise = min(1.0, step / max(1, round(config.teacher_warmup * steps)))
        self.model.temperature.fill_(config.teacher_start + rise * (config.teacher_temperature - config.teacher_start))
        decay = schedules.cosine(step, total=steps, start=config.weight_decay, end=config.weight_decay_end)
        schedules.apply(self.optimizer, weight_decay=decay)
        if step < self.frozen_steps:
            group_of(self.optimizer, "last_layer")["lr"] = 0.0

    def after_step(self, step: int) -> None:
        total, start = self.progress.steps, self.config.momentum
        self.model.update_teacher_(schedules.cosine(step, total=total, start=start, end=1.0))

    def loss(self, model: nn.Module, batch: Drawn) -> tuple[Tensor, dict[str, Tensor]]:
        output = model(*self.crops.made(*batch[:3]))
        return output.loss, {
            "teacher_entropy": output.entropy,
            "teacher_spread": output.spread,
            "divergence": output.divergence,
        }

    def baseline_loss(self, model: nn.Module, train: Any, test: Any) -> float:
        """The loss of a student whose output does not depend on the image.

        With a trainable last layer it is log(out): the rows become equal, and q uniform. With frozen, evenly spread
        rows, q is not uniform: <p, s> is 0 on average, and the loss is the log of a sum over rows w, which cover all
        directions in b dimensions:

            log sum exp(<w, z> / T) = log(out) + log 0F1(b / 2, 1 / (2 T)^2)
        """
        config = self.config
        if config.freeze_last is not None:
            return math.log(config.projection)
        half, argument = config.bottleneck / 2, 1 / (2 * config.student_temperature) ** 2
        index = torch.arange(round(4 * math.sqrt(argument)) + 100, dtype=torch.float64)  # of the terms of the series
        terms = index * math.log(argument) - torch.lgamma(index + 1) - torch.lgamma(index + half) + math.lgamma(half)
        return math.log(config.projection) + float(terms.logsumexp(0))

    def warnings(self, row: dict[str, Any], share: float) -> Iterator[tuple[str, str]]:
        """Warnings of collapse."""
        if share < 0.05:
            return
        config = self.config
        uniform = math.log(config.projection)
        possible = math.log(min(config.projection, 2 * config.batch // config.accumulate))
        entropy, spread = row.get("teacher_entropy"), row.get("teacher_spread")
        if entropy is not None and entropy > 0.99 * uniform:
            yield "uniform-teacher", f"the teacher's output is uniform: its entropy is {entropy:.3g} of {uniform:.3g}"
        if spread is not None and spread < 0.05 * possible:
            text = f"the teacher's output is the same for every image: the entropy of its mean is {spread:.2g} of "
            yield "one-answer", f"{text}{possible:.3g}"
        if row.get("divergence", 1.0) < 1e-3:
            yield "nothing-to-learn", f"student and teacher agree to within {row['divergence']:.2g}"
        yield from super().warnings(row, share)


# A config of the recipe dino (DINO: self-distillation on crops): `unskip.recipes.dino(preset, **fields)`.
dino = register(Recipe("dino", Dino, _PRESETS, build_model, Distillation))
