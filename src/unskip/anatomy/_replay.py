"""Replays a part of a recorded graph: the target tensor as a function of the source tensor.

    y = g(x)        x is the source node's tensor; all other inputs of the target keep their recorded values

The function consists of torch operators, so torch.func can differentiate and batch it. It turns the branch of any model
into a function, whatever its Python code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from unskip.anatomy import _ops
from unskip.anatomy._graph import Graph, Node, Ref
from unskip.errors import UnskipError


class ReplayError(UnskipError):
    """A part of a graph that cannot be replayed."""


def path(graph: Graph, source: int, target: int) -> list[Node]:
    """The nodes between the source and the target that depend on one and feed the other, in order."""
    if source not in graph.nodes[target]:
        raise ReplayError("the target does not depend on the source")
    span = graph.nodes[source + 1 : target + 1]
    reached = {source}
    for node in span:
        if not reached.isdisjoint(_reads(node)):
            reached.add(node.index)
    needed = {target}
    for node in reversed(span):
        if node.index in needed:
            needed.update(_reads(node))
    return [node for node in span if node.index in reached & needed]


def _reads(node: Node) -> tuple[int, ...]:
    """The nodes that determine a node's values, including masks and indices, but not tensors read only for a shape."""
    if node.step is None:
        return node.parents
    return () if node.op in _ops.FRESH else node.step.refs


def replay(
    graph: Graph,
    source: int,
    target: int,
    dtype: torch.dtype | None = None,
    keep: dict[int, Tensor] | None = None,
) -> Callable[[Tensor], Tensor]:
    """The target as a function of the source. `dtype` replaces every floating dtype, also in casts.

    `keep` collects all intermediate tensors by node.
    """
    nodes = path(graph, source, target)
    for node in nodes:
        if node.step is None or (node.wrote is not None and node.op.startswith("_foreach")):
            raise ReplayError(f"{node.op} cannot be replayed: the model writes into a part of a tensor in place")
    moving = {source, *(node.index for node in nodes)}
    used = {index for node in nodes for index in _refs(node)}
    fixed = {index: _cast(graph.values[index].detach(), dtype) for index in used - moving}
    last_use = {index: node.index for node in nodes for index in _refs(node)}

    def function(value: Tensor) -> Tensor:
        live = {**fixed, source: _cast(value, dtype)}
        for node in nodes:
            live[node.index] = _compute(node, live, dtype)
            if keep is not None:
                keep[node.index] = live[node.index]
            for index in _refs(node):
                if index in moving and last_use[index] == node.index:
                    live.pop(index, None)
        return live[target]

    return function


def _refs(node: Node) -> tuple[int, ...]:
    assert node.step is not None
    return node.step.refs


def _compute(node: Node, live: dict[int, Tensor], dtype: torch.dtype | None) -> Tensor:
    step = node.step
    assert step is not None

    def resolve(value: Any) -> Any:
        if isinstance(value, Ref):
            return live[value.index]
        if dtype is not None and isinstance(value, torch.dtype) and value.is_floating_point:
            return dtype
        return value

    args, kwargs = tree_map(resolve, (step.args, step.kwargs))
    if dtype is not None and node.op in ("_softmax", "_log_softmax"):
        args = (*args[:2], False)  # half_to_float: no input is half with `dtype`
    if node.op in ("view", "_unsafe_view") and not isinstance(args[1], torch.dtype):
        return torch.reshape(args[0], args[1])  # a batched tensor may have other strides
    if node.wrote is not None:
        args = (args[0].clone(), *args[1:])
    out = step.func(*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    return tensors[step.output]


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value
