"""What protocols need of the splits of a data set, gathered in one pass over the images of each.

Pooled features and logits of all protocols come from one forward of each image; patches, which are many times larger,
from another where a protocol asks for them.
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
from unskip.evals._patches import Patches, read_patches
from unskip.evals._predictions import predict
from unskip.evals._registry import Pool, Protocol
from unskip.evals._split import Batches, Options, Split

Data = ImageSet | DenseSet | Batches


class Gathered:
    """What the protocols need of each split, from one pass over its images."""

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
        """The blocks that an evaluator is called with at a time: all of one width where it is batched, else one."""
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

    def given(self, protocol: Protocol, name: str, blocks: list[Any], settings: Mapping[str, Any]) -> Split:
        """One split as an evaluator gets it."""
        if name not in self.sets or (name == "train" and not protocol.train):
            return Split(torch.empty(0, dtype=torch.int64))
        part = self.sets[name]
        limit = settings.get("samples") if name == "test" else None
        rows = slice(None) if limit is None else slice(int(limit))
        labels = part.labels[rows]
        if protocol.needs == "patches":
            read = self.patches[name, (protocol.what, protocol.exact)]
            held: dict[str, Any] = {"patches": read.blocks[blocks[0]][rows], "grid": read.grid, "stride": read.stride}
            for key in ("masks", "boxes"):
                held[key] = None if getattr(part, key) is None else getattr(part, key)[rows]
            return replace(part, labels=labels[: len(held["patches"])], size=read.size, **held)
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
        held = {
            "tokens" if protocol.needs == "tokens" else "features": torch.stack(values)
            if protocol.batched
            else values[0]
        }
        return replace(part, labels=labels, **held)

    def split(self, name: str) -> Split:
        return self.sets.get(name) or Split(torch.empty(0, dtype=torch.int64))

    def _of(self, name: str) -> Features:
        return cast(Features, self.features[name])

    def _extracted(self, name: str, protocols: Sequence[Protocol]) -> Features | None:
        """Features and logits, of the blocks that any protocol asks for."""
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
        """The blocks of any of some protocols."""
        choices = [self.blocks[each.name] for each in protocols]
        if len(choices) == 1 or all(each == choices[0] for each in choices):
            return cast(Blocks, choices[0]) if choices else "all"
        if not self.all_blocks:
            return "all"  # how many there are is not known yet
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
    """A split of images or of a feed, before anything is gathered from it."""
    if isinstance(data, DenseSet):
        images = data.images
        held: dict[str, Any] = {"masks": data.masks, "boxes": data.boxes, "ignore": data.ignore}
        return Split(images.labels, images=images, feed=_Whole(data, options), options=options, **held)
    if isinstance(data, ImageSet):
        made = options.preprocess
        assert made is not None
        augment = made.augment()
        feed = Feed(data, options.batch, made.size, augment=augment, device=options.device, workers=options.workers)
        return Split(data.labels, images=data, feed=feed, options=options)
    if isinstance(data, TextFeed):
        return Split(torch.zeros(len(data), dtype=torch.int64), feed=data, options=options)
    if not callable(getattr(data, "evaluate", None)):
        raise BadInput(f"a split is an image set, one with masks and boxes, or a feed, got {type(data).__name__}")
    source: Any = getattr(data, "images", None)
    labels = source.labels if source is not None else torch.cat([labels for _, labels in data.evaluate()])
    return Split(labels, images=source, feed=data, options=options)


@dataclass(frozen=True)
class _Whole:
    """Images as they are, neither cropped nor resized: their masks and boxes lie over them."""

    data: DenseSet
    options: Options

    def evaluate(self) -> Iterator[tuple[Tensor, Tensor]]:
        made, step = self.options.preprocess, self.options.batch
        assert made is not None
        for start in range(0, len(self.data), step):
            part = slice(start, start + step)
            pixels = self.data.pixels[part].to(self.options.device)
            yield made.normalised(pixels), self.data.images.labels[part].to(self.options.device)


class Drawn:
    """Batches of generated images, counted as they are drawn."""

    def __init__(self, batches: Iterable[Tensor]) -> None:
        self.batches, self.count = [batches] if isinstance(batches, Tensor) else batches, 0

    def __iter__(self) -> Iterator[Tensor]:
        for part in self.batches:
            self.count += len(part)
            yield part
