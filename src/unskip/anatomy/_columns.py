"""Follows columns through a recorded graph: which entry of an earlier tensor's last axis each entry of a later one is.

Every tensor gets a twin of labels. Operators that move data (views, splits, concatenations, rolls) are run on the
labels; operators that work entry by entry, normalisations among them, pass the labels of their main operand on.
Whatever mixes entries ends them. So the rows of a weight that feed one attention head are read off the head's labels,
in the order in which the head sees them, without any values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from unskip.anatomy import _ops
from unskip.anatomy._graph import Graph, Node, Ref

NOTHING = 0.0  # the label of what comes from elsewhere, padding included; labels count from 1

_CASTS = frozenset("_to_copy to clone contiguous detach alias positive copy lift_fresh lift_fresh_copy".split())
_MOVES = (_ops.IDENTITY | _ops.PART | {"cat", "stack", "repeat", "tile", "repeat_interleave", "hstack"}) - _CASTS


def labels(size: int, first: int = 1) -> Tensor:
    """One label an entry."""
    return torch.arange(first, first + size, dtype=torch.float64)


def spread(graph: Graph, index: int, axis: int, names: Tensor) -> Tensor:
    """Labels along one axis of a node's tensor, the same at all positions."""
    shape = graph.nodes[index].shape
    view = [1] * len(shape)
    view[axis] = shape[axis]
    return names.reshape(view).expand(shape)


def follow(graph: Graph, sources: dict[int, Tensor], target: int) -> dict[int, Tensor]:
    """The labels of every node between the sources and the target that still has some."""
    labelled = dict(sources)
    end = graph.nodes[target]
    start = min(sources)
    wanted = 0
    for source in sources:
        wanted |= 1 << source
    for node in graph.nodes[start + 1 : target + 1]:
        if node.index in labelled or not node.ancestors & wanted or node.index not in end:
            continue
        result = _pass(graph, node, labelled)
        if result is not None:
            labelled[node.index] = result
    return labelled


def _pass(graph: Graph, node: Node, labelled: dict[int, Tensor]) -> Tensor | None:
    step = node.step
    if step is None:
        return None
    refs = step.refs
    known = [index for index in refs if index in labelled]
    if not known:
        return None
    if node.op in _CASTS:
        cast = labelled.get(
            refs[-1] if node.op == "copy" else refs[0]
        )  # a copy writes its second argument over the first
        return None if cast is None else cast.expand(node.shape)
    if node.op in _MOVES:
        return _move(graph, node, labelled)
    if _mixes(node.op):
        return None
    for index in known:
        if graph.nodes[index].shape == node.shape:
            return labelled[index]
    return labelled[known[0]].expand(node.shape) if _broadcasts(graph.nodes[known[0]].shape, node.shape) else None


def _mixes(op: str) -> bool:
    return _ops.is_transform(op) or _ops.is_softmax(op) or op in {"sum", "mean", "cumsum", "amax", "amin", "var_mean"}


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a tensor is merely repeated along leading axes, its last axis kept."""
    if not shape or len(shape) > len(target) or shape[-1] != target[-1] or torch.Size(shape).numel() <= 1:
        return False
    return all(size in (1, whole) for size, whole in zip(reversed(shape), reversed(target), strict=False))


def _move(graph: Graph, node: Node, labelled: dict[int, Tensor]) -> Tensor | None:
    step = node.step
    assert step is not None

    def resolve(value: Any) -> Any:
        if not isinstance(value, Ref):
            return value
        if value.index in labelled:
            return labelled[value.index]
        source = graph.nodes[value.index]
        if source.floating:
            return torch.full(source.shape, NOTHING, dtype=torch.float64)
        return graph.values[value.index]

    args, kwargs = tree_map(resolve, (step.args, step.kwargs))
    if node.op in ("view", "_unsafe_view", "_reshape_alias"):
        return None if isinstance(args[1], torch.dtype) else torch.as_tensor(args[0].reshape(args[1]))
    if node.op == "as_strided":
        return None  # speaks of memory, which labels do not have
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(tensor.device.type == "meta" for tensor in tensors):
        return None  # indices without values
    args, kwargs = tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, (args, kwargs))
    kwargs = {key: value for key, value in kwargs.items() if key not in ("dtype", "device")}
    out = step.func(*args, **kwargs)
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)][step.output]
