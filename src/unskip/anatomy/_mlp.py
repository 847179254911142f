"""The MLP of a branch: its weights, whether one gates another, and its activation by name.

    branch = W_down act(W_up x)            branch = W_down (act(W_gate x) * W_up x)

A gate is a product of two tensors with different columns, be they of two weights or of one that holds both. The
activation is recognised by computing that part of the graph again on a grid of numbers.
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
    """What was found of one MLP."""

    up: Half
    gate: Half | None
    down: Product
    columns: slice  # of the down weight that read this MLP
    activation: str | None
    curve: Curve | None  # the activation as it was seen; None where it is no function of each entry alone
    extras: tuple[str, ...]


def find_mlp(graph: Graph, readers: list[list[int]], steps: list[Node], context: int | None = None) -> Mlp:
    """The MLP on a branch's path; `context` is the node of an attention beside it. Raises Unviewable."""
    inside = {node.index for node in steps}
    down_node, ups = _ends(graph, steps, context)
    down = product(graph, readers, down_node)
    halves = [product(graph, readers, node) for node in ups]
    names: dict[int, Tensor] = {}
    first = 1
    for half in halves:
        names[half.result] = spread(graph, half.result, half.axis, labels(len(half.matrix), first))
        first += len(half.matrix)
    found = follow(graph, names, down.source)
    joint = _joint(graph, found, inside)
    operands = joint.parents[:2] if joint is not None else (down.source,)
    sides = [_side(halves, found, operand) for operand in operands]
    curves = [_curve(graph, half.of, operand) for half, operand in zip(sides, operands, strict=True)]
    activations = [None if curve is None else curve.name for curve in curves]
    columns = _columns(graph, down, found, joint, len(sides[0].weight))
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
        raise Unviewable("both halves of a gated MLP bend")
    return Mlp(sides[up], sides[gate], down, columns, activations[gate], curves[gate], tuple(extras))


def _ends(graph: Graph, steps: list[Node], context: int | None) -> tuple[Node, list[Node]]:
    """The last product with a weight, and the one or two that it reads, an attention beside them aside."""
    weighted = [node for node in steps if is_weighted(graph, node)]

    def behind(node: Node) -> list[Node]:
        moving = [parent for parent in node.parents if not graph.nodes[parent].fixed]
        found = {n.index: n for parent in moving for n in nearest_products(graph, parent, stop=context)}
        return [found[index] for index in sorted(found) if any(n.index == index for n in weighted)]

    ends = []
    for node in weighted:
        last = not any(node.index in other for other in weighted if other is not node)
        ups = behind(node)
        if last and ups and not any(behind(up) for up in ups):
            ends.append((node, ups))
    if len(ends) != 1:
        raise Unviewable(f"{len(weighted)} products with a weight, in another order than an MLP's")
    if len(ends[0][1]) > 2:
        raise Unviewable(f"{len(ends[0][1])} weights make the hidden layer")
    return ends[0]


def _joint(graph: Graph, found: dict[int, Tensor], inside: set[int]) -> Node | None:
    """The product of two tensors with different columns, where there is one."""
    joints = []
    for index in sorted(found):
        node = graph.nodes[index]
        if node.op != "mul" or len(node.parents) != 2 or index not in inside:
            continue
        a, b = (found.get(parent) for parent in node.parents)
        if a is not None and b is not None and a.shape == b.shape and not torch.equal(a, b):
            joints.append(node)
    if len(joints) > 1:
        raise Unviewable("more than one gate in the hidden layer")
    return joints[0] if joints else None


def _side(halves: list[Product], found: dict[int, Tensor], operand: int) -> Half:
    """The rows behind one operand."""
    if operand not in found:
        raise Unviewable("the hidden units cannot be followed")
    names = found[operand].movedim(halves[0].axis, -1)
    names = names.reshape(-1, names.shape[-1])
    if not names.eq(names[:1]).all():
        raise Unviewable("hidden units that differ by token")
    index = names[0][names[0].ne(NOTHING)].long() - 1  # nothing: an attention that shares the down weight
    first = 0
    for half in halves:
        mine = index - first
        first += len(half.matrix)
        if int(mine.min()) >= 0 and int(mine.max()) < len(half.matrix):
            return Half(half, rows(half.matrix, mine), half.bias_at(mine))
    raise Unviewable("hidden units made by two weights")


