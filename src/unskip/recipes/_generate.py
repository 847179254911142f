"""What the recipes of SiT and U-ViT share: one config, one task. They differ in their model and their settings.

"Residual Connections Harm Generative Representation Learning" (arXiv 2404.10947): decayed shortcuts improve what a
diffusion transformer draws and what its features know. Where the decay should end is left open there:

    over all blocks         --shortcut decay:0.8
    by effective decay      --shortcut decay:product=5e-3
    in the middle           --shortcut decay:0.8,until=0.5
    and back to 1           --shortcut decay:0.8,until=0.5,back
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unskip.data import Augment, Autoencoder, Feed, ImageSet, LatentFeed
from unskip.errors import BadInput
from unskip.evals import noised_features, rank
from unskip.init import zero_branches_
from unskip.models import Flow, Interpolant, Target, Times, normal
from unskip.optim import build as build_optimizer
from unskip.recipes._config import Config
from unskip.recipes._data import Opener, both, judged_split
from unskip.recipes._online import check_online, neighbours, some
from unskip.recipes._shared import device_of, schedule_of, steps_of, wired
from unskip.training import Schedule, Task

_FOR_LOSS = 1000  # test images that the loss is judged on, at least
_WIDER = 4  # batches in judging, over those in training: nothing is kept for a backward pass


@dataclass(frozen=True)
class Generative(Config):
    """The config of a generative run."""

    latents: str | None = None  # a folder of an AutoencoderKL of diffusers: train on its latents, encoded once
    cache: str = "~/.cache/unskip/latents"  # where they are kept
    model: str = "S/2"  # size and patch
    model_args: str = ""  # other numbers for the model: "width=512,depth=9,heads=8,patch=4"
    size: int = 32  # of images, before they are encoded
    shortcut: str = "decay:0.8"  # keep, cut, decay:0.6, scale:0.7,0.7, learn:1.0, anneal:keep>cut@10000
    init: str = "default"  # default | zero: all branches start at zero, whatever `where` says (SiT's do anyway)
    weights: str | None = None  # a published checkpoint
    interpolant: Interpolant = "linear"
    target: Target = "velocity"
    times: Times = "uniform"
    time_mean: float = 0.0  # of logit-normal times, before the sigmoid
    time_deviation: float = 1.0
    label_dropout: float = 0.1  # how often a label is left out, for guidance
    lr: float = 1e-4
    lr_end: float = 1.0  # as a fraction of lr; 1: it stays
    weight_decay: float = 0.0
    betas: str | None = None  # as in 0.9,0.999; None: the recipe's for AdamW, of other optimizers their own
    batch: int = 256  # images a step, over all processes
    epochs: float = 80
    warmup: float = 0.0  # share of the steps
    flip: bool = True
    narrow: bool = False  # the stream in autocast's precision: faster, and it rounds more
    average: float | None = 0.9999  # decay of the averaged weights, which are those that are judged and sampled
    online_images: int = 5000  # how many images of each split neighbours and rank are judged on in training; 0: none
    online_time: float = 0.9  # the time of the noisy images whose features those are, at the middle block
    health: bool = True  # look at features and attention with each evaluation, and warn; takes some seconds

    def idle(self) -> dict[str, str]:
        found = super().idle()
        if self.times == "uniform":
            found |= dict.fromkeys(("time_mean", "time_deviation"), "times are uniform; take logit-normal")
        if self.latents is None:
            found["cache"] = "it is for latents; give those"
        if not self.online_images:
            found["online_time"] = "online_images is 0; set it"
        return found

    @property
    def flow(self) -> Flow:
        return Flow(self.interpolant, self.target, self.times, self.time_mean, self.time_deviation, self.label_dropout)


class _Images(Protocol):
    """What a Feed and a LatentFeed have in common."""

    images: ImageSet
    device: torch.device

    @property
    def steps_per_epoch(self) -> int: ...
    def iterate(self, start_step: int, stop_step: int, rank: int = 0, world: int = 1) -> Iterator[Any]: ...
    def evaluate(self) -> Iterator[tuple[Tensor, Tensor]]: ...


Maker = Callable[[dict[str, Any]], nn.Module]


def build_task(
    config: Generative, make: Maker, opener: Opener | None = None, betas: str = "0.9,0.999"
) -> tuple[Task, Schedule]:
    """The task and schedule of a config; `make` builds the model from size, channels, classes and `narrow`.

    `betas` are those of AdamW where the config has none.
    """
    device = device_of(config.device)
    if not 0 <= config.online_time <= 1:
        raise BadInput(f"online_time is {config.online_time}; times go from noise, 0, to data, 1")
    train, test = both(config, opener)
    autoencoder = Autoencoder.open(config.latents, device) if config.latents is not None else None
    feed = _feed(config, train, autoencoder, device, training=True)
    count = max(config.online_images, _FOR_LOSS)
    known, judged = (_feed(config, some(each, count), autoencoder, device) for each in (train, test))
    if config.online_images:
        check_online(known.images, judged.images)
    sample = next(iter(judged.evaluate()))[0][:64]
    known_classes = len(train.classes)
    shape = {"size": sample.shape[2], "channels": sample.shape[1], "classes": known_classes, "narrow": config.narrow}
    network: Any = make(shape)
    model: nn.Module = network.to(device)
    classes = int(network.classes)  # the label of none; a model of published weights may know more than the data
    if classes < known_classes:
        raise BadInput(f"model_args {config.model_args!r}: {classes} classes, and {config.data} has {known_classes}")
    if config.init == "zero":
        if config.weights is not None:
            raise BadInput("init zero would undo the weights that are loaded; leave one of the two out")
        # Of all sites, as in the paper's MAE: `where` speaks of the shortcut, and SiT's gates are shut everywhere.
        zero_branches_(model, sample[:2])
    elif config.init != "default":
        raise BadInput(f"init is {config.init!r}; it can be default or zero")
    wiring = wired(model, config, sample)
    chosen = betas if config.betas is None and config.optimizer.lower() == "adamw" else config.betas
    options: dict[str, Any] = {} if chosen is None else {"betas": _betas(chosen)}
    optimizer = build_optimizer(model, config.optimizer, config.lr, config.weight_decay, **options)
    steps = steps_of(config, feed.steps_per_epoch)
    flow = config.flow

    def loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        values, labels = batch
        if autoencoder is not None:
            moments = values
            noise = torch.randn(len(moments), autoencoder.channels, *moments.shape[2:], device=moments.device)
            values = autoencoder.latents(moments, noise)
        return flow.loss(network, values, labels, classes).mean(), {}

    split = judged_split(config)
    evaluations: dict[str, Any] = {"flow-loss-v1": _judged_loss(judged, flow, split)}
    if config.online_images:
        evaluations["knn-dino-v1, rank-v1"] = _online(known, judged, flow, config)
    task = Task(
        model=model,
        feed=feed,
        loss=loss,
        optimizer=optimizer,
        wiring=wiring,
        trivial=_trivial(flow, _power(judged)),
        evaluations=evaluations,
        notes=(*train.report, *test.report),
        sample=sample[:8] if config.health else None,
    )
    return task, schedule_of(config, steps)


def _feed(
    config: Generative,
    images: ImageSet,
    autoencoder: Autoencoder | None,
    device: torch.device,
    training: bool = False,
) -> _Images:
    """Images or their latents, for training or for judging."""
    batch = config.batch if training else _WIDER * config.batch
    if autoencoder is not None:
        options: dict[str, Any] = {"seed": config.seed, "flip": training and config.flip, "device": device}
        return LatentFeed(images, autoencoder, batch, config.size, config.cache, **options)
    options = {"seed": config.seed, "augment": Augment(crop="center", flip=config.flip)} if training else {}
    return Feed(images, batch, config.size, device=device, workers=config.workers, **options)


def _betas(text: str) -> tuple[float, float]:
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"betas is {text!r}; write two numbers, as in 0.9,0.999") from None
    if not (0 <= first < 1 and 0 <= second < 1):
        raise BadInput(f"betas is {text!r}; each is 0 or more and below 1, as in 0.9,0.999")
    return first, second


def _power(feed: _Images) -> float:
    """The mean square of the values: of all images, or of the first batch where they have to be read from disk."""
    total, count = torch.zeros((), dtype=torch.float64, device=feed.device), 0
    for squares in _squares(feed):
        total += squares.double().sum()
        count += squares.numel()
        if not isinstance(feed, LatentFeed) and feed.images.images is None:
            break
    return float(total) / count


def _squares(feed: _Images) -> Iterator[Tensor]:
    """The expected squares of the values, batch by batch; those of latents are drawn, as mean + deviation n."""
    if not isinstance(feed, LatentFeed):
        yield from (values.square() for values, _ in feed.evaluate())
        return
    for moments, _ in feed.in_order():
        mean = feed.autoencoder.latents(moments)
        yield mean.square() + (feed.autoencoder.latents(moments, torch.ones_like(mean)) - mean).square()


def _trivial(flow: Flow, power: float) -> float:
    """The loss of a network that predicts nothing, for data of mean square `power`."""
    if flow.target != "velocity":
        return 1.0 if flow.target == "noise" else power
    share = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000  # quantiles of the times
    if flow.times == "logit-normal":
        share = torch.sigmoid(flow.time_mean + flow.time_deviation * torch.special.ndtri(share))
    path = flow.path(share)
    return float((path.da.square() * power + path.ds.square()).mean())


def _judged_loss(feed: _Images, flow: Flow, split: str) -> Callable[[nn.Module], dict[str, float]]:
    """The loss without dropped labels, at times spread evenly over the images, with the same noise each time."""

    def judged_loss(network: nn.Module) -> dict[str, float]:
        plain = Flow(flow.interpolant, flow.target, label_dropout=0.0)
        first, last = flow.ends
        count, seen = len(feed.images), 0
        total = torch.zeros((), dtype=torch.float64, device=feed.device)
        for values, labels in feed.evaluate():
            index = torch.arange(seen, seen + len(values), device=values.device)
            # Neighbours have unlike times: a step of the golden ratio.
            time = first + (last - first) * ((index * 0.6180339887498949 + 0.5) % 1.0).float()
            noise = normal(0, index, 0, values.shape[1:])
            total += plain.loss(network, values, labels, 0, time=time, noise=noise).double().sum()
            seen += len(values)
        return {f"{split}_loss": float(total) / count}

    return judged_loss


def _online(known: _Images, judged: _Images, flow: Flow, config: Generative) -> Callable[[nn.Module], dict[str, float]]:
    """Neighbours and rank of the middle block on images with a little noise, while training goes on."""

    axes: dict[str, int] = {}  # of the blocks, found once

    def online(network: nn.Module) -> dict[str, float]:
        time = config.online_time
        options: dict[str, Any] = {"precision": config.precision, "axes": axes}
        tested = noised_features(network, judged.evaluate(), flow, time, "middle", seed=0, **options)
        axes.update(tested.axes)
        learnt = noised_features(network, known.evaluate(), flow, time, "middle", seed=1, **options)
        ((block, features),) = tested["mean", "none"].items()
        return neighbours(learnt, tested, block) | rank(features)

    return online
