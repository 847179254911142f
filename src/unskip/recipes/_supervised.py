"""Supervised training of any timm model with any shortcut, initialisation and optimizer.

The second paper's result ("Cutting the Skip", arXiv 2510.00345): a residual-free ViT, initialised for it and trained by
a second-order optimizer, keeps up with a residual one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.data import Augment, Feed
from unskip.errors import BadInput
from unskip.init import start_
from unskip.optim import build as build_optimizer
from unskip.recipes._config import Config
from unskip.recipes._data import Opener, both, judged_split
from unskip.recipes._registry import Preset, Recipe, register, resolve
from unskip.recipes._shared import arguments_of, built, device_of, schedule_of, steps_of
from unskip.training import RunFolder, Schedule, Task
from unskip.wiring import Wiring, find_wiring, load, parse, rewire, save


@dataclass(frozen=True)
class Supervised(Config):
    """The config of a supervised run."""

    patch: int | None = 4  # sides of a patch in pixels; None: as the model has it
    where: str | None = None  # the sites that shortcut and init="skipless" speak of: "attention", "mlp", or all
    weights: str | None = None  # a folder of unskip.save, a run, or a checkpoint of one; of pretraining: its encoder
    layer_decay: float | None = None  # the learning rate falls by this factor a block, from the head down
    teacher: str | None = None  # "original": distil from the model as it was before its skips were changed
    temperature: float = 2.0  # of the teacher
    batch: int = 128  # images a step, over all processes
    epochs: float = 20
    clip: float | None = 1.0  # the largest norm of the gradient
    smoothing: float = 0.1  # of the labels
    crop: Literal["pad", "resized", "center", "none"] = "pad"
    flip: bool = True
    mixup: float = 0.0  # a of Beta(a, a)
    cutmix: float = 0.0  # a of Beta(a, a)
    erase: float = 0.0  # a probability
    randaugment: str | None = None  # "operations,magnitude" as in "2,9", for images that are read from disk
    drop_path: float = 0.0  # switched off where a skip is cut: a dropped branch has nothing else to live on
    average: float | None = None  # decay of averaged weights, which are those that are judged

    def idle(self) -> dict[str, str]:
        found = super().idle()
        if self.teacher is None:
            found["temperature"] = "there is no teacher; give one"
        else:
            found["smoothing"] = "a teacher takes the place of the labels; train without"
        if not self.model.startswith("timm:"):
            why = f"{self.model} is not told of it, as models of timm are; write what it calls that into model_args"
            found |= {"patch": why, "drop_path": why}
        return found


_VIT_192 = {"model_args": "depth=12,embed_dim=192,num_heads=3"}
_PAPER: dict[str, Any] = {  # as transcribed by others; see the docs
    "data": "imagenet",
    "size": 224,
    "patch": None,
    "batch": 1024,
    "epochs": 300,
    "lr": 1e-3,
    "weight_decay": 0.3,
    "warmup": 5 / 300,
    "crop": "resized",
    "mixup": 0.8,
    "cutmix": 1.0,
    "erase": 0.25,
    "randaugment": "2,9",
    "precision": "bf16",
    "compile": True,
    "workers": 12,
    "evaluate_every": 5000,
}
_PRESETS = {
    "digits": Preset(
        {"data": "digits", "size": 8, "patch": 2, "model_args": "depth=4,embed_dim=64,num_heads=4", "flip": False}
        | {"crop": "none", "epochs": 30, "smoothing": 0.0, "batch": 64, "lr": 3e-3},
        "about a minute on two CPU cores",
        "not measured",
    ),
    "cifar": Preset(
        {"data": "cifar10", "size": 32, "batch": 512, "precision": "bf16", "compile": True, "graph": True} | _VIT_192,
        "a minute on one H200",
        "accuracy 74.1; with SOAP at lr 3e-3 81.4, and without skips from their initialisation 77.6",
    ),
    "tiny-imagenet": Preset(
        {"data": "tiny-imagenet", "size": 64, "patch": 8, "batch": 512, "epochs": 100, "crop": "resized"}
        | {"mixup": 0.8, "cutmix": 1.0, "precision": "bf16", "compile": True, "model": "timm:vit_small_patch16_224"},
        "hours on one GPU; not run here",
        "not measured",
    ),
    "vit-s16": Preset(
        {"model": "timm:vit_small_patch16_224"} | _PAPER, "about a day on 8 GPUs; not run here", "not measured"
    ),
    "vit-b16": Preset(
        {"model": "timm:vit_base_patch16_224"} | _PAPER,
        "days on 8 GPUs; not run here",
        "the paper, second hand: residual 80.3 AdamW, skipless + init 78.1 AdamW, 80.8 SOAP",
    ),
}


def supervised(preset: str = "digits", **overrides: Any) -> Supervised:
    """The config of a supervised run: a preset with some fields changed."""
    config: Supervised = resolve("supervised", preset, overrides)
    return config


def build(config: Supervised, opener: Opener | None = None) -> tuple[Task, Schedule]:
    """The task and schedule of a config. Rewiring and parameter groups come before any wrapping."""
    _check(config)
    device = device_of(config.device)
    train, test = both(config, opener)
    names = ("crop", "flip", "mixup", "cutmix", "erase", "randaugment")
    augment = Augment(**{name: getattr(config, name) for name in names})
    options: dict[str, Any] = {"batch": config.batch, "size": config.size, "device": device, "workers": config.workers}
    feed = Feed(train, seed=config.seed, augment=augment, **options)
    judge = Feed(test, seed=0, augment=None, **options)
    arguments = _model_arguments(config, len(train.classes), train.channels)
    model = built(config, arguments).to(device)
    sample = next(iter(judge.evaluate()))[0][:8]
    notes = _fill(config, model)
    if config.drop_path and _cuts(config):
        notes.append("drop path is off: where a skip is cut, a dropped branch leaves nothing")
    teacher = _teacher(config, model)
    start_(model, config.init, torch.Generator().manual_seed(config.seed), sample, where=config.where)
    wiring = _wired(config, model, sample)
    optimizer = build_optimizer(model, config.optimizer, config.lr, config.weight_decay, layer_decay=config.layer_decay)
    steps = steps_of(config, feed.steps_per_epoch)
    schedule = schedule_of(config, steps)
    if wiring is not None and _still_moving(wiring, steps):
        notes.append(
            f"the run ends after {steps} steps, before {config.shortcut} does: take a longer run or an earlier @"
        )

    def loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = batch
        logits = network(images).float()
        if teacher is not None:
            with torch.no_grad():
                target = (teacher(images).float() / config.temperature).softmax(-1)
            value = F.cross_entropy(logits / config.temperature, target) * config.temperature**2
        else:
            value = F.cross_entropy(logits, labels, label_smoothing=config.smoothing)
        hard = labels if labels.ndim == 1 else labels.argmax(-1)
        return value, {"train_accuracy": (logits.argmax(-1) == hard).float().mean()}

    task = Task(
        model=model,
        feed=feed,
        loss=loss,
        optimizer=optimizer,
        wiring=wiring,
        trivial=trivial(config, train.labels, len(train.classes)) if teacher is None else None,
        evaluations={"accuracy-v1": _accuracy(judge, judged_split(config))},
        notes=(*train.report, *test.report, *notes),
        sample=sample,
        save=lambda network, folder: save(network, folder, {"spec": config.model, "kwargs": arguments}),
    )
    return task, schedule


def _accuracy(judge: Feed, split: str) -> Callable[[nn.Module], dict[str, float]]:
    def accuracy(network: nn.Module) -> dict[str, float]:
        right, losses = 0, 0.0
        for images, labels in judge.evaluate():
            logits = network(images).float()
            right += int((logits.argmax(-1) == labels).sum())
            losses += float(F.cross_entropy(logits, labels, reduction="sum"))
        total = len(judge.images)
        return {f"{split}_accuracy": right / total, f"{split}_loss": losses / total}

    return accuracy


def _check(config: Supervised) -> None:
    if config.size < 1:
        raise BadInput(f"size is {config.size!r}; an image is at least one pixel wide")
    for name, low, high in (("smoothing", 0.0, 1.0), ("drop_path", 0.0, 1.0)):
        if not low <= getattr(config, name) <= high:
            raise BadInput(f"{name} is {getattr(config, name)!r}; it goes from {low:g} to {high:g}")
    if not config.temperature > 0:
        raise BadInput(f"temperature is {config.temperature!r}; it is above 0")


def trivial(config: Supervised, labels: Tensor, classes: int) -> float:
    """The loss of a model that knows no more than how frequent each class is: the entropy of what it is told."""
    told = labels.bincount(minlength=classes).double() / len(labels)
    told = (1 - config.smoothing) * told + config.smoothing / classes
    return float(torch.special.entr(told).sum())


def _model_arguments(config: Supervised, classes: int, channels: int) -> dict[str, Any]:
    arguments: dict[str, Any] = arguments_of(config.model_args)
    if config.model.startswith("timm:"):
        import timm

        known = timm.get_pretrained_cfg(config.model.removeprefix("timm:"))
        given: dict[str, Any] = {"num_classes": classes, "in_chans": channels}
        if config.drop_path and not _cuts(config):
            given["drop_path_rate"] = config.drop_path
        if known is None or known.fixed_input_size:  # convolutional models take images of any size, and are not told
            given["img_size"] = config.size
            if config.patch is not None:
                given["patch_size"] = config.patch
                if config.size % config.patch:
                    raise BadInput(
                        f"patches of {config.patch} do not divide images of {config.size}; change size or patch"
                    )
        arguments = given | arguments
    return arguments


def _fill(config: Supervised, model: nn.Module) -> list[str]:
    """Loads the weights, where some are given. Returns what should be known about them."""
    if config.weights is None:
        return []
    notes = []
    folder = _checkpoint(config.weights)
    encoder = folder if folder.name == "encoder" else folder / "encoder"
    if (encoder / "unskip.json").is_file():
        if config.teacher is not None:
            raise BadInput(f"{config.weights} made an encoder, which knows no classes to teach; leave teacher out")
        pretrained = load(encoder)
        if rewired := find_wiring(pretrained) is not None:
            Wiring.of(pretrained).undo()
        notes.append(
            f"new beside the encoder of {config.weights}: {', '.join(_take(model, pretrained, config.weights))}"
        )
    else:
        rewired = find_wiring(load(folder, model)) is not None
    if rewired and config.shortcut == "keep":
        notes.append(f"{config.weights} was saved with other skips; here all are kept, as shortcut says")
    return notes


def _checkpoint(weights: str) -> Path:
    """The newest checkpoint where a whole run is given."""
    if not (Path(weights) / "config.json").is_file() or (Path(weights) / "unskip.json").is_file():
        return Path(weights)
    found = RunFolder.open(weights).last_checkpoint()
    if found is None:
        raise BadInput(f"{weights}: the run has no checkpoint yet; train it first, or give another folder")
    return found[1]


def _take(model: nn.Module, encoder: nn.Module, weights: str) -> list[str]:
    """Copies the weights of an encoder. Returns the modules that it lacks: the head, and often the last norm."""
    taken, own = encoder.state_dict(), model.state_dict()
    if "norm.weight" not in own:  # one after the mean takes its place, where tokens are averaged
        taken = {name: value for name, value in taken.items() if not name.startswith("norm.")}
    known = {name.split(".")[0] for name in taken}
    for name in sorted(taken.keys() | {name for name in own if name.split(".")[0] in known}):
        here, there = (tuple(each[name].shape) if name in each else "missing" for each in (taken, own))
        if here != there:
            raise BadInput(
                f"{weights}: {name} is {here} in the encoder and {there} in the model to be trained; give it the "
                "model, model_args, size and patch of the pretraining"
            )
    model.load_state_dict(taken, strict=False)
    return sorted({name.split(".")[0] for name in own} - known)


def _teacher(config: Supervised, model: nn.Module) -> nn.Module | None:
    if config.teacher is None:
        return None
    if config.teacher != "original":
        raise BadInput(f"teacher is {config.teacher!r}; it can be 'original'")
    if config.weights is None:
        raise BadInput("a teacher that knows nothing teaches nothing: give --weights, the model to distil from")
    return copy.deepcopy(model).eval().requires_grad_(False)


def _wired(config: Supervised, model: nn.Module, sample: Tensor) -> Wiring | None:
    """The skips as the config says, whatever the weights were trained with."""
    if config.shortcut == "keep" and find_wiring(model) is None:
        return None
    return rewire(model, config.shortcut, sample, where=config.where)


def _still_moving(wiring: Wiring, steps: int) -> bool:
    """Whether the shortcuts of the last step are not yet those they move to."""
    found = []
    for step in (steps - 1, 2**62, 0):  # the run's last, the very last, and back to where it begins
        wiring.step(step)
        found.append([*wiring.alphas])
    return found[0] != found[1]


def _cuts(config: Supervised) -> bool:
    """Whether skips are cut, at once or in the end."""
    return parse(config.shortcut).cuts(24)


register(Recipe("supervised", Supervised, _PRESETS, build))
