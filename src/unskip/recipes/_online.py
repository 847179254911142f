"""Evaluation during training: kNN accuracy and rank of an encoder's features, on some of the images.

Features collapse in two ways. Images become similar: the rank of their pooled features falls. Or the patches of each
image become similar while images still differ, as attention without skips tends to do (arXiv 2103.03404): then the
rank of the patches within an image falls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from unskip._warn import warn
from unskip.anatomy import Blocks, Example, find_blocks
from unskip.data import Feed
from unskip.evals import check_knn, evaluate, flat, protocol
from unskip.training import COLLAPSE

# kNN accuracy of the mean of all tokens and of the class token, which is what DINO trains; ranks over depth.
_BLOCKS: dict[str, Blocks] = {"knn-dino-v1": -1, "knn-cls-v1": -1, "rank-v1": "all", "patchrank-v1": "all"}


@dataclass(frozen=True)
class Online:
    """Protocols evaluated on feeds while training goes on. Called with the whole model, it returns flat numbers."""

    protocols: Sequence[str]
    train: Any  # a feed, or None where no protocol looks at training samples
    test: Any
    split: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of `unskip.evals.evaluate`
    encoder: Callable[[Any], nn.Module] = lambda model: model  # from the whole model to the part that is evaluated

    def __call__(self, model: nn.Module) -> dict[str, float]:
        with unsharded(model):
            results = evaluate(self.encoder(model), self.train, self.test, self.protocols, **self.options)
        return flat(results, self.split)


def online_features(
    encoder: Callable[[Any], nn.Module], model: nn.Module, train: Feed, test: Feed, split: str, precision: Any
) -> Online:
    """kNN accuracy of the last block, and the rank of every block and of the patches within an image.

    A model without a class token is evaluated on the mean of its tokens alone: the first is a register or a patch.
    """
    names = possible([*_BLOCKS], train, test)
    part = encoder(model)
    class_token = getattr(part, "has_class_token", True) and getattr(part, "cls_token", True) is not None
    names = [name for name in names if class_token or name != "knn-cls-v1"]
    # The blocks are found once, before the model is sharded.
    all_blocks = find_blocks(part, Example.of(next(iter(test.evaluate()))[0][:1]))
    return Online(
        names, train, test, split, {"precision": precision, "all_blocks": all_blocks, "blocks": _BLOCKS}, encoder
    )


def possible(names: Sequence[str], train: Any, test: Any) -> list[str]:
    """The protocols without kNN, and a warning, where there are fewer training images than neighbours."""
    most = max(protocol("knn-dino-v1").settings["k"])
    if len(train.images) >= most:
        check_knn(train.images.labels, test.images.labels)
        return [*names]
    warn(f"{len(train.images)} training images, and kNN takes up to {most}: it is not evaluated during training")
    return [name for name in names if not name.startswith("knn")]


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


def rank_collapse(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Warnings about blocks whose features, or whose patches within an image, have collapsed to rank one."""
    for start, name, what in (
        ("rank_block_", "collapsed-blocks", "features"),
        ("patchrank_block_", "collapsed-patches", "patches within an image"),
    ):
        ranks = {int(key.rpartition("_")[2]): value for key, value in row.items() if key.startswith(start)}
        low = [index for index, value in sorted(ranks.items()) if value < 2]
        if low:
            text = f"rank collapse of the {what} in blocks {low}: effective rank {ranks[low[0]]:.2f} in the first"
            yield name, f"{text}. {COLLAPSE}"
