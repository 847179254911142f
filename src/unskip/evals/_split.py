"""What an evaluator is given: one split of the data, as the model sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from unskip.data import Feed, LatentFeed, Preprocess, TextFeed
from unskip.training import Precision

_ABSENT: Any = None


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
    """One split. What the protocol needs is there, of one block where it speaks of blocks; the rest is None.

    An evaluator is called with what it asked for, so the types leave the None out.
    """

    labels: Tensor  # (n,)
    features: Tensor = _ABSENT  # (n, dim), or (blocks, n, dim) for a batched evaluator
    tokens: Tensor = _ABSENT  # (n, tokens, dim), all tokens of a block
    patches: Tensor = _ABSENT  # (n, rows * columns, dim), without class and register tokens
    grid: tuple[int, int] = _ABSENT  # rows and columns of patches
    stride: tuple[float, float] = _ABSENT  # height and width of a patch in pixels
    size: tuple[int, int] = _ABSENT  # height and width of the images
    logits: Tensor = _ABSENT  # (n, classes)
    predictions: Any = _ABSENT  # of text: the `Predictions` of all next tokens
    samples: Iterable[Tensor] | None = None  # bytes (n, channels, height, width), in batches
    masks: Tensor = _ABSENT  # (n, height, width)
    boxes: Any = None  # (n, 4): x0, y0, x1, y1 in pixels; or a tensor (k, 4) for each image
    ignore: int | None = None  # the value of a mask that stands for no class
    images: Any = None  # the ImageSet
    feed: Batches = _ABSENT
    options: Options = field(default_factory=Options)

    def __len__(self) -> int:
        drawn = getattr(self.samples, "count", None)  # samples are counted as they are drawn
        return len(self.labels) if drawn is None else int(drawn)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample once, in order: (inputs on the device, labels)."""
        return self.feed.evaluate()

    def share(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples of this process, in order from `start` on: all of them where it is the only one."""
        rank, world = self._ranks()
        return self.feed.evaluate(rank, world) if world > 1 else self.feed.evaluate()  # type: ignore[call-arg]

    @property
    def start(self) -> int:
        """The place of the first sample of `share` among all."""
        rank, world = self._ranks()
        return rank * len(self.labels) // world

    def gathered(self, rows: Tensor) -> Tensor:
        """The rows that every process has made of its share, in order."""
        if self._ranks()[1] == 1:
            return rows
        world = dist.get_world_size()
        counts = [rows.new_zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
        longest = max(int(count) for count in counts)
        padded = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
        parts = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(parts, padded)
        return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])

    def _ranks(self) -> tuple[int, int]:
        """This process and how many there are; (0, 1) also for a feed that cannot be shared, or has too few samples."""
        if (
            not isinstance(self.feed, Feed | LatentFeed | TextFeed)
            or not dist.is_available()
            or not dist.is_initialized()
        ):
            return 0, 1
        rank, world = dist.get_rank(), dist.get_world_size()
        return (rank, world) if len(self.labels) >= world else (0, 1)
