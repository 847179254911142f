"""What a diffusion model's blocks know, at chosen noise levels: features of noisy images, judged by the protocols.

    x_t = a_t x + s_t e   ->   network(x_t, t, no label)   ->   the output of each block, pooled

Every image has a noise of its own, made from its place in the set: the same for every block, protocol and model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unskip._table import table
from unskip.data import Feed, ImageSet
from unskip.errors import BadInput
from unskip.evals._evaluate import Result, judge
from unskip.evals._extract import Blocks, Features, Precision, View, gathered
from unskip.evals._protocols import asked_for
from unskip.models import Flow, normal


def noised_features(
    network: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    flow: Flow,
    time: float,
    blocks: Blocks = "all",
    views: Iterable[View] = (("mean", "none"),),
    *,
    seed: int = 0,
    precision: Precision = "float32",
    axes: Mapping[str, int] | None = None,
) -> Features:
    """Features of blocks at one time, from noise, 0, to data, 1, over batches of (images or latents, labels).

    `axes` are those of an earlier call on the same model, whose blocks need not be found again then.
    """
    if not 0 <= time <= 1:
        raise BadInput(f"a time of {time}; times go from noise, 0, to data, 1")

    def noised() -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
        seen, sound = 0, []
        for images, labels in batches:
            sound.append((f"images {seen} to {seen + len(images) - 1}", images.isfinite().all()))
            noise = normal(seed, torch.arange(seen, seen + len(images), device=images.device), 0, images.shape[1:])
            times = torch.full((len(images),), time, device=images.device)
            yield (flow.mixed(images, noise, times), times), labels
            seen += len(images)
        for which, finite in sound:  # now: to look in between would wait for the device
            if not finite:
                raise BadInput(f"{which}: not all of their values are finite")

    return gathered(network, noised(), blocks, views, precision, axes)


def diffusion(
    network: nn.Module,
    train: ImageSet,
    test: ImageSet,
    protocols: Sequence[str] = ("knn-dino-v1", "probe-lbfgs-v1"),
    *,
    times: Sequence[float] = (0.5, 0.7, 0.8, 0.9, 1.0),
    blocks: Blocks = "all",
    flow: Flow | None = None,
    size: int | None = None,
    batch: int = 512,
    seed: int = 0,
    precision: Precision = "float32",
    changes: dict[str, dict[str, Any]] | None = None,
) -> dict[float, list[Result]]:
    """Protocols over blocks and times in one sweep: {time: results}. Features are means over all tokens."""
    asked = asked_for(protocols, changes)
    if not asked or any(each.kind not in ("knn", "probe", "rank") for each in asked):
        raise BadInput("diffusion: ask for protocols of features that stand still: knn, probe or rank")
    if not times:
        raise BadInput("diffusion: name one time or more, from noise, 0, to data, 1")
    views: dict[str, View] = {each.name: ("mean", each.norm) for each in asked}
    device = next(network.parameters()).device
    feeds = [Feed(images, batch, size, device=device) for images in (train, test)]
    found: dict[float, list[Result]] = {}
    axes: dict[str, int] = {}
    for time in times:
        sets = []
        for feed, own in zip(feeds, (1, 0), strict=True):  # training and test images have noise of their own
            options: dict[str, Any] = {"seed": 2 * seed + own, "precision": precision, "axes": axes}
            part = noised_features(network, feed.evaluate(), flow or Flow(), time, blocks, views.values(), **options)
            axes = part.axes
            sets.append(part)
        learnt, judged = sets
        found[time] = [
            result
            for each in asked
            for result in judge(each, learnt, judged, views[each.name], seed, (changes or {}).get(each.name))
        ]
    return found


def by_time(found: dict[float, list[Result]], name: str) -> str:
    """A table of one number: a row for each block, a column for each time."""
    cells: dict[int | None, dict[float, float]] = {}
    for time, results in found.items():
        for each in results:
            if name in each.values:
                cells.setdefault(each.block, {})[time] = each.values[name]
    if not cells:
        known = sorted({key for results in found.values() for each in results for key in each.values})
        raise BadInput(f"no number {name!r}; there are {', '.join(known)}")
    rows = [[block, *(row.get(time) for time in found)] for block, row in cells.items()]
    return table(("block", *(f"t = {time:g}" for time in found)), rows)
