"""The attention of a branch: which rows of which weights compute the queries, keys and values of each head.

    scores = q k^T,   p = softmax(scores),   context = p v,   branch = W_O context

The graph contains the two products around the softmax. Their operands lead back to the weights, and `_columns` traces
the rows of each head, so fused, separate, interleaved and grouped layouts need no separate cases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unskip.anatomy import _ops
from unskip.anatomy._columns import NOTHING, follow, labels, spread
from unskip.anatomy._graph import Graph, Node, Ref
from unskip.anatomy._products import Product, Unviewable, is_weighted, product, rows
from unskip.anatomy._walk import between, in_norm, is_product


@dataclass(frozen=True, eq=False)
class Projection:
    """The weights of one of q, k, v: (heads, head_dim, in), and their bias (heads, head_dim)."""

    of: Product
    weight: Tensor
    bias: Tensor | None
    head_of: Tensor  # the head of each matrix of the batched product

    @property
    def heads(self) -> int:
        return len(self.weight)


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention: its projections and its nodes in the graph."""

    softmax: int  # node of the attention probabilities
    q: Projection
    k: Projection
    v: Projection
    out: Product
    columns: slice  # of the output weight that read this attention
    context: int  # node of p v
    cross: bool  # keys and values come from another source than queries
    scale: float  # of the scores, q k^T, before the softmax
    extras: tuple[str, ...]  # steps besides the formula above


def find_attention(graph: Graph, readers: list[list[int]], steps: list[Node]) -> Attention:
    """The attention on a branch's path. Raises Unviewable with the reason if it has another form."""
    scores, softmax, context = _core(graph, steps)
    query, key = scores.parents[-2:]
    q, k = _projection(graph, readers, query, -1), _projection(graph, readers, key, -2)
    value = next(parent for parent in context.parents[-2:] if softmax.index not in graph.nodes[parent])
    v = _projection(graph, readers, value, -1)
    _check_groups(q, k, v)
    out, columns = _output(graph, readers, steps, context, q)
    cross = any(not _from_stream(graph, steps, part.of) for part in (k, v))
    if not _from_stream(graph, steps, q.of):
        raise Unviewable("the queries are not a linear map of the normalised stream")
    extras = [extra for part in (q, k, v) for extra in input_extras(graph, steps, part.of.source)]
    extras += _extras(graph, q.of.result, query, "query-key")
    extras += _extras(graph, k.of.result, key, "query-key")
    extras += _extras(graph, v.of.result, value, "value")
    extras += _score_extras(graph, scores, softmax)
    extras += _extras(graph, context.index, out.source, "output")
    if any(part.of.hides_bias(part.bias) for part in (q, k, v)) or out.hides_bias():
        extras.append("computed bias")
    alpha = scores.step.kwargs.get("alpha", 1) if scores.step is not None else 1  # of baddbmm, as in Bloom
    scale = (
        float(alpha)
        * _factor(graph, q.of.result, query)
        * _factor(graph, k.of.result, key)
        * _factor(graph, scores.index, softmax.index)
    )
    return Attention(softmax.index, q, k, v, out, columns, context.index, cross, scale, tuple(dict.fromkeys(extras)))


