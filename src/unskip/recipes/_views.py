"""What the recipes that compare views of an image share, DINO and SimCLR: their views, their backbone, its collapse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from unskip.data import Feed, ImageSet, ViewFeed, Views
from unskip.errors import BadInput
from unskip.init import start_
from unskip.recipes._data import Opener, both
from unskip.recipes._online import check_online, some
from unskip.recipes._shared import arguments_of


def view_data(config: Any, device: torch.device, opener: Opener | None = None) -> tuple[ImageSet, ImageSet, ViewFeed]:
    """The training and the judged set, and the views of the first."""
    patch = config.patch or 1
    for name in ("size", "small_size"):
        if getattr(config, name, patch) % patch:
            raise BadInput(f"patches of {patch} do not divide {name} {getattr(config, name)}; change one of them")
    train, test = both(config, opener)
    strength = config.colour
    small = getattr(config, "small", 0)
    views = Views(
        small=small,
        size=config.size,
        small_size=getattr(config, "small_size", config.size),
        scale=(config.scale, 1.0),
        small_scale=(min(getattr(config, "small_scale", config.scale), config.scale), config.scale),
        jitter=0.8 if strength else 0.0,
        brightness=0.4 * strength,
        contrast=0.4 * strength,
        saturation=0.2 * strength,
        hue=0.1 * strength,
        gray=0.2 if strength else 0.0,
        blur=(1.0, 0.1, 0.5) if strength else (0.0, 0.0, 0.0),
        solarize=0.2 if strength else 0.0,
    )
    source = config.source if train.images is None else None
    if train.images is None and source is None:
        raise BadInput(f"{train.name}: its images are read from disk; say with --source at which size to crop from")
    options: dict[str, Any] = {"seed": config.seed, "device": device, "workers": config.workers}
    return train, test, ViewFeed(train, config.batch, views, source=source, **options)


def still_feeds(config: Any, train: ImageSet, test: ImageSet, device: torch.device) -> tuple[Feed, Feed]:
    """Images as they are, for the neighbours and ranks of a run that goes on."""
    options: dict[str, Any] = {"size": config.size, "device": device, "workers": config.workers}
    batch = max(config.batch, 512)  # nothing is kept for a backward pass
    known, judged = (Feed(some(each, config.online_images), batch, **options) for each in (train, test))
    check_online(known.images, judged.images)
    return known, judged


def backbone_arguments(config: Any, channels: int) -> dict[str, Any]:
    """The arguments of a backbone that gives a vector an image and takes images of several sizes."""
    if not config.model.startswith("timm:"):
        raise BadInput(f"model is {config.model!r}; the backbone is a ViT of timm, as in timm:vit_small_patch16_224")
    arguments: dict[str, Any] = {"num_classes": 0, "in_chans": channels, "img_size": config.size}
    arguments["dynamic_img_size"] = True
    if config.patch is not None:
        arguments["patch_size"] = config.patch
    return arguments | arguments_of(config.model_args)


def prepare(config: Any, backbone: nn.Module, sample: Tensor) -> None:
    """The initialisation."""
    draw = torch.Generator().manual_seed(config.seed)
    start_(backbone, config.init, draw, sample[:2], where=config.where, preset="vit-small")


def collapsed_blocks(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A warning where an evaluation finds blocks whose features have lost their rank."""
    ranks = {int(key.rpartition("_")[2]): value for key, value in row.items() if key.startswith("rank_block_")}
    flat = [index for index, value in sorted(ranks.items()) if value < 2]
    if flat:
        text = f"features have lost their rank in blocks {flat}: {ranks[flat[0]]:.2f} in the first"
        yield "collapsed-blocks", text
