"""All protocols over all blocks of a model: one pass over the images, one result for each protocol and block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unskip._table import table
from unskip.data import Feed, ImageSet
from unskip.errors import BadInput
from unskip.evals._extract import Features, Precision, View, extract
from unskip.evals._finetune import finetune
from unskip.evals._knn import knn
from unskip.evals._probe import probe_all
from unskip.evals._protocols import Pool, Protocol, asked_for
from unskip.evals._rank import rank


@dataclass(frozen=True)
class Result:
    """What one protocol says of one block (None: of the whole model)."""

    protocol: str
    block: int | None
    values: dict[str, float]
    pool: str
    changes: dict[str, Any] = field(default_factory=dict)  # settings that were not the protocol's

    def to_dict(self) -> dict[str, Any]:
        """One flat row, as evals.jsonl holds it."""
        row: dict[str, Any] = {"evaluation": self.protocol, "block": self.block, "pool": self.pool}
        return row | ({"changes": self.changes} if self.changes else {}) | self.values


def evaluate(
    model: nn.Module,
    train: ImageSet,
    test: ImageSet,
    protocols: Sequence[str],
    *,
    size: int | None = None,
    blocks: int | Iterable[int] | Literal["all"] = "all",
    pool: Pool | None = None,
    batch: int = 512,
    seed: int = 0,
    precision: Precision = "float32",
    workers: int = 0,
    graph: bool = False,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Result]:
    """Judges the features of blocks, trained on one set and tested on another, by protocols.

    `pool` takes the place of the protocols' own; `changes` maps a protocol to settings that shall be otherwise. Both
    are recorded in the results. With `graph` the steps of fine-tuning are replayed as a CUDA graph, on a GPU.
    """
    asked = asked_for(protocols, changes)
    dense = [each.name for each in asked if each.kind in ("segment", "discover")]
    if dense:
        raise BadInput(
            f"{', '.join(dense)}: needs masks or boxes, which labelled images have not; see unskip.evals.segment and "
            "discover, or give `unskip eval` the images with --dense"
        )
    changed = {name: dict(values) for name, values in (changes or {}).items()}
    views = {each.name: (pool or each.pool, each.norm) for each in asked}
    device = next(model.parameters()).device
    results: list[Result] = []
    frozen = [each for each in asked if each.kind != "finetune"]
    if frozen:
        wanted = [views[each.name] for each in frozen]
        feeds = [Feed(images, batch, size, device=device, workers=workers) for images in (train, test)]
        learnt = extract(model, feeds[0].evaluate(), blocks, wanted, precision=precision)
        judged = extract(model, feeds[1].evaluate(), blocks, wanted, precision=precision, axes=learnt.axes)
        for each in frozen:
            results += judge(each, learnt, judged, views[each.name], seed, changed.get(each.name))
    for each in asked:
        if each.kind == "finetune":
            mine = changed.get(each.name, {})
            options: dict[str, Any] = {"size": size, "seed": seed, "precision": precision, "workers": workers}
            options["graph"] = graph
            accuracy = finetune(model, train, test, each.name, changes=mine, **options)
            results.append(Result(each.name, None, {_word(each): accuracy}, "patches", mine))
    return results


def judge(
    protocol: Protocol,
    train: Features,
    test: Features,
    view: View,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> list[Result]:
    """One protocol on features that are there already."""
    mine = dict(changes or {})
    values: dict[int, dict[str, float]] = {}
    for together in _alike(test[view]):
        if protocol.kind == "probe":
            learnt, judged = (torch.stack([each[view][index] for index in together]) for each in (train, test))
            found = probe_all(learnt, train.labels, judged, test.labels, protocol.name, seed=seed, changes=mine)
            values |= {index: {_word(protocol): each} for index, each in zip(together, found, strict=True)}
            continue
        for index in together:
            if protocol.kind == "rank":
                values[index] = rank(test[view][index], protocol.name, changes=mine)
            else:
                x, y = train[view][index], test[view][index]
                by_k = knn(x, train.labels, y, test.labels, protocol.name, changes=mine)
                values[index] = {f"knn{k}": accuracy for k, accuracy in by_k.items()}
    return [Result(protocol.name, index, values[index], view[0], mine) for index in sorted(values)]


def by_depth(results: Sequence[Result]) -> str:
    """A table: a row for each block, a column for each number."""
    columns = list(dict.fromkeys(name for each in results for name in each.values))
    cells: dict[int | None, dict[str, float]] = {}
    for each in results:
        cells.setdefault(each.block, {}).update(each.values)
    rows = [["all" if block is None else block, *(row.get(name) for name in columns)] for block, row in cells.items()]
    return table(("block", *columns), rows)


def _alike(features: dict[int, Tensor]) -> list[list[int]]:
    """Blocks whose features have the same width, together."""
    by_width: dict[int, list[int]] = {}
    for index, value in features.items():
        by_width.setdefault(value.shape[1], []).append(index)
    return list(by_width.values())


def _word(protocol: Protocol) -> str:
    """The name of a protocol's number: probe_mae of probe-mae-v1."""
    return "finetune" if protocol.kind == "finetune" else "_".join(protocol.name.split("-")[:2])
