"""Opens the images of a run, and records what identifies its images or text.

Decoding a set can take longer than training on it. Several runs on one set can share a cached opener:

    opener = cached_opener()
    for config in configs:
        unskip.train(config, folder, opener=opener)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from unskip.data import ImageSet, MixedSizes, TextSet, fingerprint, open_images
from unskip.recipes._config import Config

Opener = Callable[..., ImageSet]  # with the arguments of `open_images`


def cached_opener() -> Opener:
    """An opener with a cache for the training and the evaluated split of two sets."""
    return lru_cache(4)(open_images)


def evaluated_split(config: Config) -> Literal["val", "test"]:
    """The split on which a run is evaluated."""
    return "val" if config.validate else "test"


def open_split(
    config: Config, split: Literal["train", "val", "test"], opener: Opener | None = None, hold_out: bool = False
) -> ImageSet:
    """One split of a config's images. Images of several sizes are stored as squares of `source` or `size` pixels."""
    opener = opener or open_images
    options: dict[str, Any] = {"root": config.data_root, "hold_out": hold_out, "download": config.download}
    try:
        return opener(config.data, split, **options)
    except MixedSizes:
        size = getattr(config, "source", None) or config.size
        images = opener(config.data, split, size=size, **options)
        line = f"images of several sizes: all are stored as central squares of {size} pixels"
        return replace(images, report=(*images.report, line))


def open_splits(
    config: Config, opener: Opener | None = None, split: Literal["val", "test"] | None = None
) -> tuple[ImageSet, ImageSet]:
    """The training and the evaluated split, with the same number of channels; `split` replaces the config's."""
    split = split or evaluated_split(config)
    train, test = open_split(config, "train", opener, hold_out=split == "val"), open_split(config, split, opener)
    channels = max(train.channels, test.channels)
    return with_channels(train, channels), with_channels(test, channels)


def with_channels(images: ImageSet, channels: int) -> ImageSet:
    """Repeats the channel of a gray set, to match a set in colour."""
    if images.images is None or images.channels == channels:
        return images
    return replace(images, images=images.images.expand(-1, channels, -1, -1))


def data_record(images: ImageSet | TextSet) -> dict[str, Any]:
    """What identifies a split, to detect that the data of a run has changed."""
    if isinstance(images, TextSet):
        sizes = {"documents": len(images.ends), "bytes of text": int(images.bytes.sum()), "tokens": len(images)}
        return {**sizes, "tokenizer": images.tokenizer.key, "fingerprint": images.fingerprint}
    labels = hashlib.sha256(f"{images.classes}".encode() + images.labels.numpy().tobytes()).hexdigest()[:16]
    sizes = {"images": len(images), "classes": len(images.classes)}
    return {**sizes, "labels": labels, "fingerprint": fingerprint(images)}


def data_changes(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]) -> str | None:
    """How the splits of a run differ from the recorded ones; None if they are the same."""
    for split, record in before.items():
        for name, value in now.get(split, {}).items():
            if record.get(name) != value:
                same = "as many tokens" if "tokens" in record else "as many images with the same labels"
                changes = {
                    "labels": "as many images and classes, but other labels or class names",
                    "fingerprint": f"{same}, but of other content or file names",
                    "tokenizer": "another tokenizer",
                }
                change = changes.get(name, f"{record.get(name)} {name}, now {value}")
                return f"its {split} data has changed since the run began: {change}"
    return None
