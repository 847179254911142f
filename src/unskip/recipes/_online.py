"""How a run is judged while it goes on: nearest neighbours and ranks, on some of its images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unskip.data import Feed, ImageSet
from unskip.errors import BadInput
from unskip.evals import PROTOCOLS, Features, View, extract, knn, rank
from unskip.evals import known as known_classes


def some(images: ImageSet, count: int) -> ImageSet:
    """So many images, in turn one of each class, drawn at random but the same each time.

    Two sets that are cut to fewer images than classes keep the same classes.
    """
    if len(images) <= count:
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    labels = images.labels[order]
    by_class = labels.argsort(stable=True)
    sizes = labels.bincount()
    turn = torch.empty_like(labels)  # how many of its class come before
    turn[by_class] = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels[by_class]]
    chosen = (turn * len(sizes) + labels).argsort()[:count]
    return images.select(order[chosen].sort().values)


def check_online(train: ImageSet, test: ImageSet) -> None:
    """Raise at the start what would end a run at its first evaluation."""
    most = max(PROTOCOLS["knn-dino-v1"].settings["neighbours"])
    if len(train) < most:
        raise BadInput(
            f"{len(train)} training images are judged in training, and knn-dino-v1 asks for {most} neighbours; raise "
            "online_images where it holds some back, or take a larger set"
        )
    known_classes("online_images", train.labels, test.labels)


def neighbours(train: Features, test: Features, block: int, view: View = ("mean", "none")) -> dict[str, float]:
    """The accuracies of nearest neighbours in the features of one block."""
    by_k = knn(train[view][block], train.labels, test[view][block], test.labels)
    return {f"knn{k}": accuracy for k, accuracy in by_k.items()}


# The mean of all tokens, as other recipes are judged, and the class token, which is what DINO trains and judges by.
_ONLINE: dict[str, View] = {"": ("mean", "none"), "cls_": ("cls", "layer")}


def online(
    train: Feed, test: Feed, precision: Any, axes: Mapping[str, int], encoder: Callable[[Any], nn.Module]
) -> Callable[[nn.Module], dict[str, float]]:
    """Neighbours of the last block, and the rank of every block, while training goes on.

    A model that says it has no class token is judged by the mean alone: its first token is a register or a patch.
    """

    def judged(network: nn.Module) -> dict[str, float]:
        inner = encoder(network)
        known = getattr(inner, "has_class_token", True) and getattr(inner, "cls_token", True) is not None
        words = {word: view for word, view in _ONLINE.items() if known or word != "cls_"}
        options: dict[str, Any] = {"precision": precision, "axes": axes}
        with gathered(network):
            learnt = extract(inner, train.evaluate(), -1, words.values(), **options)
            found = extract(inner, test.evaluate(), "all", words.values(), **options)
        last = found.blocks - 1
        values: dict[str, float] = {}
        for word, view in words.items():
            values |= {f"{word}{name}": value for name, value in neighbours(learnt, found, last, view).items()}
        y = found["mean", "none"]
        ranks = {f"rank_block_{index}": rank(value)["rank"] for index, value in y.items()}
        return values | rank(y[last]) | ranks

    return judged


@contextmanager
def gathered(network: Any) -> Iterator[None]:
    """A part of a sharded model can be called on its own while what the whole model holds beside blocks is gathered."""
    sharded = hasattr(network, "unshard")
    if sharded:
        network.unshard()
    try:
        yield
    finally:
        if sharded:
            network.reshard()
