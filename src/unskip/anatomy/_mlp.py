"""The MLP of a branch: its weights, whether one gates another, and its activation by name.

    branch = W_down act(W_up x)            branch = W_down (act(W_gate x) * W_up x)

A gate is a product of two tensors with different columns, from two weights or from one that stores both. The activation
is recognised by replaying that part of the graph on a grid of points.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.anatomy import _ops
from unskip.anatomy._activations import GRID, Curve
from unskip.anatomy._attention import input_extras, nearest_products
from unskip.anatomy._columns import NOTHING, follow, labels, spread
from unskip.anatomy._graph import Graph, Node, Ref
from unskip.anatomy._products import Product, Unviewable, is_weighted, product, rows
from unskip.anatomy._replay import ReplayError, replay
from unskip.anatomy._walk import between, in_norm


@dataclass(frozen=True, eq=False)
class Half:
    """One map of the hidden layer: (hidden, in), its bias (hidden,), and the product it belongs to."""

    of: Product
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Mlp:
    """One MLP: its weights and activation."""

    up: Half
    gate: Half | None
    down: Product
    columns: slice  # of the down weight that read this MLP
    activation: str | None
    curve: Curve | None  # the activation on a grid; None if it is not elementwise
    extras: tuple[str, ...]


def find_mlp(graph: Graph, readers: list[list[int]], steps: list[Node], context: int | None = None) -> Mlp:
    """The MLP on a branch's path; `context` is the node of a parallel attention. Raises Unviewable."""
    inside = {node.index for node in steps}
    down_node, ups = _ends(graph, steps, context)
    down = product(graph, readers, down_node)
    halves = [product(graph, readers, node) for node in ups]
    names: dict[int, Tensor] = {}
    first = 1
    for half in halves:
        names[half.result] = spread(graph, half.result, half.axis, labels(len(half.matrix), first))
        first += len(half.matrix)
    labelled = follow(graph, names, down.source)
    joint = _joint(graph, labelled, inside)
    operands = joint.parents[:2] if joint is not None else (down.source,)
    sides = [_side(halves, labelled, operand) for operand in operands]
    curves = [_curve(graph, half.of, operand) for half, operand in zip(sides, operands, strict=True)]
    activations = [None if curve is None else curve.name for curve in curves]
    columns = _columns(graph, down, labelled, joint, len(sides[0].weight))
    extras = input_extras(graph, steps, halves[0].source)
    if not _reads_features(graph, steps, halves[0]):
        extras.append("over tokens")
    if any(in_norm(node) for half in halves for node in between(graph.nodes, half.result, down.source)):
        extras.append("hidden norm")
    if any(half.of.hides_bias(half.bias) for half in sides) or down.hides_bias():
        extras.append("computed bias")
    if joint is None:
        return Mlp(sides[0], None, down, columns, activations[0], curves[0], tuple(extras))
    gate, up = (1, 0) if activations[0] == "identity" and activations[1] != "identity" else (0, 1)
    if activations[up] != "identity":
        raise Unviewable("both halves of a gated MLP have an activation")
    return Mlp(sides[up], sides[gate], down, columns, activations[gate], curves[gate], tuple(extras))


def _ends(graph: Graph, steps: list[Node], context: int | None) -> tuple[Node, list[Node]]:
    """The last product with a weight, and the one or two products that it reads; a parallel attention is left out."""
    weighted = [node for node in steps if is_weighted(graph, node)]

    def inputs(node: Node) -> list[Node]:
        moving = [parent for parent in node.parents if not graph.nodes[parent].fixed]
        before = {n.index for parent in moving for n in nearest_products(graph, parent, stop=context)}
        return [graph.nodes[index] for index in sorted(before) if any(n.index == index for n in weighted)]

    ends = []
    for node in weighted:
        last = not any(node.index in other for other in weighted if other is not node)
        ups = inputs(node)
        if last and ups and not any(inputs(up) for up in ups):
            ends.append((node, ups))
    if len(ends) != 1:
        raise Unviewable(f"{len(weighted)} products with a weight, in another order than an MLP's")
    if len(ends[0][1]) > 2:
        raise Unviewable(f"{len(ends[0][1])} weights compute the hidden layer")
    return ends[0]


def _joint(graph: Graph, labelled: dict[int, Tensor], inside: set[int]) -> Node | None:
    """The product of two tensors with different columns, if there is one."""
    joints = []
    for index in sorted(labelled):
        node = graph.nodes[index]
        if node.op != "mul" or len(node.parents) != 2 or index not in inside:
            continue
        a, b = (labelled.get(parent) for parent in node.parents)
        if a is not None and b is not None and a.shape == b.shape and not torch.equal(a, b):
            joints.append(node)
    if len(joints) > 1:
        raise Unviewable("more than one gate in the hidden layer")
    return joints[0] if joints else None


