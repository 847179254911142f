"""The images of a run, opened alike for every recipe.

Decoding a set can take longer than training on it. Whoever makes several runs hands one opener to all of them:

    opener = functools.lru_cache(4)(open_images)    # the training and the judged split of two sets
    for config in configs:
        unskip.train(config, folder, opener=opener)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from unskip.data import ImageSet, MixedSizes, open_images
from unskip.recipes._config import Config

Opener = Callable[..., ImageSet]  # with the arguments of `open_images`


def opening_once() -> Opener:
    """An opener that keeps what it opened: the training and the judged split of two sets."""
    return lru_cache(4)(open_images)


def judged_split(config: Config) -> Literal["val", "test"]:
    """What a run is judged by."""
    return "val" if config.validate else "test"


def opened(
    config: Config, split: Literal["train", "val", "test"], opener: Opener | None = None, hold_out: bool = False
) -> ImageSet:
    """One split of the images of a config. Several sizes are held as squares: of `source`, or of `size`."""
    opener = opener or open_images
    options: dict[str, Any] = {"root": config.data_root, "skip_broken": config.skip_broken}
    options |= {"hold_out": hold_out, "download": config.download}
    try:
        return opener(config.data, split, **options)
    except MixedSizes:
        size = getattr(config, "source", None) or config.size
        found = opener(config.data, split, size=size, **options)
        line = f"images of several sizes: all are held as squares of {size} pixels, their central part"
        return replace(found, report=(*found.report, line))


def both(
    config: Config, opener: Opener | None = None, split: Literal["val", "test"] | None = None
) -> tuple[ImageSet, ImageSet]:
    """What is trained on and what is judged by, of the same number of channels; the second is `split`, if given."""
    split = split or judged_split(config)
    train, judged = opened(config, "train", opener, hold_out=split == "val"), opened(config, split, opener)
    channels = max(train.channels, judged.channels)
    return _coloured(train, channels), _coloured(judged, channels)


def _coloured(images: ImageSet, channels: int) -> ImageSet:
    """A gray set beside one in colour, with its channel three times."""
    if images.images is None or images.channels == channels:
        return images
    return replace(images, images=images.images.expand(-1, channels, -1, -1))
