"""Supervised training of any timm model with any shortcut, initialisation and optimizer.

Result of "Cutting the Skip" (arXiv 2510.00345): a ViT without residual connections, with a suitable initialisation and
a second-order optimizer, is as accurate as a residual one.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._checks import kind_of
from unskip._extras import need
from unskip._modes import quiet
from unskip.data import Feed, ImageSet
from unskip.errors import BadInput, UnskipWarning
from unskip.recipes._config import Config
from unskip.recipes._distillation import ORIGINAL, Teacher
from unskip.recipes._models import arguments_of, built, check_patch, check_ranges
from unskip.recipes._objective import Facts, Objective
from unskip.recipes._online import Online
from unskip.recipes._registry import Preset, Recipe, register
from unskip.training import Evaluation, RunFolder, ema_weights
from unskip.wiring import Keep, Mismatch, find_wiring, load, parse, rewired


@dataclass(frozen=True)
class Supervised(Config):
    """The config of a supervised run."""

    patch: int | None = 4  # side of a patch in pixels; None: the model's own
    where: str | None = None  # attention | mlp: the sites of the shortcut and of init="skipless"; None: all
    weights: str | None = None  # a folder of unskip.save, a run or its checkpoint; from pretraining, the encoder
    layer_decay: float | None = None  # factor on the learning rate per block, from the head down
    teacher: str | None = None  # "original": distil from the model of --weights, with its skips
    temperature: float = 2.0  # of the distillation
    distillation: float = 1.0  # weight of the distillation loss; 1 - weight is that of the labels
    batch: int = 128  # images per step, over all processes
    epochs: float = 20
    clip: float | None = 1.0  # largest norm of the gradient
    smoothing: float = 0.1  # label smoothing
    crop: Literal["pad", "resized", "center", "none"] = "pad"  # random crop of training images
    flip: bool = True  # random horizontal flips
    mixup: float = 0.0  # a of Beta(a, a)
    cutmix: float = 0.0  # a of Beta(a, a)
    erase: float = 0.0  # probability of random erasing
    randaugment: str | None = None  # "operations,magnitude", such as "2,9", for images read from disk
    drop_path: float = 0.0  # stochastic depth; off if a skip is cut, because nothing is left of a dropped branch

    def unused(self) -> dict[str, str]:
        reasons = super().unused()
        reasons["online_images"] = "accuracy is always measured on all images; leave it out"
        if self.teacher is None:
            reasons |= dict.fromkeys(("temperature", "distillation"), "there is no teacher; set teacher")
        elif self.distillation == 1:
            reasons["smoothing"] = "labels are not part of the loss; set distillation below 1"
        if self.weights is not None and self.init != "default":
            reasons["init"] = "weights replace it; leave weights out"
        if not self.model.startswith("timm:"):
            reason = f"{self.model} is no model of timm; use model_args"
            reasons |= {"patch": reason, "drop_path": reason}
        return reasons

    def resumed(self, run: RunFolder) -> Supervised:
        """Without the original weights: the teacher is in the run folder, trained weights are in a checkpoint."""
        teacher = run.path / ORIGINAL
        if self.teacher is not None and teacher.is_dir():
            return replace(self, weights=str(teacher))
        gone = self.teacher is None and self.weights is not None and not Path(self.weights).exists()
        return replace(self, weights=None) if gone and run.last_checkpoint() is not None else self


_VIT_192 = {"model_args": "depth=12,embed_dim=192,num_heads=3"}
_CARRY = "vo_gain=1,carry=3,mix=0.3,self_attention=0.97"  # three of six heads pass tokens on, three mix tokens
_PAPER: dict[str, Any] = {  # from secondary sources; see the docs
    "data": "imagenet",
    "size": 224,
    "patch": None,
    "batch": 1024,
    "epochs": 300,
    "lr": 1e-3,
    "weight_decay": 0.3,
    "warmup": 5 / 300,
    "crop": "resized",
    "interpolation": "bicubic",
    "mixup": 0.8,
    "cutmix": 1.0,
    "erase": 0.25,
    "randaugment": "2,9",
    "precision": "bf16",
    "compile": True,
    "evaluate_every": 5000,
}
_PRESETS = {
    "digits": Preset(
        {"data": "digits", "size": 8, "patch": 2, "model_args": "depth=4,embed_dim=64,num_heads=4", "flip": False}
        | {"crop": "none", "epochs": 30, "smoothing": 0.0, "batch": 64, "lr": 3e-3},
        "half a minute on one CPU core",
        "accuracy 95.6 ± 1.1 (three seeds)",
    ),
    "cifar": Preset(
        {"data": "cifar10", "size": 32, "batch": 512, "precision": "bf16", "compile": True, "graph": True} | _VIT_192,
        "a minute on one H200",
        "accuracy 74.1; with SOAP at lr 3e-3 81.4, and without skips from skipless 77.6 (three seeds each)",
    ),
    "cifar-skipless": Preset(
        {"data": "cifar10", "size": 32, "batch": 512, "precision": "bf16", "compile": True, "graph": True}
        | {"model_args": "class_token=false,global_pool=avg,depth=12,embed_dim=192,num_heads=6,attn_head_dim=64"}
        | {"shortcut": "cut", "init": f"skipless:shaped,position_code=orthogonal,{_CARRY}", "freeze_heads": 3}
        | {"optimizer": "soap", "lr": 3e-3, "weight_decay": 0.3, "decays": "blocks"}
        | {"epochs": 100, "mixup": 0.8, "cutmix": 1.0},
        "five minutes on one H200",
        "accuracy 90.1 ± 0.4; the same model with skips 91.2 ± 0.1 (three seeds each)",
    ),
    "tiny-imagenet": Preset(
        {"data": "tiny-imagenet", "size": 64, "patch": 8, "batch": 512, "epochs": 100, "crop": "resized"}
        | {"mixup": 0.8, "cutmix": 1.0, "precision": "bf16", "compile": True, "model": "timm:vit_small_patch16_224"},
        "about 10 minutes on one H200",
        "accuracy 62.1 with SOAP at lr 3e-3, weight decay 0.3, twelve heads of 64 and mean pooling (one seed)",
    ),
    "vit-s16": Preset(
        {"model": "timm:vit_small_patch16_224"} | _PAPER, "about half of vit-b16; not run here", "not measured"
    ),
    "vit-b16": Preset(
        {"model": "timm:vit_base_patch16_224"} | _PAPER,
        "about 32 hours on one H200, by the measured step; not run here",
        "the paper, second hand: residual 80.3 AdamW, skipless + init 78.1 AdamW, 80.8 SOAP",
    ),
}


def build_model(config: Supervised, facts: Facts) -> nn.Module:
    """The classifier."""
    return built(config, _arguments(config, facts))


class Classification(Objective):
    """Cross entropy of the labels, distillation from a teacher, or both."""

    config: Supervised
    model_config: Supervised  # as the model was built; `start` may turn drop path off in `config`
    classes: int  # of the training set
    teacher: Teacher | None = None

    def check(self) -> None:
        config = self.config
        ranges: dict[str, tuple[float, float]] = dict.fromkeys(("smoothing", "drop_path", "distillation"), (0, 1))
        check_ranges(config, {"size": (1, math.inf), **ranges}, ["temperature"])
        if config.teacher not in (None, "original"):
            raise BadInput(f"teacher is {config.teacher!r}; it can be 'original'")
        if config.teacher is not None and config.weights is None:
            raise BadInput("the teacher has random weights; give --weights, the model to distil from")

    def builder(self, facts: Facts) -> dict[str, Any]:
        return {"spec": self.config.model, "kwargs": _arguments(self.config, facts)}

    def facts(self, images: ImageSet) -> Facts:
        self.classes = len(images.classes)
        return super().facts(images)

    def start(self, model: nn.Module, sample: Tensor) -> list[str]:
        config = self.model_config = self.config
        notes = [] if config.weights is None else _load_weights(config, model)
        notes += _check_logits(config.model, model, sample[:2], self.classes)
        if config.teacher is not None:
            self.teacher = Teacher(model, config.temperature, config.compile)
        if (wiring := find_wiring(model)) is not None:
            wiring.undo()  # the skips follow from the config, not from the weights
        if config.drop_path and _cuts(config, model, sample[:2]):
            notes.append("drop path is off, because a skip is cut: nothing would be left of a dropped branch")
            self.config = replace(config, drop_path=0.0)
            for module in [*model.modules()]:
                for name, child in [*module.named_children()]:
                    if hasattr(child, "drop_prob"):
                        setattr(module, name, nn.Identity())
        if config.weights is None:
            self.initialise(model, sample)
        return notes

    def keep(self, facts: Facts, run: Path) -> None:
        if self.teacher is not None:
            self.teacher.save(run, {"spec": self.model_config.model, "kwargs": _arguments(self.model_config, facts)})

    def optimizer_options(self) -> dict[str, Any]:
        return {"layer_decay": self.config.layer_decay}

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = batch
        target = None if self.teacher is None else self.teacher(images)  # first, so that its activations are freed
        logits = model(images).float()
        hard = labels if labels.ndim == 1 else labels.argmax(-1)
        numbers = {"train_accuracy": (logits.argmax(-1) == hard).float().mean()}
        if self.teacher is None or target is None:
            return F.cross_entropy(logits, labels, label_smoothing=self.config.smoothing), numbers
        loss, share = self.teacher.loss(logits, target), self.config.distillation
        numbers["teacher_agreement"] = (logits.argmax(-1) == target.argmax(-1)).float().mean()
        if share < 1:
            loss = torch.lerp(F.cross_entropy(logits, labels, label_smoothing=self.config.smoothing), loss, share)
        return loss, numbers

    def baseline_loss(self, model: nn.Module, train: ImageSet, test: Feed) -> float | None:
        """The entropy of the smoothed class frequencies: the loss of the best constant prediction."""
        if self.teacher is not None:
            return None
        classes, smoothing = len(train.classes), self.config.smoothing
        frequencies = train.labels.bincount(minlength=classes).double() / len(train)
        return float(torch.special.entr((1 - smoothing) * frequencies + smoothing / classes).sum())

    def evaluations(self, model: nn.Module, train: Feed, test: Feed, split: str) -> dict[str, Evaluation]:
        return {"accuracy-v1": Online(["accuracy-v1"], None, test, split, {"precision": self.config.precision})}


def _arguments(config: Supervised, facts: Facts) -> dict[str, Any]:
    arguments: dict[str, Any] = arguments_of(config.model_args)
    if not config.model.startswith("timm:"):
        return arguments
    known = need("timm").get_pretrained_cfg(config.model.removeprefix("timm:"))
    defaults: dict[str, Any] = {"num_classes": facts.classes, "in_chans": facts.channels}
    if config.drop_path:
        defaults["drop_path_rate"] = config.drop_path
    if known is None or known.fixed_input_size:  # convolutional models take any size, and have no img_size
        defaults["img_size"] = facts.size
        if config.patch is not None:
            defaults["patch_size"] = config.patch
            check_patch(config, "size")
    return defaults | arguments


def _check_logits(name: str, model: nn.Module, images: Tensor, classes: int) -> list[str]:
    """Raises BadInput for a model that is no classifier of these images; a note about logits of no class."""
    try:
        with quiet(model, training=False):
            logits = model(images)
    except Exception as error:  # a model of one's own raises anything
        size = " x ".join(map(str, images.shape[1:]))
        raise BadInput(f"{name} does not take images of {size}: {type(error).__name__}: {error}") from error
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < classes:
        raise BadInput(
            f"{name} returns {kind_of(logits)} for {len(images)} images, and the data has {classes} classes; return "
            "logits of shape (images, classes)"
        )
    known = logits.shape[1]
    return [] if known == classes else [f"{name} has {known} logits, and the data has {classes} classes"]


def _load_weights(config: Supervised, model: nn.Module) -> list[str]:
    """Loads the weights of a config; returns notes about them."""
    notes = []
    folder = _checkpoint(str(config.weights))
    encoder = folder if folder.name == "encoder" else folder / "encoder"
    if (encoder / "unskip.json").is_file():
        if config.teacher is not None:
            raise BadInput(f"{config.weights} is an encoder without a classifier, so no teacher; leave teacher out")
        pretrained = load(encoder)
        wiring = find_wiring(pretrained)
        if wiring is not None:
            wiring.undo()
        missing = _copy_encoder(model, pretrained, str(config.weights))
        notes.append(f"not in the encoder of {config.weights}, newly initialised: {', '.join(missing)}")
    else:
        try:
            wiring = find_wiring(load(folder, model))
        except Mismatch as error:  # its advice is for callers of `load`
            raise BadInput(
                f"{config.weights}: {error.difference}; use the model, model_args, size and patch it was saved with, "
                "and as many classes"
            ) from error
        if (means := ema_weights(folder)) is not None:
            model.load_state_dict(means)  # as in unskip.load
            notes.append(f"the EMA weights of {config.weights} are used")
    model.float()  # training keeps weights in float32
    if wiring is not None and parse(config.shortcut) == Keep():
        notes.append(f"{config.weights} was saved with other skips; this run keeps all skips (shortcut keep)")
    return notes


def _checkpoint(weights: str) -> Path:
    """The newest checkpoint, if `weights` is a run."""
    if not (Path(weights) / "config.json").is_file() or (Path(weights) / "unskip.json").is_file():
        return Path(weights)
    last = RunFolder.open(weights).last_checkpoint()
    if last is None:
        raise BadInput(f"{weights}: the run has no checkpoint yet; train it first, or give another folder")
    return last[1]


def _copy_encoder(model: nn.Module, encoder: nn.Module, weights: str) -> list[str]:
    """Copies the weights of an encoder. Returns the modules that it lacks: the head, and often the last norm."""
    source, target = encoder.state_dict(), model.state_dict()
    if "norm.weight" not in target:  # models that average tokens have a norm after the mean instead
        source = {name: value for name, value in source.items() if not name.startswith("norm.")}
    modules = {name.split(".")[0] for name in source}
    for name in sorted(source.keys() | {name for name in target if name.split(".")[0] in modules}):
        old, new = (tuple(state[name].shape) if name in state else "missing" for state in (source, target))
        if old != new:
            raise BadInput(
                f"{weights}: {name} is {old} in the encoder and {new} in the model; use the model, model_args, size "
                "and patch of the pretraining"
            )
    model.load_state_dict(source, strict=False)
    return sorted({name.split(".")[0] for name in target} - modules)


def _cuts(config: Supervised, model: nn.Module, sample: Tensor) -> bool:
    """Whether the shortcut cuts a skip of the model at any step."""
    rule = parse(config.shortcut)
    with (
        warnings.catch_warnings(action="ignore", category=UnskipWarning),  # about drop path, which is turned off
        rewired(model, rule, sample, config.where) as wiring,
    ):
        for step in rule.moments():
            wiring.step(step)
            if 0 in wiring.alphas:
                return True
    return False


# A config of the recipe supervised (classification): `unskip.recipes.supervised(preset, **fields)`.
supervised = register(Recipe("supervised", Supervised, _PRESETS, build_model, Classification))