def _side(halves: list[Product], labelled: dict[int, Tensor], operand: int) -> Half:
    """The weight rows that compute one operand."""
    if operand not in labelled:
        raise Unviewable("the hidden units cannot be traced")
    names = labelled[operand].movedim(halves[0].axis, -1)
    names = names.reshape(-1, names.shape[-1])
    if not names.eq(names[:1]).all():
        raise Unviewable("hidden units that differ by token")
    index = names[0][names[0].ne(NOTHING)].long() - 1  # NOTHING: an attention that shares the down weight
    first = 0
    for half in halves:
        local = index - first
        first += len(half.matrix)
        if int(local.min()) >= 0 and int(local.max()) < len(half.matrix):
            return Half(half, rows(half.matrix, local), half.bias_at(local))
    raise Unviewable("hidden units computed by two weights")


def _curve(graph: Graph, of: Product, operand: int) -> Curve | None:
    """The function from a product to a later node; None if it is not elementwise."""
    if of.result == operand:
        return Curve(GRID, ())
    size = len(of.matrix)
    names = spread(graph, of.result, of.axis, labels(size))
    entries = follow(graph, {of.result: names}, operand)[operand].long() - 1  # -1: not of this product
    device = graph.values[of.result].device
    device = torch.device("cpu") if device.type == "meta" else device
    values = torch.full((len(GRID),), torch.nan, dtype=torch.float64)
    try:
        function = replay(graph, of.result, operand, torch.float64)
        # Shifts that cover the grid, and one more that places some points next to others.
        for shift in [*range(0, len(GRID), len(entries[entries >= 0].unique())), 37]:
            pattern = GRID[(torch.arange(size) + shift) % len(GRID)]
            out = function(spread(graph, of.result, of.axis, pattern).contiguous().to(device)).cpu()
            index = (entries[entries >= 0] + shift) % len(GRID)
            result = out[entries >= 0]
            before = values[index]
            values[index] = result
            # An elementwise function gives the same value at every position.
            for one, other in ((before[before.isfinite()], result[before.isfinite()]), (values[index], result)):
                if not torch.allclose(one, other, rtol=1e-9, atol=1e-12):
                    return None
    except (ReplayError, RuntimeError, NotImplementedError):  # constants without values
        return None
    return Curve(values, tuple((node.op, _arguments(graph, node)) for node in _computing(graph, of.result, operand)))


def _computing(graph: Graph, root: int, end: int) -> list[Node]:
    """The nodes that compute the end from the root, including masks, except those that only move or cast."""
    derived, needed = {root}, {end}
    span = graph.nodes[root + 1 : end + 1]
    for node in span:
        if node.step is not None and not derived.isdisjoint(node.step.refs):
            derived.add(node.index)
    for node in reversed(span):
        if node.index in needed and node.index in derived and node.step is not None:
            needed.update(node.step.refs)
    return [n for n in span if n.index in derived & needed and n.op not in _ops.IDENTITY | _ops.PART]


def _arguments(graph: Graph, node: Node) -> tuple[object, ...]:
    """The arguments of a node's operator after the first; weights as tensors."""
    assert node.step is not None
    arguments = (*node.step.args[1:], *node.step.kwargs.values())
    return tuple(graph.values.get(value.index) if isinstance(value, Ref) else value for value in arguments)


def _columns(graph: Graph, down: Product, labelled: dict[int, Tensor], joint: Node | None, hidden: int) -> slice:
    """The columns of the down weight that read the hidden units; they must be adjacent and in order."""
    width = down.matrix.shape[1]
    if joint is not None:
        names = spread(graph, joint.index, down.axis, labels(joint.shape[down.axis]))
        labelled = follow(graph, {joint.index: names}, down.source)
        if down.source not in labelled:
            raise Unviewable("the hidden units cannot be traced to the down weight")
    row = labelled[down.source].movedim(down.axis, -1).reshape(-1, width)[0]
    start = int(row.ne(NOTHING).long().argmax())
    columns = row[start : start + hidden]
    ordered = columns.ne(NOTHING).all() if joint is None else torch.equal(columns, labels(hidden))
    if not ordered or int(row.ne(NOTHING).sum()) != hidden:
        raise Unviewable("the down weight reads the hidden units in another order")
    return slice(start, start + hidden)


def _reads_features(graph: Graph, steps: list[Node], half: Product) -> bool:
    """Whether the weight mixes the features of a token, not the tokens of one feature as in an MLP-Mixer."""
    root = min(parent for parent in steps[0].parents if not graph.nodes[parent].fixed)
    axis = 1 if half.axis == 1 else -1
    names = spread(graph, root, axis, labels(graph.nodes[root].shape[axis]))
    entries = follow(graph, {root: names}, half.source).get(half.source)
    if entries is None or half.source == root:
        return True  # assumed
    row = entries.movedim(half.axis, -1).reshape(-1, entries.shape[half.axis])[0]
    return len(row) == 1 or bool(row[0] != row[1])
