"""Fine-tuning: train a copy of the encoder and a linear head on labelled images.

    logits = W norm(mean over patch tokens of the last block) + b

As in MAE (arXiv 2111.06377), a norm after the mean replaces the encoder's last norm, and the learning rate decays by a
constant factor per block from the head to the input. The copy keeps the wiring of the encoder, so a decayed model is
fine-tuned as it was pretrained.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._extras import need
from unskip._modes import evaluating
from unskip._warn import warn
from unskip.data import Feed, ImageSet, Normalise, preprocess_of
from unskip.errors import BadInput, TrainingError
from unskip.evals._extract import autocast
from unskip.evals._input import check_classes
from unskip.evals._registry import protocol as find
from unskip.evals._registry import register
from unskip.evals._split import Options, Split
from unskip.optim import build, schedules
from unskip.training import Graphed, Precision
from unskip.wiring import find_wiring


class Classifier(nn.Module):
    """A timm encoder with a linear head on the mean of its patch tokens."""

    def __init__(self, encoder: nn.Module, classes: int, start: float) -> None:
        super().__init__()
        if not callable(getattr(encoder, "forward_features", None)) or not hasattr(encoder, "num_features"):
            raise BadInput(
                f"finetune: {type(encoder).__name__} has no forward_features; pass a timm model with patch tokens"
            )
        self.encoder = encoder
        if isinstance(getattr(encoder, "norm", None), nn.Module):
            encoder.norm = nn.Identity()
        self.prefix = int(getattr(encoder, "num_prefix_tokens", 0))
        width = int(encoder.num_features)  # type: ignore[arg-type]
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.head.weight, std=start)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.encoder.forward_features(images)  # type: ignore[operator]
        if tokens.ndim != 3:
            raise BadInput(
                f"finetune: {type(self.encoder).__name__} must return tokens (n, tokens, dim), got features of shape "
                f"{tuple(tokens.shape)}"
            )
        out: Tensor = self.head(self.norm(tokens[:, self.prefix :].mean(1)))
        return out


def finetune(
    model: nn.Module,
    train: ImageSet,
    test: ImageSet,
    protocol: str = "finetune-mae-v1",
    *,
    size: int | None = None,
    seed: int = 0,
    precision: Precision = "float32",
    workers: int | None = None,
    graph: bool = False,
    normalise: Normalise | None = None,
    changes: Mapping[str, Any] | None = None,
) -> float:
    """The accuracy on `test` of a fine-tuned copy of the model; the model does not change.

    `changes` overrides settings of the protocol, such as {"epochs": 20}; record them with the number. With `graph` the
    forward and backward pass are replayed as one CUDA graph on a GPU, which removes launch overhead.
    """
    settings = find(protocol, evaluate_finetune).settings_with(changes)
    preprocess = preprocess_of(model, train.channels, normalise)
    if size is not None:
        preprocess = replace(preprocess, size=size)
    device = next(model.parameters()).device
    options = Options(preprocess, device, seed=seed, precision=precision, workers=workers, graph=graph)
    splits = (Split(each.labels, images=each, options=options) for each in (train, test))
    return evaluate_finetune(model, *splits, **settings)["finetune"]


@register(
    "finetune-mae-v1",
    needs="model",
    about="The whole encoder and a linear head on the mean of the patch tokens: MAE's settings for ViT-B, arXiv "
    "2111.06377, without RandAugment.",
    fractions=("finetune",),
    positive=("epochs", "batch", "lr_256"),
    epochs=100.0,
    warmup=5.0,
    batch=1024,
    lr_256=5e-4,  # the learning rate is this times batch / 256
    layer_decay=0.65,
    weight_decay=0.05,
    betas=(0.9, 0.999),
    drop_path=0.1,
    smoothing=0.1,
    mixup=0.8,
    cutmix=1.0,
    erase=0.25,
    crop="resized",
    flip=True,
    start=2e-5,
)
def evaluate_finetune(model: nn.Module, train: Split, test: Split, **settings: Any) -> dict[str, float]:
    """The accuracy of a fine-tuned copy of the model."""
    if train.images is None or train.options.preprocess is None:
        raise BadInput("finetune: images are augmented, so pass image sets instead of feeds")
    check_classes("finetune", train.labels, test.labels)
    device, seed = train.options.device, train.options.seed
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(seed)
        network = Classifier(copy.deepcopy(model), len(train.images.classes), settings["start"]).to(device)
        network.requires_grad_(True)
        _set_drop_path(network.encoder, _drop_path_rate(model, settings["drop_path"]))
        return {"finetune": _train(network, train.images, test.images, settings, train.options)}


def _train(
    network: Classifier, train: ImageSet, test: ImageSet, settings: Mapping[str, Any], options: Options
) -> float:
    device, preprocess, seed, precision = options.device, options.preprocess, options.seed, options.precision
    assert preprocess is not None
    augment = preprocess.augment(**{name: settings[name] for name in ("crop", "flip", "mixup", "cutmix", "erase")})
    batch = min(settings["batch"], len(train))
    feed = Feed(train, batch, preprocess.size, seed=seed, augment=augment, device=device, workers=options.workers)
    lr = settings["lr_256"] * batch / 256
    optimizer = build(
        network, "adamw", lr, settings["weight_decay"], layer_decay=settings["layer_decay"], betas=settings["betas"]
    )
    total, warmup = (round(settings[name] * feed.steps_per_epoch) for name in ("epochs", "warmup"))
    if total <= warmup:
        raise BadInput(f"finetune: {total} steps, but the warm-up alone takes {warmup}; set more epochs")

    def forward_backward(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        images, targets = batch
        with autocast(device, precision):
            logits = network(images).float()
        loss = F.cross_entropy(logits, targets, label_smoothing=settings["smoothing"])
        loss.backward()
        return loss.detach(), {}

    network.train()
    graphed = Graphed(forward_backward, network) if options.graph and device.type == "cuda" else None
    loss = torch.zeros(())
    for step, images_and_targets in enumerate(feed.iterate(0, total)):
        schedules.apply(optimizer, lr=schedules.warmup_cosine(step, total=total, warmup=warmup))
        if graphed is None:
            optimizer.zero_grad(set_to_none=True)
            loss, _ = forward_backward(images_and_targets)
        else:  # overwrites the gradients in place
            loss, _ = graphed(images_and_targets, None, seed)
        optimizer.step()
    if not bool(torch.isfinite(loss)):
        raise TrainingError(f"finetune: the loss is {float(loss)} after {total} steps; lower lr_256, or warm up longer")
    correct = torch.zeros((), dtype=torch.int64, device=device)
    tests = Feed(test, batch, preprocess.size, augment=preprocess.augment(), device=device, workers=options.workers)
    with evaluating(network), torch.no_grad():
        for images, labels in tests.evaluate():
            with autocast(device, precision):
                correct += (network(images).argmax(1) == labels).sum()
    return int(correct) / len(test)


def _drop_path_rate(model: nn.Module, rate: float) -> float:
    """The drop path rate; 0 for a model with cut skips, because dropping a branch would leave nothing."""
    wiring = find_wiring(model)
    if wiring is None or not rate or all(wiring.alphas):
        return rate
    warn(
        f"finetune: drop path, {rate:g} in the protocol, is turned off: with a cut skip, dropping a branch leaves "
        "nothing. Compare the result only with other models without skips."
    )
    return 0.0


def _set_drop_path(encoder: nn.Module, rate: float) -> None:
    """Drop path that grows linearly with depth up to `rate`, in timm blocks."""
    if not rate:
        return
    DropPath = need("timm.layers").DropPath
    blocks: Any = getattr(encoder, "blocks", ())
    for index, block in enumerate(blocks):
        for name in ("drop_path1", "drop_path2"):
            if isinstance(getattr(block, name, None), nn.Identity | DropPath):
                setattr(block, name, DropPath(rate * index / max(1, len(blocks) - 1)))
