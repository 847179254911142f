"""Fine-tuning: a copy of the encoder and a linear head, trained together on labelled images.

    logits = W norm(mean over patch tokens of the last block) + b

The encoder's own last norm gives way to one after the mean, and the learning rate falls from the head down by a factor
a block, as MAE fine-tunes (arXiv 2111.06377). The copy keeps the wiring of the encoder: a decayed model is fine-tuned
as it was pretrained.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip.data import Augment, Feed, ImageSet
from unskip.errors import BadInput
from unskip.evals._extract import Precision, autocast, evaluating
from unskip.evals._protocols import protocol as find
from unskip.optim import build, schedules


class Classifier(nn.Module):
    """An encoder of timm with a head on the mean of its patch tokens."""

    def __init__(self, encoder: nn.Module, classes: int, start: float) -> None:
        super().__init__()
        if not callable(getattr(encoder, "forward_features", None)) or not hasattr(encoder, "num_features"):
            raise BadInput(
                f"finetune: {type(encoder).__name__} has no forward_features; give a model of timm with patch tokens"
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
                f"finetune: {type(self.encoder).__name__} gives features of shape {tuple(tokens.shape)}, not tokens"
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
    workers: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> float:
    """The accuracy on `test` of a fine-tuned copy of the model, which itself stays as it is.

    `changes` sets some of the protocol's settings otherwise, such as {"epochs": 20}; record them with the number.
    """
    settings = {**find(protocol, "finetune").settings, **(changes or {})}
    unknown = sorted(set(changes or {}) - set(find(protocol).settings))
    if unknown:
        raise BadInput(f"finetune: {protocol} has no setting {', '.join(unknown)}; it has {', '.join(settings)}")
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(seed)
        network = Classifier(copy.deepcopy(model), len(train.classes), settings["start"]).to(device)
        network.requires_grad_(True)
        _drop_paths(network.encoder, settings["drop_path"])
        return _train(network, train, test, settings, size, seed, precision, workers)


def _train(
    network: Classifier,
    train: ImageSet,
    test: ImageSet,
    settings: Mapping[str, Any],
    size: int | None,
    seed: int,
    precision: Precision,
    workers: int,
) -> float:
    device = network.head.weight.device
    augment = Augment(**{name: settings[name] for name in ("crop", "flip", "mixup", "cutmix", "erase")})
    batch = min(settings["batch"], len(train))
    feed = Feed(train, batch, size, seed=seed, augment=augment, device=device, workers=workers)
    lr = settings["lr_256"] * batch / 256
    optimizer = build(
        network, "adamw", lr, settings["weight_decay"], layer_decay=settings["layer_decay"], betas=settings["betas"]
    )
    total, warmup = (round(settings[name] * feed.steps_per_epoch) for name in ("epochs", "warmup"))
    if total <= warmup:
        raise BadInput(f"finetune: {total} steps, and the warm-up alone takes {warmup}; give it more epochs")
    network.train()
    for step, (images, labels) in enumerate(feed.iterate(0, total)):
        schedules.apply(optimizer, lr=schedules.warmup_cosine(step, total=total, warmup=warmup))
        with autocast(device, precision):
            logits = network(images).float()
        loss = F.cross_entropy(logits, labels, label_smoothing=settings["smoothing"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    right = torch.zeros((), dtype=torch.int64, device=device)
    judge = Feed(test, batch, size, device=device, workers=workers)
    with evaluating(network), torch.no_grad():
        for images, labels in judge.evaluate():
            with autocast(device, precision):
                right += (network(images).argmax(1) == labels).sum()
    return int(right) / len(test)


def _drop_paths(encoder: nn.Module, rate: float) -> None:
    """Drop path that grows with depth up to `rate`, where the blocks have a place for it."""
    from timm.layers.drop import DropPath

    blocks: Any = getattr(encoder, "blocks", ())
    for index, block in enumerate(blocks):
        for name in ("drop_path1", "drop_path2"):
            if isinstance(getattr(block, name, None), nn.Identity | DropPath) and rate:
                setattr(block, name, DropPath(rate * index / max(1, len(blocks) - 1)))
