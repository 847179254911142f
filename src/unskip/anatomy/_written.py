"""RMSNorms without a module or kernel: spelled out in a function, or F.rms_norm, which is decomposed on a CPU.

    x * rsqrt(mean(x^2) + eps)        or        x / sqrt(mean(x^2) + eps)

Their nodes are marked with the index of the product, so that they count as one run of one norm (`Node.norm`).
"""

from __future__ import annotations

from unskip.anatomy import _ops
from unskip.anatomy._graph import Graph, Node
from unskip.anatomy._walk import norm_module

_ROOTS = frozenset({"rsqrt", "sqrt"})
_INVERSE = frozenset({"rsqrt", "reciprocal"})
_SMALL = _ROOTS | _INVERSE | frozenset("add clamp clamp_min maximum _to_copy to".split())
_CASTS = frozenset({"_to_copy", "to"})


def mark_norms(graph: Graph) -> Graph:
    """Marks these norms in a graph and returns it."""
    for node in graph.nodes:
        if node.op in _ops.SCALE and len(node.parents) == 2 and not node.fixed and norm_module(node) is None:
            for whole, size in (node.parents, node.parents[::-1])[: 2 if node.op == "mul" else 1]:
                for index in _group(graph, node, whole, size):
                    graph.nodes[index].norm = node.index
    return graph


def _group(graph: Graph, node: Node, whole: int, size: int) -> list[int]:
    """The nodes of the norm that ends in a product of x (`whole`) and one number per row (`size`), or an empty list."""
    if node.shape != graph.nodes[whole].shape or not node.shape or graph.nodes[size].shape != (*node.shape[:-1], 1):
        return []
    group, roots, divides = [node.index], 0, node.op == "div"
    mean = graph.nodes[size]
    while mean.op in _SMALL and mean.parents and mean.shape[-1:] == (1,):
        roots += mean.op in _ROOTS
        divides ^= mean.op in _INVERSE
        group.append(mean.index)
        mean = graph.nodes[mean.parents[0]]
    if mean.op != "mean" or roots != 1 or not divides:
        return []
    square = graph.nodes[mean.parents[0]]
    if square.shape != node.shape or not _is_square(square):
        return []
    group += [mean.index, square.index]
    # The mean square may be computed from a float32 copy of x.
    read = square.parents[0]
    if read != whole and graph.nodes[read].op in _CASTS and graph.nodes[read].parents[0] == whole:
        group.append(read)
        read = whole
    return group if read == whole else []


def _is_square(node: Node) -> bool:
    return node.op == "square" or (node.op == "mul" and len(node.parents) == 2 and len({*node.parents}) == 1)
