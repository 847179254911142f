"""Evaluation during training: kNN accuracy and rank of an encoder's features, on some of the images.

Features collapse in two ways. Images become similar: the rank of their pooled features falls. Or the patches of each
image become similar while images still differ, as attention without skips tends to do (arXiv 2103.03404): then the
rank of the patches within an image falls.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unskip._modes import evaluating
from unskip.anatomy import Example, block_axes, keep_outputs
from unskip.data import Feed, ImageSet
from unskip.errors import BadInput
from unskip.evals import PROTOCOLS, Features, View, extract, knn, rank
from unskip.evals import known as check_classes
from unskip.measures import effective_rank
from unskip.optim import matmul_precision

_IMAGES = 16  # whose patches are looked at
# Relative to their length: patches that differ by less count as the same. A network in float32 rounds to 3e-7 up to
# 2e-6, and rounding noise has nearly full rank: beside 1e-6 of it, one direction of 1e-5 reads as a rank of 11, one of
# 1e-4 as 1.7.
_SAME = 1e-4
# The mean of all tokens, and the class token after a layer norm, which is what DINO trains.
_POOLS: dict[str, View] = {"": ("mean", "none"), "cls_": ("cls", "layer")}


def subset(images: ImageSet, count: int) -> ImageSet:
    """At most `count` images, as evenly over the classes as can be, drawn at random but the same each time."""
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


def check_knn(train: ImageSet, test: ImageSet) -> None:
    """Raises at the start what would end a run at its first evaluation."""
    most = max(PROTOCOLS["knn-dino-v1"].settings["neighbours"])
    if len(train) < most:
        raise BadInput(
            f"{len(train)} training images for kNN during training, and knn-dino-v1 takes k up to {most}; raise "
            "online_images where it holds some back, or take a larger set"
        )
    check_classes("online_images", train.labels, test.labels)


def knn_of(train: Features, test: Features, block: int, view: View = ("mean", "none")) -> dict[str, float]:
    """kNN accuracies of the features of one block."""
    by_k = knn(train[view][block], train.labels, test[view][block], test.labels)
    return {f"knn{k}": accuracy for k, accuracy in by_k.items()}


@dataclass(frozen=True)
class FeatureEvaluation:
    """kNN accuracy of the last block, and the rank of every block and of the patches within an image.

    A model without a class token is evaluated on the mean of its tokens alone: the first is a register or a patch.
    """

    encoder: Callable[[Any], nn.Module]  # from the whole model to the part that is evaluated
    train: Feed
    test: Feed
    precision: Any
    axes: Mapping[str, int]  # of the blocks, found once, before the model is sharded

    @staticmethod
    def of(encoder: Callable[[Any], nn.Module], model: nn.Module, train: Feed, test: Feed, precision: Any) -> Any:
        """The evaluation of a model that is built."""
        sample = next(iter(test.evaluate()))[0][:1]
        return FeatureEvaluation(encoder, train, test, precision, block_axes(encoder(model), Example.of(sample)))

    def __call__(self, model: nn.Module) -> dict[str, float]:
        encoder = self.encoder(model)
        class_token = getattr(encoder, "has_class_token", True) and getattr(encoder, "cls_token", True) is not None
        pools = {prefix: view for prefix, view in _POOLS.items() if class_token or prefix != "cls_"}
        options: dict[str, Any] = {"precision": self.precision, "axes": self.axes}
        with unsharded(model):
            train = extract(encoder, self.train.evaluate(), -1, pools.values(), **options)
            test = extract(encoder, self.test.evaluate(), "all", pools.values(), **options)
            images = next(iter(self.test.evaluate()))[0][:_IMAGES]
            patches = patch_ranks(encoder, images, self.axes)
        last = test.blocks - 1
        values: dict[str, float] = {}
        for prefix, view in pools.items():
            values |= {f"{prefix}{name}": value for name, value in knn_of(train, test, last, view).items()}
        pooled = test["mean", "none"]
        values |= rank(pooled[last])
        values |= {f"rank_block_{index}": rank(features)["rank"] for index, features in pooled.items()}
        return values | {f"patchrank_block_{index}": value for index, value in enumerate(patches)}


@contextmanager
def unsharded(model: Any) -> Iterator[None]:
    """Gathers what a model under FSDP holds beside its blocks, so that a part of it can be called on its own."""
    sharded = hasattr(model, "unshard")
    if sharded:
        model.unshard()
    try:
        yield
    finally:
        if sharded:
            model.reshard()


@torch.no_grad()
def patch_ranks(encoder: nn.Module, images: Tensor, axes: Mapping[str, int]) -> list[float]:
    """By block the effective rank of the patches within an image, the mean over images.

    In float32 whatever the run's precision, and without TF32: where patches are nearly alike, coarser rounding is most
    of what differs. An image whose patches differ by no more than a ten-thousandth of their length counts 0.
    """
    with (
        evaluating(encoder),
        keep_outputs(encoder, axes, range(len(axes))) as outputs,
        matmul_precision("float32", images.device),
    ):
        encoder(images)
    prefix: Any = getattr(encoder, "num_prefix_tokens", 0)
    # On the host: a GPU computes the singular values of many small matrices one by one.
    tokens = [outputs[index][:, prefix:].cpu() for index in range(len(axes))]
    return [statistics.mean(map(_rank_within, each)) for each in tokens]


def _rank_within(tokens: Tensor) -> float:
    spread = (tokens - tokens.mean(0)).norm()
    return effective_rank(tokens) if spread > _SAME * tokens.norm() else 0.0


def rank_collapse(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Warnings about blocks whose features, or whose patches within an image, have collapsed to rank one."""
    for start, name, what in (
        ("rank_block_", "collapsed-blocks", "features"),
        ("patchrank_block_", "collapsed-patches", "patches within an image"),
    ):
        ranks = {int(key.rpartition("_")[2]): value for key, value in row.items() if key.startswith(start)}
        low = [index for index, value in sorted(ranks.items()) if value < 2]
        if low:
            yield name, f"rank collapse of the {what} in blocks {low}: effective rank {ranks[low[0]]:.2f} in the first"
