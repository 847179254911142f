"""Products with a weight in a recorded graph: y = x W^T + b, as views on the parameters that store W and b.

A view shares memory with the parameter, in the layout of nn.Linear, (out, in): writing into it changes the model,
whether the parameter has that layout, is transposed (GPT-2's Conv1D) or is a 1 x 1 convolution.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from unskip.anatomy import _ops
from unskip.anatomy._graph import Graph, Node, Ref
from unskip.anatomy._walk import is_product

_COPIES = frozenset("_to_copy to clone contiguous detach alias".split())


@dataclass(frozen=True, eq=False)
class Product:
    """One product with a weight: its nodes and its parameters."""

    source: int  # node of x
    result: int  # node of y, including the bias
    axis: int  # of the features in both
    matrix: Tensor  # (out, in), shares memory with the parameter
    weight: nn.Parameter
    biases: tuple[nn.Parameter, ...]  # the parameters that the bias depends on, also if it is not a view on them
    pieces: tuple[tuple[int, Tensor], ...]  # (first index, view): the bias is these views, concatenated

    @property
    def bias(self) -> Tensor | None:
        """The whole bias, (out,), sharing memory with its parameter."""
        return self.bias_at(torch.arange(len(self.matrix)))

    def bias_at(self, index: Tensor) -> Tensor | None:
        """The entries of the bias at an index of any shape; None unless one parameter has them all."""
        for start, view in self.pieces:
            if start <= int(index.min()) and int(index.max()) < start + len(view):
                return rows(view, index - start)
        return None

    def hides_bias(self, *views: Tensor | None) -> bool:
        """Whether a parameter of the bias has no view among `views` and `pieces`."""
        viewed = {view.untyped_storage()._cdata for view in views if view is not None}
        viewed |= {view.untyped_storage()._cdata for _, view in self.pieces}
        return any(parameter.untyped_storage()._cdata not in viewed for parameter in self.biases)


class Unviewable(Exception):
    """Weights that cannot be given as views on parameters, with the reason."""


def is_weighted(graph: Graph, node: Node) -> bool:
    """Whether a node is a product of an activation with something that does not depend on the input."""
    if not _ops.is_matmul(node.op) or is_product(graph.nodes, node) or node.fixed:
        return False
    return any(graph.nodes[parent].fixed for parent in node.parents)


def product(graph: Graph, readers: list[list[int]], node: Node) -> Product:
    """The product at a node. Raises Unviewable."""
    if _ops.is_convolution(node.op):
        return _pointwise(graph, node)
    if node.op not in ("mm", "addmm", "bmm", "baddbmm", "linear"):
        raise Unviewable(f"a product by torch.{node.op}")
    added = node.parents[0] if node.op in ("addmm", "baddbmm") else None
    left, right = node.parents[-2:] if node.op != "linear" else node.parents[:2]
    if not graph.nodes[right].fixed:
        raise Unviewable("the weight is the left operand of the product")
    weight, view = _view(graph, right)
    view = view[0] if view.ndim == 3 and view.stride(0) == 0 else view
    if view.ndim != 2:
        raise Unviewable(f"the weight has {view.ndim} axes")
    matrix = view if node.op == "linear" else view.t()
    result = node.index
    if node.op == "linear" and len(node.parents) > 2:
        added = node.parents[2]
    if added is None:
        result, added = _later_bias(graph, readers, node, len(matrix))
    return Product(left, result, -1, matrix, weight, *_bias(graph, added, len(matrix)))


def _pointwise(graph: Graph, node: Node) -> Product:
    assert node.step is not None
    source, weight_ref, bias_ref, *_, groups = (*node.step.args[:3], node.step.args[-1])
    weight, view = _view(graph, weight_ref.index)
    if groups != 1 or max(view.shape[2:]) > 1:
        raise Unviewable("a convolution over several positions")
    biases = _bias(graph, bias_ref.index if isinstance(bias_ref, Ref) else None, len(view))
    return Product(source.index, node.index, 1, view.flatten(1), weight, *biases)


def _view(graph: Graph, index: int) -> tuple[nn.Parameter, Tensor]:
    """The parameter behind a node, and the node's tensor as a view on it."""
    chain: list[Node] = []
    node = graph.nodes[index]
    while node.op != "weight":
        if node.step is None or (node.op not in _ops.VIEW and node.op not in _COPIES and node.op != "_unsafe_view"):
            raise Unviewable(f"the weight is computed (torch.{node.op}), not stored")
        chain.append(node)
        node = graph.nodes[node.parents[0]]
    parameter = graph.values[node.index]
    if not isinstance(parameter, nn.Parameter):
        raise Unviewable("the weight is a buffer, not a parameter")
    view = parameter.detach()
    for link in reversed(chain):
        view = view if link.op in _COPIES else _apply(link, view)
    return parameter, view


