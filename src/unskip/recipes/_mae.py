"""Pretraining of a masked autoencoder, plain or with decayed shortcuts and long skips.

The main result of "Residual Connections Harm Generative Representation Learning" (arXiv 2404.10947): decayed identity
shortcuts in the encoder, with long skips for the details, lift what MAE's features know of the class.

    the paper's method    --shortcut decay:0.6 (or decay:product=5e-3) --long-skips --init zero
    plain MAE             --shortcut keep --no-long-skips --init default
    its ablations         --shortcut keep | scale:0.7071,0.7071 | scale:1,0.7071 | learn:1.0
                          --where attention | mlp        --no-long-skips        --init default
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unskip.anatomy import Example, block_axes
from unskip.data import Augment, Feed
from unskip.errors import BadInput
from unskip.evals import extract, rank
from unskip.init import zero_branches_
from unskip.models import MAE, load_published
from unskip.optim import build as build_optimizer
from unskip.recipes._config import Config
from unskip.recipes._data import Opener, both, judged_split
from unskip.recipes._online import check_online, neighbours, some
from unskip.recipes._registry import Preset, Recipe, register, resolve
from unskip.recipes._shared import arguments_of, built, device_of, save_with_encoder, schedule_of, steps_of, wired
from unskip.training import Schedule, Task


@dataclass(frozen=True)
class Mae(Config):
    """The config of a pretraining run."""

    patch: int | None = 4  # sides of a patch in pixels; None: as the model has it
    shortcut: str = "decay:0.6"  # in the encoder alone
    long_skips: bool = True  # encoder blocks hand their outputs to the decoder
    init: str = "zero"  # zero: encoder and decoder branches and the head start at zero | default
    weights: str | None = None  # a published checkpoint of plain MAE
    decoder_width: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16
    mask: float = 0.75  # share of the patches
    norm_pix: bool = True  # patches are painted at mean 0, variance 1
    narrow: bool = False  # the streams in autocast's precision: faster, and it rounds more
    lr: float = 3e-4
    epochs: float = 60
    warmup: float = 0.05  # share of the steps
    crop: Literal["pad", "resized", "center", "none"] = "resized"
    scale: float = 0.2  # the least share of the area that a resized crop takes
    flip: bool = True
    average: float | None = None  # decay of averaged weights, which are those that are judged
    online_images: int = 10_000  # how many images of each split the neighbours and the rank are judged on in training
    health: bool = True  # look at features and attention with each evaluation, and warn; takes some seconds

    def idle(self) -> dict[str, str]:
        return super().idle() | ({} if self.crop == "resized" else {"scale": f"crop is {self.crop}; take resized"})


_PRESETS = {
    "digits": Preset(
        {"data": "digits", "size": 8, "patch": 2, "model_args": "depth=4,embed_dim=64,num_heads=4", "flip": False}
        | {"crop": "none", "epochs": 30, "batch": 64, "lr": 1e-3, "mask": 0.5}
        | {"decoder_width": 32, "decoder_depth": 2, "decoder_heads": 4},
        "under a minute on one CPU core",
        "not measured",
    ),
    "cifar": Preset(
        {"data": "cifar10", "size": 32, "model_args": "depth=12,embed_dim=192,num_heads=3", "epochs": 200}
        | {"lr": 1e-3, "decoder_width": 128, "decoder_depth": 6, "decoder_heads": 4, "evaluate_every": 2000}
        | {"precision": "bf16", "graph": True, "shortcut": "decay:0.8"},
        "about 6 minutes on one H200",
        "after 180 epochs KNN 69.5, linear probe 72.8, one seed (long skips alone: 68.0, 71.5)",
    ),
    "tiny-imagenet": Preset(
        {"data": "tiny-imagenet", "size": 64, "patch": 8, "model": "timm:vit_small_patch16_224", "epochs": 400}
        | {"lr": 1e-3, "decoder_width": 256, "decoder_depth": 8, "decoder_heads": 8, "evaluate_every": 5000}
        | {"precision": "bf16", "graph": True},
        "hours on one GPU; not run here",
        "not measured",
    ),
    "vit-b16": Preset(
        {"data": "imagenet", "size": 224, "patch": None, "model": "timm:vit_base_patch16_224", "epochs": 800}
        | {"batch": 4096, "lr": 1.5e-4 * 4096 / 256, "evaluate_every": 5000, "workers": 12}
        | {"precision": "bf16", "compile": True},
        "days on 8 GPUs; not run here",
        "the paper: KNN 63.9, linear probe 72.7 (plain MAE 27.4, 67.8)",
    ),
}


def mae(preset: str = "digits", **overrides: Any) -> Mae:
    """The config of a pretraining run: a preset with some fields changed."""
    config: Mae = resolve("mae", preset, overrides)
    return config


def build(config: Mae, opener: Opener | None = None) -> tuple[Task, Schedule]:
    """The task and schedule of a config."""
    device = device_of(config.device)
    if config.patch is not None and config.patch < 1:
        raise BadInput(f"patch is {config.patch}; it is 1 or more, the pixels along a side of a patch")
    if config.patch is not None and config.size % config.patch:
        raise BadInput(f"patches of {config.patch} do not divide images of {config.size}; change size or patch")
    train, test = both(config, opener)
    augment = Augment(crop=config.crop, scale=(config.scale, 1.0), flip=config.flip)
    options: dict[str, Any] = {"batch": config.batch, "size": config.size, "device": device, "workers": config.workers}
    feed = Feed(train, seed=config.seed, augment=augment, **options)
    steps = steps_of(config, feed.steps_per_epoch)
    known, judged = (Feed(some(images, config.online_images), augment=None, **options) for images in (train, test))
    check_online(known.images, judged.images)
    sample = next(iter(judged.evaluate()))[0][:64]
    arguments = encoder_arguments(config, train.channels)
    model = _model(config, arguments).to(device)
    if config.init == "zero":
        zero_branches_(model.encoder, sample[:2])
        model.zero_start_()
    elif config.init != "default":
        raise BadInput(f"init is {config.init!r}; it can be zero or default")
    if config.weights is not None:
        load_published(model, config.weights)
    wiring = wired(model.encoder, config, sample)
    axes = block_axes(model.encoder, Example.of(sample[:1]))  # once, and of the model before it is sharded
    betas: dict[str, Any] = {"betas": (0.9, 0.95)} if config.optimizer.lower() == "adamw" else {}
    optimizer = build_optimizer(model, config.optimizer, config.lr, config.weight_decay, **betas)
    schedule = schedule_of(config, steps)

    def loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        found = network(batch[0])
        return found.loss, {"feature_norm": found.feature_norm}

    def write(network: Any, folder: Path) -> None:
        save_with_encoder(network, network.encoder, folder, config.model, arguments)

    task = Task(
        model=model,
        feed=feed,
        loss=loss,
        optimizer=optimizer,
        wiring=wiring,
        trivial=trivial(model, judged),
        evaluations={
            "reconstruction-v1": _reconstruction(judged, judged_split(config)),
            "knn-dino-v1, rank-v1": _online(known, judged, config.precision, axes),
        },
        notes=(*train.report, *test.report),
        sample=sample[:8] if config.health else None,
        watched=model.encoder,
        save=write,
    )
    return task, schedule


def encoder_arguments(config: Mae, channels: int) -> dict[str, Any]:
    """The arguments of the encoder's builder: no head, and no last norm where nothing would read it."""
    if not config.model.startswith("timm:"):
        raise BadInput(
            f"model is {config.model!r}; the encoder of an MAE is a ViT of timm, as in timm:vit_base_patch16_224"
        )
    arguments: dict[str, Any] = {"num_classes": 0, "global_pool": "", "in_chans": channels, "img_size": config.size}
    if config.long_skips:
        arguments["final_norm"] = False
    if config.patch is not None:
        arguments["patch_size"] = config.patch
    return arguments | arguments_of(config.model_args)


