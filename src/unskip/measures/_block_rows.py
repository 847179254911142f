"""The rows of `measure` by block: rank, similarity to the input, frequencies and quantisation of the block's output.

The output is that of the block's module, as in `features`: in post-norm blocks it comes after the last norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip._words import some
from unskip.anatomy import mean_weight
from unskip.measures._collect import BlockSamples, Samples
from unskip.measures._input import finite_or_none
from unskip.measures._measurement import BlockRow
from unskip.measures.echo import cosine, feature_norm, ridge_r2
from unskip.measures.quantise import excess_kurtosis, outlier_channels, sqnr
from unskip.measures.rank import effective_rank, feature_matrix
from unskip.measures.similarity import cka, token_cosine

_ROWS = 4096  # tokens used for rank, echo and similarity


def block_rows(samples: Samples, seed: int) -> list[BlockRow]:
    """One row for each block; numbers that cannot be measured are None, with a note in `samples.notes`."""
    rows: list[BlockRow] = []
    previous: dict[int, Tensor] = {}  # the output of the previous block, by stream
    for block in samples.blocks:
        first = torch.stack(samples.inputs[block.origin])  # (samples, tokens, dim)
        x = torch.stack(block.outputs)
        rows.append(_row(block, first, x, previous.get(block.origin), samples, seed))
        previous[block.origin] = x
    _note_missing(samples)
    return rows


def _row(block: BlockSamples, first: Tensor, x: Tensor, before: Tensor | None, samples: Samples, seed: int) -> BlockRow:
    rounding = samples.rounding
    flat = feature_matrix(x)[_chosen_tokens(x, seed)]
    # Rank, similarity and frequencies are meaningless if tokens differ only by rounding.
    in_tokens = rounding.in_tokens(block.index, block.outputs)
    in_samples = rounding.in_samples(block.index, block.outputs)
    in_patches = rounding.in_patches(block.index, block.outputs)
    ranked = len(flat) > 1 and not in_tokens
    return BlockRow(
        index=block.index,
        path=block.path,
        norm=feature_norm(x),
        token_rank=effective_rank(flat) if ranked else None,
        token_cosine=finite_or_none(token_cosine(x)) if x.shape[1] > 1 else None,
        pooled_rank=effective_rank(feature_matrix(x, "pooled")) if len(x) > 1 and not in_samples else None,
        carried=_carried(block, samples),
        cosine=finite_or_none(cosine(first, x)) if x.shape == first.shape else None,
        echo=_echo(first, x, seed),
        high_frequency=None if in_patches else finite_or_none(sum(block.high) / len(block.high)),
        cka_first=None if in_tokens else _cka(first, x, seed),
        cka_previous=None if in_tokens or before is None else _cka(before, x, seed),
        kurtosis=finite_or_none(excess_kurtosis(x)),
        outlier_channels=finite_or_none(outlier_channels(x)),
        sqnr8=finite_or_none(sqnr(x, 8)),
        sqnr4=finite_or_none(sqnr(x, 4)),
    )


def _carried(block: BlockSamples, samples: Samples) -> float:
    """The product of a stream's alphas from its start to the end of a block."""
    weights = samples.first.trace.weights
    return math.prod(mean_weight(weights[site.index][0]) ** site.runs for site in samples.in_stream(block.last))


def _chosen_tokens(x: Tensor, seed: int) -> Tensor:
    """The indices of the tokens to use: all, or a random subset that depends only on the shape and the seed."""
    total = x.shape[0] * x.shape[1]
    if total <= _ROWS:
        return torch.arange(total, device=x.device)
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:_ROWS].sort().values.to(x.device)


def _echo(first: Tensor, x: Tensor, seed: int) -> float | None:
    """R^2 of the input predicted from the output by ridge regression, on held-out samples."""
    if len(x) < 3 or x.shape[:2] != first.shape[:2]:  # samples to fit, to choose the ridge, and to test
        return None
    chosen = _chosen_tokens(x, seed)
    groups = torch.arange(len(x), device=x.device).repeat_interleave(x.shape[1])[chosen]
    generator = torch.Generator().manual_seed(seed)
    return finite_or_none(
        ridge_r2(feature_matrix(x)[chosen], feature_matrix(first)[chosen], groups=groups, generator=generator)
    )


def _cka(a: Tensor, b: Tensor, seed: int) -> float | None:
    if a.shape[:2] != b.shape[:2]:
        return None
    chosen = _chosen_tokens(b, seed)
    x, y = feature_matrix(a)[chosen], feature_matrix(b)[chosen]
    return finite_or_none(cka(x, y)) if len(x) >= 4 else None  # nan for constant features


def _note_missing(samples: Samples) -> None:
    notes, blocks = samples.notes, samples.blocks
    largest = max(len(block.outputs) * len(block.outputs[0]) for block in blocks)
    if largest > _ROWS:
        notes.append(f"rank, echo and similarity are from {_ROWS} of {largest} tokens")
    if samples.count == 1:
        notes.append("one sample: no pooled rank and no echo")
    elif samples.count == 2:
        notes.append("two samples: no echo, which needs three")
    if len(samples.inputs) > 1:
        names = ", ".join(each.site.path or "(model)" for each in samples.sites if each.site.index in samples.inputs)
        notes.append(
            f"{len(samples.inputs)} streams, starting at {names}: each block is compared with its own stream's input"
        )
    if any(block.outputs[0].shape != samples.inputs[block.origin][0].shape for block in blocks):
        notes.append("the stream changes shape with depth: no cosine with the input for blocks of another shape")
    rounded = [block.path for block in blocks if samples.rounding.anywhere(block.index, block.outputs)]
    if rounded:
        notes.append(
            f"{some(rounded)}: rank collapse; tokens differ by little more than rounding. Values of rank, similarity "
            "and frequencies that float64 changes are left out; run the model in float64 to measure them."
        )
    if all(math.isnan(share) for block in blocks for share in block.high):
        notes.append("no images, or no matching token grid: no spatial frequencies (pass grid=)")
