"""Traversals of a recorded graph: readers of a node, the tensors it is a copy of, the nodes between two nodes."""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections.abc import Iterator
from math import prod

from torch import nn

from unskip.anatomy import _ops
from unskip.anatomy._graph import Graph, Node


def consumers(graph: Graph) -> list[list[int]]:
    """For every node, the nodes that read it."""
    result: list[list[int]] = [[] for _ in graph.nodes]
    for node in graph.nodes:
        for parent in dict.fromkeys(node.parents):
            result[parent].append(node.index)
    return result


def climb(nodes: list[Node], index: int, scaled_by_weights: bool = False) -> Iterator[tuple[int, bool]]:
    """A tensor and the tensors that it is a rearranged, cast or scaled copy of, each with whether a part was taken."""
    narrowed = False
    while True:
        yield index, narrowed
        node = nodes[index]
        if not node.parents:
            return
        source = node.parents[0]
        if node.op in _ops.PART:
            narrowed = narrowed or prod(nodes[source].shape) != prod(node.shape)
        elif node.op in _ops.SCALE and scaled_by_weights and len(node.parents) > 1:
            moving = [parent for parent in node.parents if not nodes[parent].fixed]
            if len(moving) != 1:
                return
            source = moving[0]
        elif node.op not in _ops.IDENTITY and not (node.op in _ops.SCALE and len(node.parents) == 1):
            return
        index = source


def written(graph: Graph) -> set[int]:
    """The nodes whose memory the model later overwrites in place."""
    return {i for node in graph.nodes if node.wrote is not None for i, _ in climb(graph.nodes, node.wrote)}


def own_factor(nodes: list[Node], index: int, root: int | None = None) -> float:
    """The product of the model's own factors (numbers and weights) on a tensor since the root or its computation."""
    product = 1.0
    for source, _ in climb(nodes, index, scaled_by_weights=True):
        if source == root:
            break
        product *= _factor(nodes[source])
    return product


def _factor(node: Node) -> float:
    return 1.0 if node.factor is None else node.factor


def sum_factors(nodes: list[Node], readers: list[list[int]], roots: list[int], sums: list[int]) -> dict[int, float]:
    """The model's own factor on each sum of a site, such as 0.7 in 0.7 * (x + f(x)).

    Counted are factors between the sum and the stream of a later site (one of `roots`), and after the last sum those in
    the module that adds.
    """
    factors: dict[int, float] = {}
    for root in roots:
        product = 1.0
        for index, _ in climb(nodes, root, scaled_by_weights=True):
            if nodes[index].op in _ops.ADD:
                factors.setdefault(index, product)
            product *= _factor(nodes[index])
    for add in sums:
        if add not in factors:
            last = not any(add in nodes[root] for root in roots[bisect_right(roots, add) :])
            factors[add] = _last_factor(nodes, readers, add) if last else 1.0
    return factors


def _last_factor(nodes: list[Node], readers: list[list[int]], index: int) -> float:
    product, module = 1.0, nodes[index].owners[:1]
    while len(readers[index]) == 1:
        node = nodes[index := readers[index][0]]
        if node.op in _ops.SCALE and node.factor is not None and node.owners[:1] == module:
            product *= node.factor
        elif node.op not in _ops.IDENTITY:
            break
    return product


def between(nodes: list[Node], root: int, end: int) -> list[Node]:
    """The nodes on any path from the root to the end, including the end."""
    last = nodes[end]
    return [node for node in nodes[root + 1 : end + 1] if root in node and node.index in last]


def is_product(nodes: list[Node], node: Node) -> bool:
    """A matrix product of two tensors that both depend on the input, as in attention."""
    return _ops.is_matmul(node.op) and sum(not nodes[parent].fixed for parent in node.parents[-2:]) == 2


def weight_depth(nodes: list[Node], path: list[Node]) -> int:
    """The longest chain of products with weights on a path."""
    depth: dict[int, int] = {}
    for node in path:
        below = max((depth.get(parent, 0) for parent in node.parents), default=0)
        depth[node.index] = below + (_ops.is_matmul(node.op) and not is_product(nodes, node))
    return depth[path[-1].index] if path else 0


def bends(nodes: list[Node], node: Node) -> bool:
    """Whether an operator is nonlinear: an activation function, attention, or a product of two activations."""
    if node.op in _ops.ACTIVATION or _ops.is_softmax(node.op) or _ops.is_attention(node.op):
        return not in_norm(node)
    return is_product(nodes, node)


def is_other_part(root: int, shortcut: list[Node], path: list[Node]) -> bool:
    """Whether the stream is one part of the root and the branch was computed only from other parts."""
    if not shortcut or shortcut[0].op not in _ops.PART:
        return False
    readers = [node for node in path if root in node.parents]
    return all(node.op in _ops.PART and node is not shortcut[0] for node in readers)


def reach(nodes: list[Node], readers: list[list[int]], index: int) -> set[int]:
    """The readers of a tensor, also through rearrangements, products, masks and dropout."""
    reached: set[int] = set()
    frontier = [index]
    while frontier:
        for reader in readers[frontier.pop()]:
            if reader not in reached:
                reached.add(reader)
                if nodes[reader].op in _ops.IDENTITY | {"native_dropout", "mul", "masked_fill", "where"}:
                    frontier.append(reader)
    return reached


def channel_axis(nodes: list[Node], path: list[Node], shape: tuple[int, ...]) -> int:
    """The feature axis of a stream: 1 if channels come first, as in a feature map, else the last.

    It is the axis with as many entries as the first operator of the branch that tells has features.
    """
    turned = False
    for node in path if len(shape) > 2 else ():
        turned = turned or node.op in _ops.TURN
        first = _ops.is_channels_first(node.op)
        if not first and not (node.op == "native_layer_norm" or _ops.is_matmul(node.op)):
            continue
        read = next((nodes[parent].shape for parent in node.parents if not nodes[parent].fixed), ())
        if is_product(nodes, node) or len(read) < 2:
            continue
        if _ops.is_matmul(node.op) and not first and len(shape) == 3:
            return -1  # a matrix product over the other axis mixes tokens
        one, last = (size == read[1 if first else -1] for size in (shape[1], shape[-1]))
        if one or last:
            return 1 if one and (not last or first is not turned) else -1
    return -1


def in_norm(node: Node) -> bool:
    """Whether an operator is part of a normalisation: by its name, its module's name, or as part of a marked norm."""
    return _ops.is_norm(node.op) or node.norm is not None or norm_module(node) is not None


def norm_module(node: Node) -> nn.Module | None:
    """The module that ran the operator, if it is a normalisation by its class name."""
    return node.owners[0] if node.owners and _is_norm_name(type(node.owners[0]).__name__) else None


@functools.cache
def _is_norm_name(name: str) -> bool:
    """PreNorm and PostNorm are names of blocks, not of norms."""
    return bool(re.search(r"(?<!pre)(?<!post)norm", name, re.IGNORECASE))