def _apply(node: Node, value: Tensor) -> Tensor:
    """Applies a node's operator to another tensor."""
    assert node.step is not None
    args, kwargs = tree_map(lambda v: value if isinstance(v, Ref) else v, (node.step.args, node.step.kwargs))
    out: Any = node.step.func(*args, **kwargs)
    return cast(Tensor, out[node.step.output] if isinstance(out, list | tuple) else out)


def _later_bias(graph: Graph, readers: list[list[int]], node: Node, size: int) -> tuple[int, int | None]:
    """(result, bias) of a bias added by a separate operator, as torch does for inputs in some layouts."""
    index = node.index
    while True:
        following = [graph.nodes[i] for i in readers[index]]
        if len(following) != 1:
            return node.index, None
        (reader,) = following
        if reader.op in _ops.ADD and len(reader.parents) == 2:
            other = reader.parents[1] if reader.parents[0] == index else reader.parents[0]
            fixed = graph.nodes[other].fixed and graph.nodes[other].shape == (size,)
            return (reader.index, other) if fixed else (node.index, None)
        if reader.op not in ("view", "_unsafe_view"):
            return node.index, None
        index = reader.index


def _bias(
    graph: Graph, index: int | None, size: int
) -> tuple[tuple[nn.Parameter, ...], tuple[tuple[int, Tensor], ...]]:
    """The parameters of a bias, and the views that it consists of: one, or several concatenated as in BEiT."""
    if index is None:
        return (), ()
    node = graph.nodes[index]
    leaves = [graph.values[i] for i in range(index + 1) if graph.nodes[i].op == "weight" and i in node]
    parameters = tuple(leaf for leaf in leaves if isinstance(leaf, nn.Parameter))
    while node.op in _COPIES:
        node = graph.nodes[node.parents[0]]
    parts = node.parents if node.op == "cat" else (node.index,)
    pieces, start = [], 0
    for part in parts:
        with contextlib.suppress(Unviewable):  # a buffer, or computed
            pieces.append((start, _view(graph, part)[1]))
        start += torch.Size(graph.nodes[part].shape).numel()
    return parameters, tuple(pieces) if start == size and all(view.ndim == 1 for _, view in pieces) else ()


def rows(matrix: Tensor, index: Tensor) -> Tensor:
    """The rows of a matrix (or entries of a vector) at an index of any shape, as a view.

    The index must be evenly spaced along each axis, index[h, j] = a + h * s + j * t with s, t >= 0.
    """
    index = index.long()
    steps = []
    for axis, size in enumerate(index.shape):
        first = index.narrow(axis, 0, 1)
        step = int((index.narrow(axis, 1, 1) - first).flatten()[0]) if size > 1 else 1
        arange = torch.arange(size).reshape([-1 if i == axis else 1 for i in range(index.ndim)])
        if step < 0 or not torch.equal(first + step * arange, index):
            raise Unviewable("the rows of a head are not evenly spaced")
        steps.append(step * matrix.stride(0))
    start = matrix.storage_offset() + int(index.flatten()[0]) * matrix.stride(0)
    return matrix.as_strided((*index.shape, *matrix.shape[1:]), (*steps, *matrix.stride()[1:]), start)