def _model(config: Mae, arguments: dict[str, Any]) -> MAE:
    try:
        encoder = built(config, arguments)
    except BadInput as error:
        if "unexpected keyword" not in str(error):
            raise
        raise BadInput(f"{config.model} is no ViT whose patches can be left out: {error}") from error
    return MAE(
        encoder,
        width=config.decoder_width,
        depth=config.decoder_depth,
        heads=config.decoder_heads,
        mask=config.mask,
        long_skips=config.long_skips,
        norm_pix=config.norm_pix,
        narrow=config.narrow,
    )


@torch.no_grad()
def trivial(model: MAE, feed: Feed) -> float:
    """The loss where nothing is painted: the mean square of what is wanted, of all images, or of the first batch where
    they have to be read from disk."""
    total, count = torch.zeros((), dtype=torch.float64, device=feed.device), 0
    for images, _ in feed.evaluate():
        wanted = model.target(model.patches(images))
        total, count = total + wanted.double().square().sum(), count + wanted.numel()
        if feed.images.images is None:
            break
    return float(total) / count


def _reconstruction(judge: Feed, split: str) -> Callable[[nn.Module], dict[str, float]]:
    def reconstruction(network: nn.Module) -> dict[str, float]:
        assert isinstance(network, MAE)
        draw = torch.Generator().manual_seed(0)  # the same masks each time
        total = torch.zeros((), dtype=torch.float64, device=judge.device)
        for images, _ in judge.evaluate():
            noise = torch.rand(len(images), network.grid.patches, generator=draw).to(judge.device)
            total += network(images, noise).loss.double() * len(images)
        return {f"{split}_loss": float(total) / len(judge.images)}

    return reconstruction


def _online(
    train: Feed, test: Feed, precision: Any, axes: Mapping[str, int]
) -> Callable[[nn.Module], dict[str, float]]:
    """Neighbours and rank of the last block, while training goes on."""

    def online(network: nn.Module) -> dict[str, float]:
        assert isinstance(network, MAE)
        learnt, judged = (
            extract(network.encoder, feed.evaluate(), -1, precision=precision, axes=axes) for feed in (train, test)
        )
        last = learnt.blocks - 1
        return neighbours(learnt, judged, last) | rank(judged["mean", "none"][last])

    return online


register(Recipe("mae", Mae, _PRESETS, build))
