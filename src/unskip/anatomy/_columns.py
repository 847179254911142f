"""Traces columns through a recorded graph: from which entry of an earlier tensor each entry of a later one comes.

Each tensor gets a tensor of labels. Operators that move data (views, splits, concatenations, rolls) run on the labels;
elementwise operators and normalisations keep the labels of their main operand; operators that mix entries drop them.
The labels of an attention head then give the rows of the weight that it uses, in order, without any values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from unskip.anatomy import _ops
from unskip.anatomy._graph import Graph, Node, Ref

NOTHING = 0.0  # the label of entries from other tensors or padding; labels count from 1

_CASTS = frozenset("_to_copy to clone contiguous detach alias positive copy lift_fresh lift_fresh_copy".split())
_MOVES = (_ops.IDENTITY | _ops.PART | {"cat", "stack", "repeat", "tile", "repeat_interleave", "hstack"}) - _CASTS


def labels(size: int, first: int = 1) -> Tensor:
    """One label per entry."""
    return torch.arange(first, first + size, dtype=torch.float64)


def spread(graph: Graph, index: int, axis: int, names: Tensor) -> Tensor:
    """Labels along one axis of a node's tensor, the same at all positions."""
    shape = graph.nodes[index].shape
    view = [1] * len(shape)
    view[axis] = shape[axis]
    return names.reshape(view).expand(shape)


def follow(graph: Graph, sources: dict[int, Tensor], target: int) -> dict[int, Tensor]:
    """The labels of all nodes between the sources and the target that have any."""
    labelled = dict(sources)
    end = graph.nodes[target]
    for node in graph.nodes[min(sources) + 1 : target + 1]:
        if node.index in labelled or node.index not in end or not any(source in node for source in sources):
            continue
        result = _labels_of(graph, node, labelled)
        if result is not None:
            labelled[node.index] = result
    return labelled


def _labels_of(graph: Graph, node: Node, labelled: dict[int, Tensor]) -> Tensor | None:
    """The labels of a node's output, from those of its inputs."""
    if node.step is None:
        return None
    refs = node.step.refs
    known = [index for index in refs if index in labelled]
    if not known:
        return None
    if node.op in _CASTS:
        # copy writes its second argument over the first
        cast = labelled.get(refs[-1] if node.op == "copy" else refs[0])
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
    """Whether a tensor broadcasts to a shape with its last axis unchanged."""
    if not shape or len(shape) > len(target) or shape[-1] != target[-1] or torch.Size(shape).numel() <= 1:
        return False
    return all(size in (1, full) for size, full in zip(reversed(shape), reversed(target), strict=False))


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
        return None  # depends on the memory layout, which labels do not share
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(tensor.device.type == "meta" for tensor in tensors):
        return None  # indices without values
    args, kwargs = tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, (args, kwargs))
    kwargs = {key: value for key, value in kwargs.items() if key not in ("dtype", "device")}
    out = step.func(*args, **kwargs)
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)][step.output]
