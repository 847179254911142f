"""Pretraining of a masked autoencoder, plain or with decayed shortcuts and long skips.

Main result of "Residual Connections Harm Generative Representation Learning" (arXiv 2404.10947): decayed identity
shortcuts in the encoder, with long skips for details, improve kNN and probe accuracy of MAE's features.

    the paper's method    --shortcut decay:0.6 (or decay:product=5e-3) --long-skips --init zero
    plain MAE             --shortcut keep --no-long-skips --init default
    its ablations         --shortcut keep | scale:0.7071,0.7071 | scale:1,0.7071 | learn:1.0
                          --where attention | mlp        --no-long-skips        --init default
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unskip.data import Feed, ImageSet, subset
from unskip.errors import BadInput
from unskip.init import zero_branches_
from unskip.models import MAE, load_published
from unskip.recipes._config import Config
from unskip.recipes._models import built, check_patch, timm_arguments
from unskip.recipes._objective import Facts, Objective, mean_of
from unskip.recipes._online import Online, online_features
from unskip.recipes._registry import Preset, Recipe, register
from unskip.training import Evaluation


@dataclass(frozen=True)
class Mae(Config):
    """The config of a pretraining run."""

    patch: int | None = 4  # side of a patch in pixels; None: the model's own
    shortcut: str = "decay:0.6"  # of the encoder only
    long_skips: bool = True  # pass outputs of encoder blocks to decoder blocks
    init: str = "zero"  # zero: branches of encoder and decoder and the head start at zero | default
    weights: str | None = None  # a published checkpoint of plain MAE
    decoder_width: int = 512  # embedding dimension of the decoder
    decoder_depth: int = 8  # blocks of the decoder
    decoder_heads: int = 16  # attention heads of the decoder
    mask: float = 0.75  # fraction of the patches
    norm_pix: bool = True  # per-patch normalised targets
    narrow: bool = False  # residual streams in autocast's precision: faster, with more rounding
    lr: float = 3e-4
    epochs: float = 60
    warmup: float = 0.05  # fraction of the steps
    crop: Literal["pad", "resized", "center", "none"] = "resized"  # random crop of training images
    scale: float = 0.2  # minimum fraction of the area in a resized crop
    flip: bool = True  # random horizontal flips

    def unused(self) -> dict[str, str]:
        return super().unused() | ({} if self.crop == "resized" else {"scale": f"crop is {self.crop}; use resized"})


_PRESETS = {
    "digits": Preset(
        {"data": "digits", "size": 8, "patch": 2, "model_args": "depth=4,embed_dim=64,num_heads=4", "flip": False}
        | {"crop": "none", "epochs": 30, "batch": 64, "lr": 1e-3, "mask": 0.5}
        | {"decoder_width": 32, "decoder_depth": 2, "decoder_heads": 4},
        "half a minute on one CPU core",
        "kNN 53.1 ± 2.2 (three seeds)",
    ),
    "cifar": Preset(
        {"data": "cifar10", "size": 32, "model_args": "depth=12,embed_dim=192,num_heads=3", "epochs": 200}
        | {"lr": 1e-3, "decoder_width": 128, "decoder_depth": 6, "decoder_heads": 4, "evaluate_every": 2000}
        | {"precision": "bf16", "graph": True, "shortcut": "decay:0.8"},
        "about 6 minutes on one H200",
        "after 180 epochs kNN 69.5, linear probe 72.8, one seed (long skips alone: 68.0, 71.5)",
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
        | {"batch": 4096, "lr": 1.5e-4 * 4096 / 256, "evaluate_every": 5000, "interpolation": "bicubic"}
        | {"precision": "bf16", "compile": True},
        "about 53 hours on one H200, by the measured step; not run here",
        "the paper: kNN 63.9, linear probe 72.7 (plain MAE 27.4, 67.8)",
    ),
}


def build_model(config: Mae, facts: Facts) -> MAE:
    """The autoencoder, around a timm encoder."""
    try:
        encoder = built(config, _encoder_arguments(config, facts))
    except BadInput as error:
        if not isinstance(_root_cause(error), TypeError):  # TypeError: the model lacks an argument
            raise
        raise BadInput(f"{config.model} is no ViT whose patches can be masked: {error}") from error
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


def _root_cause(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _root_cause(error.__cause__)


def _encoder_arguments(config: Mae, facts: Facts) -> dict[str, Any]:
    """No head, no pooling, and no last norm with long skips, which do not use it."""
    last_norm = {"final_norm": False} if config.long_skips else {}
    return timm_arguments(config, facts.channels, global_pool="", **last_norm)


class Reconstruction(Objective):
    """The mean squared error of masked patches."""

    config: Mae
    adamw_betas = (0.9, 0.95)

    def check(self) -> None:
        check_patch(self.config, "size")
        if self.config.init not in ("zero", "default"):
            raise BadInput(f"init is {self.config.init!r}; it can be zero or default")

    def evaluation_feed(self, images: ImageSet, device: torch.device) -> Feed:
        return self._images(subset(images, self.config.online_images), device, self.config.batch)

    def encoder(self, model: Any) -> nn.Module:
        encoder: nn.Module = model.encoder
        return encoder

    def builder(self, facts: Facts) -> dict[str, Any]:
        return {"spec": self.config.model, "kwargs": _encoder_arguments(self.config, facts)}

    def start(self, model: Any, sample: Tensor) -> list[str]:
        if self.config.init == "zero":
            zero_branches_(model.encoder, sample[:2])  # at all sites: `where` is for the shortcut
            model.zero_start_()
        if self.config.weights is not None:
            load_published(model, self.config.weights)
        return []

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        output = model(batch[0])
        return output.loss, {"feature_norm": output.feature_norm}

    @torch.no_grad()
    def baseline_loss(self, model: Any, train: ImageSet, test: Feed) -> float:
        """The loss of predicting zero: the mean square of the targets; of the first batch if images are on disk."""
        squares = (model.target(model.patches(images)).double().square() for images, _ in test.evaluate())
        return mean_of(squares, only_first=test.images.images is None)

    def evaluations(self, model: nn.Module, train: Feed, test: Feed, split: str) -> dict[str, Evaluation]:
        return {
            "reconstruction-v1": Online(["reconstruction-v1"], None, test, split, {"precision": self.config.precision}),
            "features": online_features(self.encoder, model, train, test, split, self.config.precision),
        }


# A config of the recipe mae (masked autoencoders): `unskip.recipes.mae(preset, **fields)`.
mae = register(Recipe("mae", Mae, _PRESETS, build_model, Reconstruction))
