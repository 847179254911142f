"""Evaluation during training: kNN accuracy and rank of an encoder's features, on a subset of the images.

Features collapse in two ways. If images become similar, the rank of their pooled features falls. If the patches of each
image become similar, as in attention without skips (arXiv 2103.03404), the rank of the patches within an image falls.
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

# kNN accuracy of the mean of all tokens and of the class token, which DINO trains; ranks of all blocks.
_BLOCKS: dict[str, Blocks] = {"knn-dino-v1": -1, "knn-cls-v1": -1, "rank-v1": "all", "patchrank-v1": "all"}


@dataclass(frozen=True)
class Online:
    """Protocols evaluated on feeds during training. Called with the whole model, it returns flat numbers."""

    protocols: Sequence[str]
    train: Any  # a feed, or None if no protocol uses training samples
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

    Without a class token there is no kNN of the first token, which is a register or a patch.
    """
    names = possible([*_BLOCKS], train, test)
    part = encoder(model)
    class_token = getattr(part, "has_class_token", True) and getattr(part, "cls_token", True) is not None
    names = [name for name in names if class_token or name != "knn-cls-v1"]
    # Blocks have to be found before the model is sharded.
    all_blocks = find_blocks(part, Example.of(next(iter(test.evaluate()))[0][:1]))
    return Online(
        names, train, test, split, {"precision": precision, "all_blocks": all_blocks, "blocks": _BLOCKS}, encoder
    )


def possible(names: Sequence[str], train: Any, test: Any) -> list[str]:
    """The protocols; warns and leaves kNN out if there are fewer training images than neighbours."""
    neighbours = max(protocol("knn-dino-v1").settings["k"])
    if len(train.images) >= neighbours:
        check_knn(train.images.labels, test.images.labels)
        return [*names]
    warn(f"{len(train.images)} training images are too few for kNN during training, which needs {neighbours}")
    return [name for name in names if not name.startswith("knn")]


@contextmanager
def unsharded(model: Any) -> Iterator[None]:
    """Gathers the weights outside the blocks of a model under FSDP, so that a part can be called separately."""
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
    for prefix, name, what in (
        ("rank_block_", "collapsed-blocks", "features"),
        ("patchrank_block_", "collapsed-patches", "patches within an image"),
    ):
        ranks = {int(key.rpartition("_")[2]): value for key, value in row.items() if key.startswith(prefix)}
        low = [index for index, value in sorted(ranks.items()) if value < 2]
        if low:
            text = f"rank collapse of the {what} in blocks {low}: effective rank {ranks[low[0]]:.2f} in the first"
            yield name, f"{text}. {COLLAPSE}"
