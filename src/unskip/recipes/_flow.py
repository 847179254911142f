"""Flow matching, the objective of generative recipes: a model predicts velocity, noise or data at random times.

See `unskip.models.Flow` for the loss. Data are images, or latents of an autoencoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unskip.anatomy import Example, find_blocks
from unskip.data import Augment, Autoencoder, ImageSet, LatentFeed, Preprocess, subset
from unskip.errors import BadInput
from unskip.evals import noised
from unskip.init import zero_branches_
from unskip.models import Flow, Interpolant, Target, Times
from unskip.recipes._config import Config
from unskip.recipes._objective import Facts, Objective, mean_of
from unskip.recipes._online import Online, possible
from unskip.training import Evaluation, device_of

_FOR_LOSS = 1000  # minimum of test images for the loss
_WIDER = 4  # batch size in evaluation relative to training: no activations are kept for a backward pass


@dataclass(frozen=True)
class FlowConfig(Config):
    """The config of a diffusion transformer. A recipe adds its model's fields and optimizer settings."""

    model: str = "S/2"  # size and patch size
    model_args: str = ""  # changes to its sizes: "width=512,depth=9,heads=8,patch=4"
    narrow: bool = False  # residual stream in autocast's precision: faster, with more rounding
    shortcut: str = "decay:0.8"  # keep, cut, decay:0.6, scale:0.7,0.7, learn:1.0, anneal:keep>cut@10000
    init: str = "default"  # default | zero: all branches start at zero, regardless of `where` (always so in SiT)
    batch: int = 256  # images per step, over all processes
    epochs: float = 80
    warmup: float = 0.0  # fraction of the steps
    ema: float | None = 0.9999  # decay of the EMA of the weights, which is evaluated and sampled
    latents: str | None = None  # a folder of an AutoencoderKL of diffusers: train on its latents, encoded once
    cache: str = "~/.cache/unskip/latents"  # folder of encoded latents
    flip: bool = True  # random horizontal flips
    interpolant: Interpolant = "linear"  # path from noise to data
    target: Target = "velocity"  # what the model predicts
    times: Times = "uniform"  # distribution of training times
    time_mean: float = 0.0  # of logit-normal times, before the sigmoid
    time_std: float = 1.0  # of logit-normal times, before the sigmoid
    label_dropout: float = 0.1  # probability of training without the label, for guidance
    lr_end: float = 1.0  # as a fraction of lr; 1: constant
    online_images: int = 5000  # images of each split for kNN and rank during training; 0: none
    online_time: float = 0.9  # time of the noisy images for these features, taken at the middle block

    def unused(self) -> dict[str, str]:
        reasons = super().unused()
        if self.times == "uniform":
            reasons |= dict.fromkeys(("time_mean", "time_std"), "times are uniform; use logit-normal")
        if self.latents is None:
            reasons["cache"] = "it is for latents; set latents"
        if not self.online_images:
            reasons["online_time"] = "online_images is 0; set it"
        return reasons

    @property
    def flow(self) -> Flow:
        return Flow(self.interpolant, self.target, self.times, self.time_mean, self.time_std, self.label_dropout)


class ImageFeed(Protocol):
    """What a Feed and a LatentFeed have in common."""

    images: ImageSet
    device: torch.device

    @property
    def steps_per_epoch(self) -> int: ...
    def iterate(
        self, start_step: int, stop_step: int, rank: int = 0, world: int = 1, parts: int = 1
    ) -> Iterator[Any]: ...
    def evaluate(self, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]: ...


