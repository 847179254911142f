"""What the recipes that compare views of an image share, DINO and SimCLR: their views, their backbone, its collapse.

Features collapse in two ways. Images become alike: the rank of their means falls. Or the patches of each image become
alike while images still differ, as attention without skips tends to do (arXiv 2103.03404): then the rank of the patches
within an image falls, and with it what can be read from them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unskip import spec
from unskip._modes import evaluating
from unskip.anatomy import keep_outputs
from unskip.data import Feed, ImageSet, ViewFeed, Views
from unskip.errors import BadInput
from unskip.evals import Precision
from unskip.init import start_
from unskip.measures import effective_rank
from unskip.optim import products
from unskip.recipes._data import Opener, both
from unskip.recipes._online import check_online, gathered, online, some
from unskip.recipes._shared import arguments_of, built

_IMAGES = 16  # whose patches are looked at
# Of their length: patches that differ by less are the same. A network in float32 rounds to 3e-7 up to 2e-6, and by
# itself that has nearly full rank: beside 1e-6 of it, one direction of 1e-5 reads as a rank of 11, one of 1e-4 as 1.7.
_SAME = 1e-4


def view_data(config: Any, device: torch.device, opener: Opener | None = None) -> tuple[ImageSet, ImageSet, ViewFeed]:
    """The training and the judged set, and the views of the first."""
    check(config, {"patch": (1, math.inf), "colour": (0, math.inf), "source": (1, math.inf)})
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
        small_scale=(getattr(config, "small_scale", config.scale) if small else config.scale, config.scale),
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


def check(config: Any, ranges: Mapping[str, tuple[float, float]], above_zero: Iterable[str] = ()) -> None:
    """Raises BadInput for a number of a config that is out of its range; None is in every range."""
    for name, (low, high) in ranges.items():
        if (value := getattr(config, name)) is not None and not low <= value <= high:
            usual = f"goes from {low:g} to {high:g}" if high < math.inf else f"is {low:g} or more"
            raise BadInput(f"{name} is {value!r}; it {usual}")
    for name in above_zero:
        if not getattr(config, name) > 0:
            raise BadInput(f"{name} is {getattr(config, name)!r}; it is above 0")


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


def backbone(config: Any, arguments: dict[str, Any]) -> nn.Module:
    """The model that a config names. Raises BadInput where it is no ViT that takes images of several sizes."""
    try:
        model = built(config, arguments)
    except BadInput:
        _refuse_one_size(config, spec.build(config.model, light=True))
        raise
    _refuse_one_size(config, model)
    return model


def _refuse_one_size(config: Any, model: nn.Module) -> None:
    name = type(model).__name__
    if not hasattr(model, "dynamic_img_size") and name != "NaFlexVit":  # which takes any size without it
        raise BadInput(
            f"{config.model}: {name} has no dynamic_img_size; the backbone is a ViT of timm that takes images of any "
            "size, as timm:vit_small_patch16_224"
        )


def prepare(config: Any, backbone: nn.Module, sample: Tensor) -> None:
    """The initialisation."""
    draw = torch.Generator().manual_seed(config.seed)
    start_(backbone, config.init, draw, sample[:2], where=config.where, preset="vit-small")


def looked_at(
    known: Feed, judged: Feed, precision: Precision, axes: Mapping[str, int], encoder: Callable[[Any], nn.Module]
) -> Callable[[nn.Module], dict[str, float]]:
    """What is judged while training goes on: neighbours, the rank of every block, and that of its patches."""
    whole = online(known, judged, precision, axes, encoder)
    images = next(iter(judged.evaluate()))[0][:_IMAGES]

    def judge(network: nn.Module) -> dict[str, float]:
        found = whole(network)  # first: it says so where features are not finite
        with gathered(network):
            ranks = patch_ranks(encoder(network), images, axes)
        return found | {f"patchrank_block_{index}": value for index, value in enumerate(ranks)}

    return judge


@torch.no_grad()
def patch_ranks(backbone: nn.Module, images: Tensor, axes: Mapping[str, int]) -> list[float]:
    """By block the effective rank of the patches within an image, the mean over images.

    In float32 whatever the run, and without TF32: where patches are nearly alike, coarser rounding is most of what
    differs. An image whose patches differ by no more than a ten-thousandth of their length counts 0.
    """
    with (
        evaluating(backbone),
        keep_outputs(backbone, axes, range(len(axes))) as outputs,
        products("float32", images.device),
    ):
        backbone(images)
    prefix: Any = getattr(backbone, "num_prefix_tokens", 0)
    # On the host: of many small matrices a GPU finds the singular values one by one.
    found = [outputs[index][:, prefix:].cpu() for index in range(len(axes))]
    return [statistics.mean(map(_rank_within, tokens)) for tokens in found]


def _rank_within(tokens: Tensor) -> float:
    apart = (tokens - tokens.mean(0)).norm()
    return effective_rank(tokens) if apart > _SAME * tokens.norm() else 0.0


def collapsed_blocks(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Warnings where an evaluation finds blocks whose features, or whose patches of an image, have lost their rank."""
    for start, name, what in (
        ("rank_block_", "collapsed-blocks", "features"),
        ("patchrank_block_", "collapsed-patches", "patches within an image"),
    ):
        ranks = {int(key.rpartition("_")[2]): value for key, value in row.items() if key.startswith(start)}
        flat = [index for index, value in sorted(ranks.items()) if value < 2]
        if flat:
            yield name, f"{what} have lost their rank in blocks {flat}: {ranks[flat[0]]:.2f} in the first"
