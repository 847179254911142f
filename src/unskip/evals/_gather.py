"""Gather the inputs of all protocols in one pass over the images of each split.

One forward pass gives pooled features and logits for all protocols. Patches are many times larger and take another
pass, if a protocol needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from unskip.anatomy import Block, Blocks
from unskip.data import DenseSet, Feed, ImageSet, TextFeed
from unskip.errors import BadInput
from unskip.evals._extract import Features, Inputs, View, chosen_blocks, extract
from unskip.evals._patches import Patches, chunks, read_patches
from unskip.evals._predictions import predict
from unskip.evals._registry import Pool, Protocol
from unskip.evals._split import Batches, Options, Split

Data = ImageSet | DenseSet | Batches


class Gathered:
    """The inputs of all protocols, by split."""

    def __init__(
        self,
        model: nn.Module,
        sets: dict[str, Split],
        protocols: Sequence[Protocol],
        blocks: dict[str, Any],
        pool: Pool | None,
        inputs: Inputs | None,
        all_blocks: Sequence[Block],
    ) -> None:
        self.model, self.sets, self.blocks, self.pool = model, sets, blocks, pool
        self.inputs, self.all_blocks = inputs, tuple(all_blocks)
        names: list[str] = [name for name in ("test", "train") if name in sets]
        self.features = {name: self._extracted(name, protocols) for name in names}
        self.predictions = {
            name: predict(model, sets[name])
            for name in names
            if any(each.needs == "predictions" and (each.train or name == "test") for each in protocols)
        }
        self.patches = {
            (name, key): read
            for name in names
            for key in {(each.what, each.exact) for each in protocols if each.needs == "patches"}
            if (read := self._read(name, key, protocols)) is not None
        }

    def view(self, protocol: Protocol) -> View:
        return ("tokens", "none") if protocol.needs == "tokens" else (self.pool or protocol.pool, protocol.norm)

    def together(self, protocol: Protocol) -> list[list[Any]]:
        """The blocks for each call of an evaluator: all blocks of one width if it is batched, else one block."""
        if protocol.needs in ("logits", "predictions", "samples"):
            return [[None]]
        if protocol.needs == "patches":
            return [[index] for index in chosen_blocks(self.blocks[protocol.name], len(self.all_blocks))]
        features = self._of("test")[self.view(protocol)]
        wanted = chosen_blocks(self.blocks[protocol.name], self._of("test").blocks)
        if not protocol.batched:
            return [[index] for index in wanted]
        by_width: dict[int, list[int]] = {}
        for index in wanted:
            by_width.setdefault(features[index].shape[-1], []).append(index)
        return list(by_width.values())

    def inputs_of(self, protocol: Protocol, name: str, blocks: list[Any], settings: Mapping[str, Any]) -> Split:
        """The split that an evaluator is called with."""
        if name not in self.sets or (name == "train" and not protocol.train):
            return Split(torch.empty(0, dtype=torch.int64))
        part = self.sets[name]
        limit = settings.get("samples") if name == "test" else None
        rows = slice(None) if limit is None else slice(int(limit))
        labels = part.labels[rows]
        if protocol.needs == "patches":
            read = self.patches[name, (protocol.what, protocol.exact)]
            tokens = read.blocks[blocks[0]][rows]
            masks = None if part.masks is None else part.masks[rows]
            boxes = None if part.boxes is None else part.boxes[rows]
            part = replace(part, labels=labels[: len(tokens)], masks=masks, boxes=boxes)
            return replace(part, patches=tokens, grid=read.grid, stride=read.stride, size=read.size)
        if protocol.needs == "samples":
            return part
        if protocol.needs == "predictions":
            return replace(part, predictions=self.predictions[name])
        features = self._of(name)
        labels = features.labels[rows]
        if protocol.needs == "logits":
            assert features.logits is not None
            return replace(part, labels=labels, logits=features.logits[rows])
        values = [features[self.view(protocol)][index][rows] for index in blocks]
        x = torch.stack(values) if protocol.batched else values[0]
        if protocol.needs == "tokens":
            return replace(part, labels=labels, tokens=x)
        return replace(part, labels=labels, features=x)

    def split(self, name: str) -> Split:
        return self.sets.get(name) or Split(torch.empty(0, dtype=torch.int64))

    def _of(self, name: str) -> Features:
        return cast(Features, self.features[name])

    def _extracted(self, name: str, protocols: Sequence[Protocol]) -> Features | None:
        """Features and logits, for the blocks of all protocols."""
        mine = [each for each in protocols if each.needs in ("features", "tokens") and (each.train or name == "test")]
        logits = any(each.needs == "logits" and (each.train or name == "test") for each in protocols)
        if not mine and not logits:
            return None
        part = self.sets[name]
        views = [self.view(each) for each in mine]
        features = extract(
            self.model,
            part.share(),
            self._union(mine),
            views,
            precision=part.options.precision,
            all_blocks=self.all_blocks,
            inputs=self.inputs,
            split=name,
            start=part.start,
            logits=logits,
        )
        self.all_blocks = self.all_blocks or features.all_blocks
        views_of_all = {
            view: {index: part.gathered(values) for index, values in by.items()} for view, by in features.views.items()
        }
        outputs = None if features.logits is None else part.gathered(features.logits)
        return replace(features, views=views_of_all, labels=part.gathered(features.labels), logits=outputs)

    def _union(self, protocols: Sequence[Protocol]) -> Blocks:
        """All blocks that these protocols use."""
        choices = [self.blocks[each.name] for each in protocols]
        if len(choices) == 1 or all(each == choices[0] for each in choices):
            return cast(Blocks, choices[0]) if choices else "all"
        if not self.all_blocks:
            return "all"  # the number of blocks is not known yet
        return sorted({index for each in choices for index in chosen_blocks(each, len(self.all_blocks))})

    def _read(self, name: str, key: tuple[Any, bool], protocols: Sequence[Protocol]) -> Patches | None:
        mine = [each for each in protocols if each.needs == "patches" and (each.what, each.exact) == key]
        mine = [each for each in mine if each.train or name == "test"]
        if not mine:
            return None
        limits = [each.settings.get("samples") for each in mine]
        most = None if name == "train" or None in limits else max(cast("list[int]", limits))
        part = self.sets[name]
        images = (images for images, _ in part.batches())
        options: dict[str, Any] = {"precision": part.options.precision, "exact": key[1], "all_blocks": self.all_blocks}
        read, self.all_blocks = read_patches(self.model, images, self._union(mine), key[0], most=most, **options)
        return read


def open_split(data: Data, options: Options) -> Split:
    """A split of images or of a feed, without features, patches or predictions."""
    if isinstance(data, DenseSet):
        images = data.images
        truth: dict[str, Any] = {"masks": data.masks, "boxes": data.boxes, "ignore": data.ignore}
        return Split(images.labels, images=images, feed=_DenseFeed(data, options), options=options, **truth)
    if isinstance(data, ImageSet):
        preprocess = options.preprocess
        assert preprocess is not None
        augment = preprocess.augment()
        feed = Feed(
            data, options.batch, preprocess.size, augment=augment, device=options.device, workers=options.workers
        )
        return Split(data.labels, images=data, feed=feed, options=options)
    if isinstance(data, TextFeed):
        return Split(torch.zeros(len(data), dtype=torch.int64), feed=data, options=options)
    if not callable(getattr(data, "evaluate", None)):
        raise BadInput(f"a split must be an ImageSet, a DenseSet or a feed, got {type(data).__name__}")
    source: Any = getattr(data, "images", None)
    labels = source.labels if source is not None else torch.cat([labels for _, labels in data.evaluate()])
    return Split(labels, images=source, feed=data, options=options)


@dataclass(frozen=True)
class _DenseFeed:
    """Images without crop or resize, so that masks and boxes still match."""

    data: DenseSet
    options: Options

    def evaluate(self) -> Iterator[tuple[Tensor, Tensor]]:
        preprocess, device = self.options.preprocess, self.options.device
        assert preprocess is not None
        for part in chunks(len(self.data), self.options.batch):
            yield preprocess.normalised(self.data.pixels[part].to(device)), self.data.images.labels[part].to(device)


class Drawn:
    """Batches of generated images, counted during iteration."""

    def __init__(self, batches: Iterable[Tensor]) -> None:
        self.batches, self.count = [batches] if isinstance(batches, Tensor) else batches, 0

    def __iter__(self) -> Iterator[Tensor]:
        for part in self.batches:
            self.count += len(part)
            yield part