class FlowMatching(Objective):
    """The mean squared error of a predicted velocity, noise or image at random times."""

    config: FlowConfig
    adamw_betas = (0.9, 0.999)

    def check(self) -> None:
        config = self.config
        if not 0 <= config.online_time <= 1:
            raise BadInput(f"online_time is {config.online_time}; it must be between 0 (noise) and 1 (data)")
        if config.init not in ("zero", "default"):
            raise BadInput(f"init is {config.init!r}; it can be default or zero")
        if config.init == "zero" and config.weights is not None:
            raise BadInput("init zero would overwrite the weights; leave one of them out")

    @cached_property
    def autoencoder(self) -> Autoencoder | None:
        """The autoencoder of a run on latents; opened at first use."""
        config = self.config
        return None if config.latents is None else Autoencoder.open(config.latents, device_of(config.device))

    def facts(self, images: ImageSet) -> Facts:
        if self.autoencoder is None:
            return super().facts(images)
        return Facts(len(images.classes), self.autoencoder.channels, self.config.size // self.autoencoder.factor)

    def preprocess(self, channels: int) -> Preprocess | None:
        return None if self.config.latents is not None else super().preprocess(channels)

    def feed(self, images: ImageSet, device: torch.device) -> ImageFeed:
        config = self.config
        if self.autoencoder is not None:
            return self._latents(images, device, config.batch, config.flip)
        augment = Augment(crop="center", flip=config.flip, interpolation=config.interpolation)
        return self._images(images, device, config.batch, seed=config.seed, augment=augment)

    def evaluation_feed(self, images: ImageSet, device: torch.device) -> ImageFeed:
        images = subset(images, max(self.config.online_images, _FOR_LOSS))
        if self.autoencoder is not None:
            return self._latents(images, device, _WIDER * self.config.batch, flip=False)
        return self._images(images, device, _WIDER * self.config.batch)

    def _latents(self, images: ImageSet, device: torch.device, batch: int, flip: bool) -> LatentFeed:
        config, autoencoder = self.config, self.autoencoder
        assert autoencoder is not None
        options: dict[str, Any] = {"seed": config.seed, "flip": flip, "device": device}
        return LatentFeed(images, autoencoder, batch, config.size, config.cache, **options)

    def start(self, model: Any, sample: Tensor) -> list[str]:
        if self.config.init == "zero":
            # At all sites, as in the paper's MAE: `where` is for the shortcut, and SiT's gates are zero everywhere.
            zero_branches_(model, sample[:2])
        return []

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        values, labels = batch
        if self.autoencoder is not None:
            moments = values
            noise = torch.randn(len(moments), self.autoencoder.channels, *moments.shape[2:], device=moments.device)
            values = self.autoencoder.latents(moments, noise)
        return self.config.flow.loss(model, values, labels, self.classes).mean(), {}

    def begin(self, model: Any, optimizer: Any, progress: Any) -> None:
        self.classes = int(model.classes)  # also the "no label" class; published weights may have more than the data

    def baseline_loss(self, model: nn.Module, train: ImageSet, test: ImageFeed) -> float:
        """The loss for the mean square of the data; of the first batch if images are on disk."""
        on_disk = not isinstance(test, LatentFeed) and test.images.images is None
        return self.config.flow.baseline_loss(mean_of(_squares(test), only_first=on_disk))

    def evaluations(self, model: nn.Module, train: ImageFeed, test: ImageFeed, split: str) -> dict[str, Evaluation]:
        config = self.config
        changes = {"flow-loss-v1": {"interpolant": config.interpolant, "target": config.target}}
        options: dict[str, Any] = {"changes": changes, "precision": config.precision}
        evaluations: dict[str, Evaluation] = {"flow-loss-v1": Online(["flow-loss-v1"], None, test, split, options)}
        if config.online_images:
            names = possible(["knn-dino-v1", "rank-v1"], train, test)
            inputs = noised(config.flow, config.online_time)
            sample = next(iter(test.evaluate()))[0][:1]
            label = torch.zeros(1, device=sample.device).long()
            all_blocks = find_blocks(model, Example.of(inputs(sample, label, "test")))
            options = {"precision": config.precision, "blocks": "middle", "inputs": inputs, "all_blocks": all_blocks}
            evaluations["features"] = Online(names, train, test, split, options)
        return evaluations


def _squares(feed: ImageFeed) -> Iterator[Tensor]:
    """The expected squares of the values, by batch; latents are mean + standard deviation * noise."""
    if not isinstance(feed, LatentFeed):
        yield from (values.square() for values, _ in feed.evaluate())
        return
    for moments, _ in feed.in_order():
        mean = feed.autoencoder.latents(moments)
        yield mean.square() + (feed.autoencoder.latents(moments, torch.ones_like(mean)) - mean).square()
