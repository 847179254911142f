"""What a recipe trains for: a loss, and whatever differs from the defaults that all recipes share.

    @dataclass(frozen=True)
    class Colour(Config): ...

    class ColourObjective(Objective):
        def loss(self, model, batch):
            images, _ = batch
            return (model(images) - images.mean((2, 3))).square().mean(), {}

    def build_model(config, facts): return nn.Sequential(nn.Flatten(), nn.LazyLinear(facts.channels))

    register(Recipe("colour", Colour, {"digits": Preset({}, "seconds", "")}, build_model, ColourObjective))

Data, initialisation, rewiring, optimizer, schedule, checkpoints and evaluation are assembled in `_build`, which calls
the methods below in their order here.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unskip.data import Augment, Feed, ImageSet, Preprocess, usual_preprocess
from unskip.errors import UnskipWarning
from unskip.init import start_
from unskip.recipes._config import Config
from unskip.recipes._data import open_splits
from unskip.recipes._online import rank_collapse
from unskip.training import Batches, Evaluation
from unskip.wiring import rewired, save


@dataclass(frozen=True)
class Facts:
    """What a model needs to know of its data. Kept in the run folder, so that a run opens without its data."""

    classes: int = 0
    channels: int = 0
    size: int = 0  # of what the model sees: images, or their latents
    vocabulary: int = 0  # of text: ids go from 0 to vocabulary - 1
    context: int = 0  # of text: tokens in a sequence
    architecture: dict[str, Any] | None = None  # of a Hugging Face model: its config, so that no hub is asked again


@dataclass(frozen=True)
class Progress:
    """The length of a run."""

    steps: int
    steps_per_epoch: int


class Objective:
    """The objective of one run. Only `loss` has no default."""

    adamw_betas: tuple[float, float] | None = None  # of AdamW, where they are not torch's

    def __init__(self, config: Any) -> None:
        self.config = config
        self.check()

    def check(self) -> None:
        """Raises BadInput for settings that cannot work, before any data is opened."""

    # --- Data ---------------------------------------------------------------------------------------------------------

    def open_splits(self, opener: Any = None, split: Any = None) -> tuple[Any, Any]:
        """The training split and the evaluated one; `split` replaces the config's. An `opener` opens images."""
        return open_splits(self.config, opener, split)

    def facts(self, images: Any) -> Facts:
        """What `build_model` needs to know of the training set."""
        return Facts(len(images.classes), images.channels, self.config.size)

    def preprocess(self, channels: int) -> Preprocess | None:
        """How images of so many channels are made for evaluation, which the run folder keeps; None: not of images."""
        return usual_preprocess(channels, self.config.size, "the run")

    def example(self, facts: Facts) -> Tensor:
        """Two inputs for a model that is opened without its data."""
        shape = (2, facts.channels, facts.size, facts.size)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def feed(self, images: Any, device: torch.device) -> Batches:
        """The training batches. By default images with the augmentation whose fields the config has."""
        return self._images(images, device, self.config.batch, seed=self.config.seed, augment=augmentation(self.config))

    def evaluation_feed(self, images: Any, device: torch.device) -> Any:
        """Images without augmentation, for evaluation during training."""
        return self._images(images, device, self.config.batch)

    def evaluated(self, images: Any, device: torch.device, batch: int) -> Any:
        """What `unskip.evals.evaluate` gets of a split of a trained run: images as they are, or a feed."""
        return images

    def _images(self, images: ImageSet, device: torch.device, batch: int, **options: Any) -> Feed:
        """Batches of images, unless `options` say otherwise as `preprocess` makes them."""
        made = self.preprocess(images.channels)
        options = ({} if made is None else {"augment": made.augment()}) | options
        return Feed(images, batch, self.config.size, device=device, workers=self.config.workers, **options)

    # --- Model --------------------------------------------------------------------------------------------------------

    def encoder(self, model: nn.Module) -> nn.Module:
        """The part whose features are evaluated, and which is saved on its own where it is not the whole model."""
        return model

    def rewired(self, model: nn.Module) -> tuple[nn.Module, ...]:
        """The parts that the shortcut governs."""
        return (self.encoder(model),)

    def trained(self, model: nn.Module) -> nn.Module:
        """The part that the optimizer updates."""
        return model

    def builder(self, facts: Facts) -> dict[str, Any] | None:
        """How `unskip.load` builds the encoder: {"spec": ..., "kwargs": ...}; None where no spec names it."""
        return None

    def save(self, model: nn.Module, facts: Facts, folder: Path) -> None:
        """Writes a checkpoint: the whole model; an encoder that a spec builds also in the form of `unskip.load`."""
        from safetensors.torch import save_model

        encoder, builder = self.encoder(model), self.builder(facts)
        if encoder is model and builder is not None:
            save(model, folder, builder)
            return
        save_model(model, str(folder / "model.safetensors"))
        if builder is not None:
            save(encoder, folder / "encoder", builder)

    def start(self, model: nn.Module, sample: Tensor) -> list[str]:
        """Initialises the model and loads weights; returns notes for the reader of the run."""
        self.initialise(self.encoder(model), sample)
        return []

    def keep(self, facts: Facts, run: Path) -> None:
        """Writes into a new run folder what a resumed run needs beside its checkpoints, such as a frozen teacher."""

    def initialise(self, module: nn.Module, sample: Tensor, preset: str = "vit-base") -> None:
        """The config's `init` on one module; `preset` names the constants of init="skipless"."""
        config, generator = self.config, torch.Generator().manual_seed(self.config.seed)
        with contextlib.ExitStack() as wired:
            if "self_attention=" in config.init and config.shortcut != "keep":
                # Calibrated without the skips that are cut. What rewiring warns of is said when it is done for good.
                with warnings.catch_warnings(action="ignore", category=UnskipWarning):
                    wired.enter_context(rewired(module, config.shortcut, sample[:2], config.where))
            start_(module, config.init, generator, sample, where=config.where, preset=preset)

    # --- Training -----------------------------------------------------------------------------------------------------

    def optimizer_options(self) -> dict[str, Any]:
        """Further arguments of `unskip.optim.build`."""
        chosen = self.adamw_betas is not None and self.config.optimizer.lower() == "adamw"
        return {"betas": self.adamw_betas} if chosen else {}

    def begin(self, model: nn.Module, optimizer: Any, progress: Progress) -> None:
        """Called once, before the first step; for objectives that follow a schedule or update a teacher."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and numbers to log."""
        raise TypeError(f"{type(self).__name__} has no loss(model, batch)")

    def before_step(self, step: int) -> None:
        """Sets what follows a schedule; the learning rate and the shortcut are set already."""

    def after_step(self, step: int) -> None:
        """Called after the optimizer's step, such as to update a teacher."""

    # --- Evaluation ---------------------------------------------------------------------------------------------------

    def baseline_loss(self, model: nn.Module, train: Any, test: Any) -> float | None:
        """The loss of a constant prediction, at which nothing is learned; None where there is no such value."""
        return None

    def evaluations(self, model: nn.Module, train: Any, test: Any, split: str) -> dict[str, Evaluation]:
        """What is evaluated during training, by name; `train` and `test` are feeds of `evaluation_feed`."""
        return {}

    def warnings(self, row: dict[str, Any], share: float) -> Iterable[tuple[str, str]]:
        """Names and texts of warnings about a logged row or an evaluation, after this fraction of the run."""
        return rank_collapse(row) if share >= 0.05 else ()


def augmentation(config: Config) -> Augment:
    """The augmentation of a config: those of its fields that `Augment` has."""
    names = ("crop", "flip", "mixup", "cutmix", "erase", "randaugment", "interpolation")
    given: dict[str, Any] = {name: getattr(config, name) for name in names if hasattr(config, name)}
    if hasattr(config, "scale"):
        given["scale"] = (config.scale, 1.0)
    return Augment(**given)