def _check_groups(q: Projection, k: Projection, v: Projection) -> None:
    """Raises Unviewable unless consecutive query heads share a key and value head."""
    for part in (k, v):
        if q.heads % part.heads or len(part.head_of) != len(q.head_of):
            raise Unviewable(f"{q.heads} query heads do not divide into groups over {part.heads} key or value heads")
        if not torch.equal(part.head_of, q.head_of // (q.heads // part.heads)):
            raise Unviewable("the query heads that share a key or value head are not consecutive")


def _core(graph: Graph, steps: list[Node]) -> tuple[Node, Node, Node]:
    """The product of queries and keys, the softmax, and the product with the values."""
    if any(_ops.is_attention(node.op) for node in steps):
        raise Unviewable("a fused attention kernel that exposes neither queries nor keys")
    products = [node for node in steps if is_product(graph.nodes, node)]
    cores = []
    for node in steps:
        if _ops.is_softmax(node.op):
            before = [p for p in products if p.index in node]
            after = [p for p in products if node.index in p]
            if before and after:
                if any(p.index not in before[-1] for p in before):
                    raise Unviewable("attention whose scores come from several products")
                cores.append((before[-1], node, after[0]))
    if not cores:
        raise Unviewable("attention without a softmax between two products")
    if len(cores) > 1:
        raise Unviewable(f"{len(cores)} attentions in one branch")
    scores, _, context = cores[0]
    if any(is_weighted(graph, node) and scores.index in node and node.index in context for node in steps):
        raise Unviewable("a weight mixes the heads between scores and values (talking heads)")
    return cores[0]


def nearest_products(graph: Graph, target: int, stop: int | None = None) -> list[Node]:
    """The last products with a weight before a node, on every path back to the input; paths through `stop` are cut."""
    products: list[Node] = []
    frontier, seen = [target], set()
    while frontier:
        index = frontier.pop()
        if index in seen or index == stop or graph.nodes[index].fixed:
            continue
        seen.add(index)
        node = graph.nodes[index]
        if is_weighted(graph, node):
            products.append(node)
        else:
            frontier.extend(node.parents)
    return sorted(products, key=lambda node: node.index)


def _projection(graph: Graph, readers: list[list[int]], index: int, axis: int) -> Projection:
    """The weights that compute an operand of an attention's product; `axis` is its head_dim axis."""
    products = nearest_products(graph, index)
    if len(products) != 1:
        raise Unviewable(f"queries, keys or values are computed by {len(products)} weights")
    of = product(graph, readers, products[0])
    names = spread(graph, of.result, of.axis, labels(len(of.matrix)))
    entries = follow(graph, {of.result: names}, index).get(index)
    if entries is None:
        raise Unviewable("the rows of a head cannot be traced")
    entries = entries.movedim(axis, -1)  # (..., tokens, head_dim)
    entries = entries.reshape(-1, *entries.shape[-2:])
    if entries.eq(NOTHING).any() or not entries.eq(entries[:, :1]).all():
        raise Unviewable("attention over features, or heads that differ by token")
    heads, head_of = _distinct(entries[:, 0].long() - 1)
    return Projection(of, rows(of.matrix, heads), of.bias_at(heads), head_of)


def _distinct(values: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows in order of appearance, and for each row its index among them."""
    order: dict[tuple[int, ...], int] = {}
    indices = [order.setdefault(tuple(row), len(order)) for row in values.tolist()]
    return torch.tensor([*order]), torch.tensor(indices)


def _output(
    graph: Graph, readers: list[list[int]], steps: list[Node], context: Node, q: Projection
) -> tuple[Product, slice]:
    after = [node for node in steps if context.index in node and is_weighted(graph, node)]
    if not after:
        raise Unviewable("no output projection")
    if any(after[0].index in node for node in after[1:]):
        raise Unviewable("several weights in a row follow the attention")
    out = product(graph, readers, after[0])
    batches, _, width = (torch.Size(context.shape[:-2]).numel(), *context.shape[-2:])
    if batches != len(q.head_of):
        raise Unviewable("queries and attended values have different layouts")
    names = q.head_of[:, None, None] * width + labels(width)  # (batch * heads, 1, head_dim)
    names = names.reshape(*context.shape[:-2], 1, width).expand(context.shape)
    entries = follow(graph, {context.index: names}, out.source).get(out.source)
    inner = q.heads * width
    if entries is None:
        raise Unviewable("the heads cannot be traced to the output projection")
    columns = entries.movedim(out.axis, -1).reshape(-1, out.matrix.shape[1])
    start = int(columns[0].ne(NOTHING).long().argmax())
    expected = torch.zeros(out.matrix.shape[1], dtype=torch.float64)
    expected[start : start + inner] = labels(inner)
    if not columns.eq(expected).all():
        raise Unviewable("the output projection reads the heads in another order")
    return out, slice(start, start + inner)


def _from_stream(graph: Graph, steps: list[Node], of: Product) -> bool:
    """Whether a product reads the branch's input without another weight in between."""
    inside = {node.index for node in steps}
    return of.source in inside and not any(
        is_weighted(graph, graph.nodes[i]) for i in inside if i == of.source or i in graph.nodes[of.source]
    )


def _factor(graph: Graph, source: int, target: int) -> float:
    """The product of the numbers that multiply or divide a tensor between two nodes."""
    factor = 1.0
    for node in between(graph.nodes, source, target):
        if node.op not in _ops.SCALE or node.step is None:
            continue
        other = node.step.args[1]
        if isinstance(other, Ref):
            value = graph.values[other.index]
            other = float(value) if value.numel() == 1 and value.device.type != "meta" else 1.0
        factor *= other if node.op == "mul" else 1 / other
    return factor


def _is_norm(node: Node) -> bool:
    """Whether a node is part of a normalisation itself, not of another step of a module such as AdaLayerNorm."""
    normalises = _ops.is_norm(node.op) or node.norm is not None
    return in_norm(node) and (normalises or not any(node.owners[0].children()))


def input_extras(graph: Graph, steps: list[Node], target: int) -> list[str]:
    """Steps on a branch's input besides its norm: added positions, modulation by a condition, another sequence."""
    extras = []
    for node in steps:
        on_path = node.index <= target and node.index in graph.nodes[target]
        if on_path and node.op == "cat" and _joins(graph, node):
            extras.append("input concatenation")
        elif on_path and not _is_norm(node) and len(node.parents) == 2:
            extras += ["input modulation"] if node.op == "mul" else ["input sum"] if node.op in _ops.ADD else []
    return list(dict.fromkeys(extras))


def _extras(graph: Graph, source: int, target: int, where: str) -> list[str]:
    """Steps between two nodes besides moving and scaling."""
    extras = []
    for node in between(graph.nodes, source, target):
        if in_norm(node) or node.op in ("linalg_vector_norm", "norm"):
            extras.append(f"{where} norm")
        elif node.op in _ops.ADD or (node.op == "cat" and where != "value" and _joins(graph, node)):
            extras.append(f"{where} positions" if where == "query-key" else f"{where} sum")
        elif node.op in _ops.SCALE and len(node.parents) == 2:
            fixed = [graph.values[parent] for parent in node.parents if graph.nodes[parent].fixed]
            if graph.values[node.index].is_complex():  # rotary, as complex numbers
                extras.append(f"{where} positions")
            elif any(value.numel() > 1 for value in fixed):
                extras.append(f"{where} scale")
            elif node.op == "mul" and not fixed:
                extras.append(f"{where} gate")
        elif node.op in _ops.ACTIVATION - {"clamp_min"}:  # clamp_min guards a division
            extras.append(f"{where} {node.op}")
    rotary = f"{where} positions" in extras  # which multiply by sines and cosines
    return [extra for extra in extras if not (rotary and extra == f"{where} scale")]


def _joins(graph: Graph, node: Node) -> bool:
    """Whether a concatenation has several parts that are not empty, as a cache is before its first tokens."""
    return sum(0 not in graph.nodes[parent].shape for parent in node.parents) > 1


def _score_extras(graph: Graph, scores: Node, softmax: Node) -> list[str]:
    """Steps on the scores besides one factor: a mask, a bias such as relative positions, a cap, several scales."""
    extras = ["score bias"] if len(scores.parents) > 2 and scores.step and scores.step.kwargs.get("beta", 1) else []
    for node in between(graph.nodes, scores.index, softmax.index)[:-1]:
        others = [p for p in node.parents if scores.index not in graph.nodes[p]]
        if node.op in ("masked_fill", "where"):
            extras.append("mask")
        elif node.op in _ops.ADD and others:
            extras.append("mask" if _masks(graph, others[0]) else "score bias")
        elif node.op == "mul" and others and graph.values[others[0]].numel() > 1:
            extras.append("score scale")
        elif node.op in _ops.ACTIVATION:
            extras.append("score cap" if node.op == "tanh" else f"score {node.op}")
    return extras


def _masks(graph: Graph, index: int) -> bool:
    """Whether a tensor added to scores is a mask: entries of 0 or below -1e4. A learned bias is not, even at zero."""
    node, value = graph.nodes[index], graph.values[index]
    leaves = [n.index for n in graph.nodes[: index + 1] if n.op == "weight" and n.index in node] if node.fixed else []
    learned = any(isinstance(graph.values[leaf], nn.Parameter) for leaf in leaves)
    return not learned and value.device.type != "meta" and bool(((value == 0) | (value < -1e4)).all())
