"""Features of any block: the outputs of the repeated units that contain the residual sites, in one forward pass."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from unskip.anatomy._blocks import Blocks, block_indices, find_blocks, keep_outputs
from unskip.anatomy._example import Example
from unskip.errors import BadInput


def features(
    model: nn.Module, images: object, blocks: Blocks = "all", pool: Literal["mean", "cls"] | None = "mean"
) -> dict[int, Tensor]:
    """The output of blocks, by block index in execution order: (images, dim), or (images, tokens, dim) with pool=None.

    A block is the repeated unit around residual sites; its output is what its module returns, in a post-norm block the
    norm of its last sum. `blocks` selects these by index (negative: from the end), or defines other blocks by paths of
    modules ("encoder.layers.*") or a predicate that is true for the last site of each block.

    `images` is a batch, a tuple of arguments or a mapping of keyword arguments; the first axis is that of the images.
    "mean" averages all tokens or positions, "cls" takes the first token. The model runs once in its present mode and
    with gradients; call this under torch.no_grad() to save memory.
    """
    if pool not in ("mean", "cls", None):
        raise BadInput(f"pool is {pool!r}; it can be 'mean', 'cls' or None")
    example = Example.of(images)
    all_blocks = find_blocks(model, example, blocks)
    wanted = block_indices(blocks, len(all_blocks))
    with keep_outputs(model, all_blocks, wanted) as outputs:
        example.run(model)
    return {index: pool_tokens(outputs[index], all_blocks[index].axis, pool) for index in wanted}


def pool_tokens(output: Tensor, axis: int, pool: str | None) -> Tensor:
    """(images, dim), or (images, tokens, dim) if `pool` is None."""
    if output.ndim == 2:
        return output
    tokens = output.movedim(axis, -1).flatten(1, -2)  # (images, tokens, dim)
    if pool is None:
        return tokens
    return tokens[:, 0] if pool == "cls" else tokens.to(torch.promote_types(tokens.dtype, torch.float32)).mean(1)
