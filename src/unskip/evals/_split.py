"""What an evaluator is given: one split of the data, as the model sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from unskip.data import Preprocess

Precision = Literal["float32", "bf16", "fp16"]


class Batches(Protocol):
    """Every sample once, in order: batches of (inputs, labels), such as a Feed or a LatentFeed gives."""

    def evaluate(self) -> Iterator[tuple[Tensor, Tensor]]: ...


@dataclass(frozen=True)
class Options:
    """How an evaluation is carried out; none of it is part of a protocol."""

    preprocess: Preprocess | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    batch: int = 512
    seed: int = 0
    precision: Precision = "float32"
    workers: int | None = None
    graph: bool = False  # replay the steps of fine-tuning as a CUDA graph
    extractor: Any = "inception"  # of generation metrics
    cache: Any = None  # a folder for the statistics of reference images


@dataclass(frozen=True, eq=False)
class Split:
    """One split. What the protocol needs is there, of one block where it speaks of blocks; the rest is None."""

    labels: Tensor  # (n,)
    features: Tensor | None = None  # (n, dim), or (blocks, n, dim) for a batched evaluator
    tokens: Tensor | None = None  # (n, tokens, dim), all tokens of a block
    patches: Tensor | None = None  # (n, rows * columns, dim), without class and register tokens
    grid: tuple[int, int] | None = None  # rows and columns of patches
    stride: tuple[float, float] | None = None  # height and width of a patch in pixels
    size: tuple[int, int] | None = None  # height and width of the images
    logits: Tensor | None = None  # (n, classes)
    samples: Iterable[Tensor] | None = None  # bytes (n, channels, height, width), in batches
    masks: Tensor | None = None  # (n, height, width)
    boxes: Any = None  # (n, 4): x0, y0, x1, y1 in pixels; or a tensor (k, 4) for each image
    ignore: int | None = None  # the value of a mask that stands for no class
    images: Any = None  # the ImageSet
    feed: Batches | None = None
    options: Options = field(default_factory=Options)

    def __len__(self) -> int:
        drawn = getattr(self.samples, "count", None)  # samples are counted as they are drawn
        return len(self.labels) if drawn is None else int(drawn)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample once, in order: (inputs on the device, labels)."""
        assert self.feed is not None
        return self.feed.evaluate()
