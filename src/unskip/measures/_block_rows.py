"""The rows of `measure` by block: rank, similarity to the input, frequencies and quantisation of the block's output.

The output is what the block's module returns and `features` gives: in post-norm blocks it lies after the last norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip.anatomy import mean_weight
from unskip.measures._collect import BlockSamples, Samples
from unskip.measures._input import finite_or_none
from unskip.measures._measurement import BlockRow
from unskip.measures.echo import cosine, feature_norm, ridge_r2
from unskip.measures.quantise import excess_kurtosis, outlier_channels, sqnr
from unskip.measures.rank import effective_rank, feature_matrix
from unskip.measures.similarity import cka, token_cosine

_ROWS = 4096  # tokens that rank, echo and similarity are computed from


def block_rows(samples: Samples, seed: int) -> list[BlockRow]:
    """One row for each block; what cannot be measured is left out, with a note in `samples.notes`."""
    rows: list[BlockRow] = []
    previous: dict[int, Tensor] = {}  # the block before, by stream
    for block in samples.blocks:
        first = torch.stack(samples.inputs[block.origin])  # (samples, tokens, dim)
        x = torch.stack(block.outputs)
        rows.append(_row(block, first, x, previous.get(block.origin), samples, seed))
        previous[block.origin] = x
    _note_what_is_left_out(samples)
    return rows


def _row(
    block: BlockSamples,
    first: Tensor,
    x: Tensor,
    before: Tensor | None,
    samples: Samples,
    seed: int,
) -> BlockRow:
    rounding = samples.rounding
    flat = feature_matrix(x)[_kept(x, seed)]
    # What differs by rounding alone has no rank, no similarity and no frequencies.
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
    """The product of the alphas of a stream from its beginning up to the end of a block."""
    weights = samples.first.trace.weights
    return math.prod(mean_weight(weights[site.index][0]) ** site.runs for site in samples.in_stream(block.last))


def _kept(x: Tensor, seed: int) -> Tensor:
    """Which tokens are used: all, or as many as can be afforded, the same ones for tensors of one shape."""
    total = x.shape[0] * x.shape[1]
    if total <= _ROWS:
        return torch.arange(total, device=x.device)
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:_ROWS].sort().values.to(x.device)


def _echo(first: Tensor, x: Tensor, seed: int) -> float | None:
    """R^2 of the input predicted from the output by ridge regression, on held-out samples."""
    if len(x) < 3 or x.shape[:2] != first.shape[:2]:  # samples to fit, to choose the ridge, and to test
        return None
    kept = _kept(x, seed)
    groups = torch.arange(len(x), device=x.device).repeat_interleave(x.shape[1])[kept]
    generator = torch.Generator().manual_seed(seed)
    return finite_or_none(
        ridge_r2(feature_matrix(x)[kept], feature_matrix(first)[kept], groups=groups, generator=generator)
    )


def _cka(a: Tensor, b: Tensor, seed: int) -> float | None:
    if a.shape[:2] != b.shape[:2]:
        return None
    kept = _kept(b, seed)
    x, y = feature_matrix(a)[kept], feature_matrix(b)[kept]
    return finite_or_none(cka(x, y)) if len(x) >= 4 else None  # features that do not vary have none


def _note_what_is_left_out(samples: Samples) -> None:
    notes, blocks = samples.notes, samples.blocks
    largest = max(len(block.outputs) * len(block.outputs[0]) for block in blocks)
    if largest > _ROWS:
        notes.append(f"rank, echo and similarity from {_ROWS} of {largest} tokens")
    if samples.count < 3:
        which = "no pooled rank and no held-out echo" if samples.count < 2 else "no held-out echo, which takes three"
        notes.append(f"{'one sample' if samples.count < 2 else 'two samples'}: {which}")
    if len(samples.inputs) > 1:
        names = ", ".join(each.site.path or "(model)" for each in samples.sites if each.site.index in samples.inputs)
        notes.append(f"{len(samples.inputs)} streams, which begin at {names}: each block is compared with its own")
    if any(block.outputs[0].shape != samples.inputs[block.origin][0].shape for block in blocks):
        notes.append("the stream changes its shape with depth: no cosine with the input where it does")
    rounded = [block.path for block in blocks if samples.rounding.anywhere(block.index, block.outputs)]
    if rounded:
        more = f" and {len(rounded) - 3} more blocks" if len(rounded) > 3 else ""
        notes.append(
            f"{', '.join(rounded[:3])}{more}: rank collapse; tokens differ by little more than rounding, and what that "
            "decides (rank, similarity, frequencies) is left out. A model in float64 shows more."
        )
    if all(math.isnan(share) for block in blocks for share in block.high):
        notes.append("no images, or no grid of their form: no spatial frequencies (pass grid=)")