def _curve(graph: Graph, of: Product, operand: int) -> Curve | None:
    """What happens entry by entry between a product and a later node; None where that is not all."""
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
        # All of the grid, and one part of it in other company.
        for shift in [*range(0, len(GRID), len(entries[entries >= 0].unique())), 37]:
            pattern = GRID[(torch.arange(size) + shift) % len(GRID)]
            out = function(spread(graph, of.result, of.axis, pattern).contiguous().to(device)).cpu()
            index = (entries[entries >= 0] + shift) % len(GRID)
            got = out[entries >= 0]
            before = values[index]
            values[index] = got
            # A function of each entry alone gives the same wherever the entry stands.
            for one, other in ((before[before.isfinite()], got[before.isfinite()]), (values[index], got)):
                if not torch.allclose(one, other, rtol=1e-9, atol=1e-12):
                    return None
    except (ReplayError, RuntimeError, NotImplementedError):  # constants without values
        return None
    return Curve(values, tuple((node.op, _arguments(graph, node)) for node in _computing(graph, of.result, operand)))


def _computing(graph: Graph, root: int, end: int) -> list[Node]:
    """The nodes that make the end of the root, masks included, those aside that only move or cast."""
    behind, needed = {root}, {end}
    span = graph.nodes[root + 1 : end + 1]
    for node in span:
        if node.step is not None and not behind.isdisjoint(node.step.refs):
            behind.add(node.index)
    for node in reversed(span):
        if node.index in needed and node.index in behind and node.step is not None:
            needed.update(node.step.refs)
    return [n for n in span if n.index in behind & needed and n.op not in _ops.IDENTITY | _ops.PART]


def _arguments(graph: Graph, node: Node) -> tuple[object, ...]:
    """The arguments of a node's operator but the first; a weight as a tensor."""
    assert node.step is not None
    given = (*node.step.args[1:], *node.step.kwargs.values())
    return tuple(graph.values.get(each.index) if isinstance(each, Ref) else each for each in given)


def _columns(graph: Graph, down: Product, found: dict[int, Tensor], joint: Node | None, hidden: int) -> slice:
    """The columns of the down weight that read the hidden units, which must stand there side by side and in order."""
    width = down.matrix.shape[1]
    if joint is not None:
        names = spread(graph, joint.index, down.axis, labels(joint.shape[down.axis]))
        found = follow(graph, {joint.index: names}, down.source)
        if down.source not in found:
            raise Unviewable("the hidden units cannot be followed to the down weight")
    row = found[down.source].movedim(down.axis, -1).reshape(-1, width)[0]
    start = int(row.ne(NOTHING).long().argmax())
    mine = row[start : start + hidden]
    ordered = mine.ne(NOTHING).all() if joint is None else torch.equal(mine, labels(hidden))
    if not ordered or int(row.ne(NOTHING).sum()) != hidden:
        raise Unviewable("the down weight reads the hidden units in another order")
    return slice(start, start + hidden)


def _reads_features(graph: Graph, steps: list[Node], half: Product) -> bool:
    """Whether the weight reads a token's features, and not one feature of all tokens as in an MLP-Mixer."""
    root = min(parent for parent in steps[0].parents if not graph.nodes[parent].fixed)
    axis = 1 if half.axis == 1 else -1
    names = spread(graph, root, axis, labels(graph.nodes[root].shape[axis]))
    found = follow(graph, {root: names}, half.source).get(half.source)
    if found is None or half.source == root:
        return True  # cannot be told
    along = found.movedim(half.axis, -1).reshape(-1, found.shape[half.axis])[0]
    return len(along) == 1 or bool(along[0] != along[1])
