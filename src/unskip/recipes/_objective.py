"""The base class of objectives: a loss, and defaults for everything else, which a recipe can override.

    @dataclass(frozen=True)
    class Colour(Config): ...

    class ColourObjective(Objective):
        def loss(self, model, batch):
            images, _ = batch
            return (model(images) - images.mean((2, 3))).square().mean(), {}

    def build_model(config, facts): return nn.Sequential(nn.Flatten(), nn.LazyLinear(facts.channels))

    register(Recipe("colour", Colour, {"digits": Preset({}, "seconds", "")}, build_model, ColourObjective))

`_build` assembles data, initialisation, rewiring, optimizer, schedule, checkpoints and evaluation. It calls the methods
below in this order.
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
    """Facts of the data that a model is built from. Kept in the run folder, so that a run opens without its data."""

    classes: int = 0
    channels: int = 0
    size: int = 0  # of the model's inputs: images or latents
    vocabulary: int = 0  # of text: ids are 0 to vocabulary - 1
    context: int = 0  # of text: tokens in a sequence
    architecture: dict[str, Any] | None = None  # config of a Hugging Face model, so that the hub is not needed again

    @property
    def tokens(self) -> dict[str, int]:
        """The ids that a language model takes, from which an example is made."""
        return {"vocabulary": self.vocabulary, "context": self.context}


@dataclass(frozen=True)
class Progress:
    """The length of a run."""

    steps: int
    steps_per_epoch: int


class Objective:
    """The objective of one run. Only `loss` has no default."""

    adamw_betas: tuple[float, float] | None = None  # of AdamW; None: those of torch

    def __init__(self, config: Any) -> None:
        self.config = config
        self.check()

    def check(self) -> None:
        """Raises BadInput for settings that cannot work, before any data is opened."""

    # --- Data ---------------------------------------------------------------------------------------------------------

    def open_splits(self, opener: Any = None, split: Any = None) -> tuple[Any, Any]:
        """The training and the evaluated split; `split` replaces the config's. `opener` opens images."""
        return open_splits(self.config, opener, split)

    def facts(self, images: Any) -> Facts:
        """The facts of the training set for `build_model`."""
        return Facts(len(images.classes), images.channels, self.config.size)

    def preprocess(self, channels: int) -> Preprocess | None:
        """Image preprocessing for evaluation, which the run folder keeps; None if the model does not take images."""
        return usual_preprocess(channels, self.config.size, "the run")

    def example(self, facts: Facts) -> Tensor:
        """Two random inputs, for a model that is opened without its data."""
        shape = (2, facts.channels, facts.size, facts.size)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def feed(self, images: Any, device: torch.device) -> Batches:
        """The training batches; by default images with the config's augmentation."""
        return self._images(images, device, self.config.batch, seed=self.config.seed, augment=augmentation(self.config))

    def evaluation_feed(self, images: Any, device: torch.device) -> Any:
        """Images without augmentation, for evaluation during training."""
        return self._images(images, device, self.config.batch)

    def evaluated(self, images: Any, device: torch.device, batch: int) -> Any:
        """A split as input of `unskip.evals.evaluate` for a trained run: images or a feed."""
        return images

    def _images(self, images: ImageSet, device: torch.device, batch: int, **options: Any) -> Feed:
        """Batches of images, by default with the preprocessing of `preprocess`."""
        preprocess = self.preprocess(images.channels)
        options = ({} if preprocess is None else {"augment": preprocess.augment()}) | options
        return Feed(images, batch, self.config.size, device=device, workers=self.config.workers, **options)

    # --- Model --------------------------------------------------------------------------------------------------------

    def encoder(self, model: nn.Module) -> nn.Module:
        """The part whose features are evaluated; also saved separately if it is not the whole model."""
        return model

    def rewired(self, model: nn.Module) -> tuple[nn.Module, ...]:
        """The parts to which the shortcut applies."""
        return (self.encoder(model),)

    def trained(self, model: nn.Module) -> nn.Module:
        """The part that the optimizer updates."""
        return model

    def builder(self, facts: Facts) -> dict[str, Any] | None:
        """How `unskip.load` builds the encoder: {"spec": ..., "kwargs": ...}; None if no spec can."""
        return None

    def save(self, model: nn.Module, facts: Facts, folder: Path) -> None:
        """Writes the whole model; also its encoder in the format of `unskip.load`, if it has a builder."""
        from safetensors.torch import save_model

        encoder, builder = self.encoder(model), self.builder(facts)
        if encoder is model and builder is not None:
            save(model, folder, builder)
            return
        save_model(model, str(folder / "model.safetensors"))
        if builder is not None:
            save(encoder, folder / "encoder", builder)

    def start(self, model: nn.Module, sample: Tensor) -> list[str]:
        """Initialises the model and loads weights; returns notes for the log of the run."""
        self.initialise(self.encoder(model), sample)
        return []

    def keep(self, facts: Facts, run: Path) -> None:
        """Writes files that resuming needs besides checkpoints, such as a frozen teacher, into a new run folder."""

    def initialise(self, module: nn.Module, sample: Tensor, preset: str = "vit-base") -> None:
        """Applies the config's `init` to a module; `preset` selects the constants of init="skipless"."""
        config, generator = self.config, torch.Generator().manual_seed(self.config.seed)
        with contextlib.ExitStack() as stack:
            if "self_attention=" in config.init and config.shortcut != "keep":
                # Attention is calibrated in the rewired model: inputs of a block depend on the skips before it. The
                # final rewiring gives its warnings.
                with warnings.catch_warnings(action="ignore", category=UnskipWarning):
                    stack.enter_context(rewired(module, config.shortcut, sample[:2], config.where))
            start_(module, config.init, generator, sample, where=config.where, preset=preset)

    # --- Training -----------------------------------------------------------------------------------------------------

    def optimizer_options(self) -> dict[str, Any]:
        """Further arguments of `unskip.optim.build`."""
        adamw = self.config.optimizer.lower() == "adamw"
        return {"betas": self.adamw_betas} if adamw and self.adamw_betas is not None else {}

    def begin(self, model: nn.Module, optimizer: Any, progress: Progress) -> None:
        """Called once before the first step; for objectives with a schedule or a teacher."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch, and numbers to log."""
        raise TypeError(f"{type(self).__name__} has no loss(model, batch)")

    def before_step(self, step: int) -> None:
        """Called before each step, to set scheduled values; learning rate and shortcut are already set."""

    def after_step(self, step: int) -> None:
        """Called after the optimizer's step, for example to update a teacher."""

    # --- Evaluation ---------------------------------------------------------------------------------------------------

    def baseline_loss(self, model: nn.Module, train: Any, test: Any) -> float | None:
        """The loss of a constant prediction, for the warning that nothing is learned; None if there is none."""
        return None

    def evaluations(self, model: nn.Module, train: Any, test: Any, split: str) -> dict[str, Evaluation]:
        """The evaluations during training, by name; `train` and `test` are feeds of `evaluation_feed`."""
        return {}

    def warnings(self, row: dict[str, Any], share: float) -> Iterable[tuple[str, str]]:
        """Names and texts of warnings about a logged row or an evaluation, when `share` of the run is done."""
        return rank_collapse(row) if share >= 0.05 else ()


def mean_of(batches: Iterable[Tensor], only_first: bool) -> float:
    """The mean of all values, or of those of the first batch."""
    total: Any = 0
    count = 0
    for values in batches:
        total, count = total + values.double().sum(), count + values.numel()
        if only_first:
            break
    return float(total) / count


def augmentation(config: Config) -> Augment:
    """The augmentation of a config, from the fields that it shares with `Augment`."""
    names = ("crop", "flip", "mixup", "cutmix", "erase", "randaugment", "interpolation")
    options: dict[str, Any] = {name: getattr(config, name) for name in names if hasattr(config, name)}
    if hasattr(config, "scale"):
        options["scale"] = (config.scale, 1.0)
    return Augment(**options)
