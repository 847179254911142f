"""Operations that may be residuals but to which no pair (alpha, beta) applies. Each check returns the reason, or None.

fused       torch.addcmul(x, g, f(x)), x - f(x)     no addition of a stream and a branch in the source
broadcast   x + f(x.mean(1, keepdim=True))          the branch has fewer elements than the stream
gated       g(x) * x + f(x), G(x) x + f(x)          a gate on the stream: highway networks, hyper-connections
several     x1 + f(x2), parts of one tensor         several streams: reversible networks, hyper-connections
stacked     stack([x, f(x)]).sum(0)                 no addition at all
"""

from __future__ import annotations

from collections.abc import Container
from math import prod

from unskip.anatomy import _ops
from unskip.anatomy._graph import Graph, Node
from unskip.anatomy._walk import bends, between, climb, is_other_part, is_product, reach, weight_depth

_FUSED = {
    "sub": "a residual with a minus sign: write x + (-f(x)) for one that can be rewired",
    "add": "a residual with its own factor (torch.add with alpha)",
}


def fused(nodes: list[Node], node: Node) -> str | None:
    """A residual inside a larger operator (addcmul, lerp, baddbmm, ...), or with its own sign or factor."""
    s, *rest = node.parents
    if nodes[s].shape != node.shape:
        return None
    for root, narrowed in climb(nodes, s):
        if narrowed and node.op == "sub":
            break  # a difference of parts, such as the values of a delta rule minus those of earlier tokens
        for f in rest:
            inside = _ops.is_matmul(node.op) and root in nodes[f] and not nodes[root].fixed
            if inside or any(_ops.is_transform(n.op) for n in _path(nodes, root, f)):
                return _FUSED.get(node.op, f"a residual fused into torch.{node.op}")
    return _subtracted(nodes, node) if node.op == "sub" else None


def _subtracted(nodes: list[Node], node: Node) -> str | None:
    """f(x) - x, if f has a matrix product: pool(x) - x is the token mixer of a PoolFormer, not a residual."""
    f, s = node.parents[:2]
    for root, _ in climb(nodes, s, scaled_by_weights=True):
        if nodes[s].shape == node.shape and any(_ops.is_matmul(n.op) for n in _path(nodes, root, f)):
            return "the stream is subtracted: f(x) - x, with a minus sign"
    return None


def broadcast(nodes: list[Node], node: Node) -> str | None:
    """x + f(x) with a branch of fewer elements, added to several positions each."""
    for s, f in _both(node):
        for root, _ in climb(nodes, s, scaled_by_weights=True) if nodes[s].shape == node.shape else ():
            if any(_ops.is_transform(n.op) for n in _path(nodes, root, f)):
                return "a residual whose branch broadcasts over the stream"
    return None


GATED = "the stream's weight depends on the input (a gate, or a mixture of streams); it is not a number"


def gated(nodes: list[Node], node: Node, residuals: Container[int]) -> int | None:
    """The stream, if its factor depends on the input and the branch has weights.

    The factors must be complements, (1 - g) * x + g * f(x), or else the branch must have an activation and span no
    residual: rotary positions are factors in every block, and the outputs of all blocks depend on them.
    """
    for s, f in _both(node):
        factors = _factors(nodes, s)
        complement = any(_complements(nodes, a, b) for a in factors for b in _factors(nodes, f))
        for root in (root for factor in factors for root, narrowed in climb(nodes, factor) if not narrowed):
            path = _path(nodes, root, f)
            single = any(bends(nodes, n) for n in path) and not any(n.index in residuals for n in path)
            if weight_depth(nodes, path) and (complement or single):
                return root
    return None


def several(graph: Graph, node: Node) -> str | None:
    """One part of a tensor is the stream, and the branch was computed from another part."""
    nodes = graph.nodes
    for s, f in _both(node):
        common = nodes[s].ancestors & nodes[f].ancestors & graph.moving
        root = common.bit_length() - 1
        if not common or root in (s, f):
            continue
        shortcut, path = between(nodes, root, s), between(nodes, root, f)
        if not is_other_part(root, shortcut, path) or any(bends(nodes, n) for n in shortcut):
            continue
        if any(bends(nodes, n) for n in path) and weight_depth(nodes, path) > max(1, weight_depth(nodes, shortcut)):
            return "several streams: the branch is computed from one part of them and added to another"
    return None


def stacked(nodes: list[Node], readers: list[list[int]], node: Node) -> str | None:
    """A stream and its branch, stacked and then summed or mixed by weights that depend on the input."""
    if len({nodes[parent].shape for parent in node.parents}) > 1 or not _is_summed(nodes, readers, node):
        return None
    sources = list(dict.fromkeys(list(climb(nodes, parent))[-1][0] for parent in node.parents))
    if any(_ops.is_transform(n.op) for s in sources for f in sources if s != f for n in _path(nodes, s, f)):
        return "a stream and its branch are stacked, and the stack is summed"
    return None


def _is_summed(nodes: list[Node], readers: list[list[int]], stack: Node) -> bool:
    """Whether a stack or concatenation is summed, or multiplied by a tensor that depends on the input, into one or
    several tensors of the size of its parts; or a stack is multiplied by a weight into one.
    """
    size = prod(nodes[stack.parents[0]].shape)
    reading = [nodes[reader] for reader in reach(nodes, readers, stack.index)]
    sums = [node for node in reading if node.op in ("sum", "mean") or is_product(nodes, node)]
    mixed = [node for node in reading if stack.op == "stack" and _ops.is_matmul(node.op)]
    return any(prod(node.shape) % size == 0 for node in sums) or any(prod(node.shape) == size for node in mixed)


def _both(node: Node) -> tuple[tuple[int, int], tuple[int, int]]:
    """Both orders of an addition's operands as (stream, branch)."""
    left, right = node.parents[:2]
    return (left, right), (right, left)


def _path(nodes: list[Node], root: int, end: int) -> list[Node]:
    """The nodes between two tensors; empty if the first is fixed or the second was not computed from it."""
    return between(nodes, root, end) if root in nodes[end] and not nodes[root].fixed else []


def _factors(nodes: list[Node], index: int) -> tuple[int, ...]:
    """The operands, if a tensor is a full product of two tensors that depend on the input."""
    *_, (last, narrowed) = climb(nodes, index)
    factors = nodes[last].parents[-2:]
    product = (nodes[last].op == "mul" or _ops.is_matmul(nodes[last].op)) and not narrowed
    return factors if product and len(factors) == 2 and not any(nodes[p].fixed for p in factors) else ()


def _complements(nodes: list[Node], a: int, b: int) -> bool:
    """Whether one is 1 minus the other."""
    return any(nodes[x].op in ("rsub", "sub") and y in nodes[x].parents for x, y in ((a, b), (b, a)))
