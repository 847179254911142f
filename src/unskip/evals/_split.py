"""The input of an evaluator: one split of the data, with the features it needs."""

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
    """Batches of (inputs, labels) with every sample once, in order, such as a Feed or a LatentFeed."""

    def evaluate(self) -> Iterator[tuple[Tensor, Tensor]]: ...


@dataclass(frozen=True)
class Options:
    """Options of an evaluation that are not part of a protocol."""

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
    """One split. Only the fields that the protocol needs are set, for one block if it evaluates blocks.

    The other fields are None; the types leave this out, because an evaluator uses only what it declared.
    """

    labels: Tensor  # (n,)
    features: Tensor = _ABSENT  # (n, dim), or (blocks, n, dim) for a batched evaluator
    tokens: Tensor = _ABSENT  # (n, tokens, dim), all tokens of a block
    patches: Tensor = _ABSENT  # (n, rows * columns, dim), without class and register tokens
    grid: tuple[int, int] = _ABSENT  # rows and columns of patches
    stride: tuple[float, float] = _ABSENT  # height and width of a patch in pixels
    size: tuple[int, int] = _ABSENT  # height and width of the images
    logits: Tensor = _ABSENT  # (n, classes)
    predictions: Any = _ABSENT  # for text, the `Predictions` of all next tokens
    samples: Iterable[Tensor] | None = None  # bytes (n, channels, height, width), in batches
    masks: Tensor = _ABSENT  # (n, height, width)
    boxes: Any = None  # (n, 4): x0, y0, x1, y1 in pixels; or a tensor (k, 4) for each image
    ignore: int | None = None  # the mask value of unlabelled pixels
    images: Any = None  # the ImageSet
    feed: Batches = _ABSENT
    options: Options = field(default_factory=Options)

    def __len__(self) -> int:
        drawn = getattr(self.samples, "count", None)  # `Drawn` counts samples during iteration
        return len(self.labels) if drawn is None else int(drawn)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of (inputs on the device, labels), with every sample once, in order."""
        return self.feed.evaluate()

    def share(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples of this process, in order from `start`; all samples if it is the only process."""
        rank, world = self._ranks()
        return self.feed.evaluate(rank, world) if world > 1 else self.feed.evaluate()  # type: ignore[call-arg]

    @property
    def start(self) -> int:
        """The index of the first sample of `share`."""
        rank, world = self._ranks()
        return rank * len(self.labels) // world

    def gathered(self, rows: Tensor) -> Tensor:
        """The rows of all processes, in order."""
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
        """Rank and world size; (0, 1) also for a feed that cannot be shared, or has too few samples."""
        shareable = isinstance(self.feed, Feed | LatentFeed | TextFeed)
        if not shareable or not dist.is_available() or not dist.is_initialized():
            return 0, 1
        rank, world = dist.get_rank(), dist.get_world_size()
        return (rank, world) if len(self.labels) >= world else (0, 1)
