"""Features of any block: the output of the repeated units that hold a model's residual sites, in one forward pass."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unskip.anatomy._audit import Audit, audit
from unskip.anatomy._example import Example
from unskip.errors import BadInput, ForwardError, NoResidualError


def features(
    model: nn.Module,
    images: object,
    blocks: int | Iterable[int] | Literal["all"] = "all",
    pool: Literal["mean", "cls"] | None = "mean",
) -> dict[int, Tensor]:
    """The output of blocks, by block index in execution order: (images, dim), or (images, tokens, dim) with pool=None.

    A block is the repeated unit around residual sites; its output is what its module returns, in a post-norm block the
    norm of its last sum. `images` is a batch, or whatever else the model takes: a tuple of arguments or a mapping of
    keyword arguments. "mean" is over all tokens or positions, "cls" takes the first token. The model runs once as it is
    (its mode, its gradients: call it under torch.no_grad() to save memory). The first axis counts images; negative
    block indices count from the end.
    """
    if pool not in ("mean", "cls", None):
        raise BadInput(f"pool is {pool!r}; it can be 'mean', 'cls' or None")
    example = Example.of(images)
    axes = block_axes(model, example)
    wanted = block_indices(blocks, len(axes))
    with keep_outputs(model, axes, wanted) as outputs:
        example.run(model)
    return {index: pool_tokens(output, list(axes.values())[index], pool) for index, output in outputs.items()}


def block_axes(model: nn.Module, example: Example) -> dict[str, int]:
    """The path of every block in execution order, and the axis of its output that holds the features."""
    axes: dict[str, int] = {}
    for site in _sites(model, example):
        if site.regular:
            axes[site.block] = site.axis
    if not axes:
        raise NoResidualError(f"{type(model).__name__}: no residual sites, so no blocks to take features from")
    return axes


@contextmanager
def keep_outputs(model: nn.Module, names: Iterable[str], wanted: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """While it lasts, a forward of the model leaves the outputs of the wanted blocks in the mapping, in this order."""
    paths, outputs = list(names), dict[int, Tensor]()
    handles = [model.get_submodule(paths[index]).register_forward_hook(_keep(outputs, index)) for index in wanted]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _sites(model: nn.Module, example: Example) -> Audit:
    try:
        return audit(model, example.rows(0, 1))  # one row is enough to find the blocks
    except ForwardError:  # an argument without a row for each image, such as a mask
        return audit(model, example)


def block_indices(blocks: object, count: int) -> list[int]:
    """Block indices, sorted, each once, counted from the front."""
    if isinstance(blocks, str) and blocks == "all":
        return list(range(count))
    try:
        asked = _whole(blocks)
    except TypeError:
        raise BadInput(
            f"blocks is {blocks!r}; it can be 'all', an index such as -1, or several such as [0, {count - 1}]"
        ) from None
    wrong = [index for index in asked if not -count <= index < count]
    if wrong:
        raise BadInput(f"blocks: {wrong} not among the model's {count} blocks, 0 to {count - 1}")
    return sorted({index % count for index in asked})


def _whole(blocks: Any) -> list[int]:
    """One index or several, also of numpy or torch."""
    try:
        return [operator.index(blocks)]
    except TypeError:
        return [operator.index(each) for each in blocks]


def _keep(outputs: dict[int, Tensor], index: int) -> Any:
    def hook(module: nn.Module, arguments: object, output: object) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not tensors:
            raise BadInput(f"block {index} ({type(module).__name__}) returns no tensor")
        outputs[index] = tensors[0]  # a block that runs several times leaves its last output

    return hook


def pool_tokens(output: Tensor, axis: int, pool: str | None) -> Tensor:
    """(images, dim), or (images, tokens, dim) without a pool."""
    if output.ndim == 2:
        return output
    tokens = output.movedim(axis, -1).flatten(1, -2)  # (images, tokens, dim)
    if pool is None:
        return tokens
    return tokens[:, 0] if pool == "cls" else tokens.to(torch.promote_types(tokens.dtype, torch.float32)).mean(1)
