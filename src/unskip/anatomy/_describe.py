"""What a residual is: the kind of its branch and where the normalisation stands."""

from __future__ import annotations

import re
from typing import Literal

from torch import nn

from unskip.anatomy import _ops
from unskip.anatomy._find import Finding
from unskip.anatomy._trace import Graph, Node
from unskip.anatomy._walk import in_norm, is_product

Kind = Literal["attention", "mlp", "parallel", "conv", "other"]
NormPlace = Literal["pre", "post", "out", "sandwich", "inner", "none"]

# By what they do: a model's name, such as TinyMoeAttention, says nothing of its modules.
_EXPERTS = re.compile(r"expert|router|sparse_?(moe|mlp)|moe_?(block|layer|mlp|ffn)?$", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_FEED_FORWARD = re.compile(r"mlp|ffn|feed_?forward", re.IGNORECASE)


def kind_of(graph: Graph, path: list[Node]) -> Kind:
    """What the branch is made of, by its operators; names decide only where the operators leave two readings."""
    cores = [node for node in path if _is_attention_core(graph, path, node)]
    if cores:
        return "parallel" if _has_mlp_beside(graph, path, cores) else "attention"
    spatial = [node for node in path if _ops.is_convolution(node.op) and _is_spatial(graph, node)]
    if spatial and not all(any(_FEED_FORWARD.search(type(m).__name__) for m in node.owners) for node in spatial):
        return "conv"
    weights = [node for node in path if _ops.is_matmul(node.op) and not is_product(graph.nodes, node)]
    return "mlp" if weights else "other"


def _is_attention_core(graph: Graph, path: list[Node], node: Node) -> bool:
    """A fused attention kernel, or a product of activations that a softmax weighs (or, in linear attention, another
    product); or values sampled at learnt places and weighed by a softmax, as in deformable attention.
    """
    if _ops.is_attention(node.op):
        return True
    if _ops.is_sampler(node.op):
        return any(_ops.is_softmax(n.op) for n in path)
    if not _multiplies(graph, path, node) or _in_experts(node):
        return False
    return any(
        n.index in node for n in path if n is not node and (_ops.is_softmax(n.op) or _multiplies(graph, path, n))
    )


def _in_experts(node: Node) -> bool:
    """Whether a product gathers what experts made, by the names of the two innermost modules."""
    names = [type(owner).__name__ for owner in node.owners[:2]]
    return not _ATTENTION.search(names[0] if names else "") and any(_EXPERTS.search(name) for name in names)


def _multiplies(graph: Graph, path: list[Node], node: Node) -> bool:
    """A product of two tensors of the branch, also where these are made from learnt queries and not from the input."""
    if is_product(graph.nodes, node):
        return True
    return _ops.is_matmul(node.op) and {graph.nodes[p] for p in node.parents[-2:]} <= set(path)


def _is_spatial(graph: Graph, node: Node) -> bool:
    """A convolution with a kernel larger than one position."""
    return any(
        len(graph.nodes[p].shape) > 2 and max(graph.nodes[p].shape[2:]) > 1
        for p in node.parents
        if graph.nodes[p].fixed
    )


def _has_mlp_beside(graph: Graph, path: list[Node], cores: list[Node]) -> bool:
    """An activation that neither feeds nor follows the attention and joins it, by a concatenation or, with a weight in
    between, by a sum.

    One that joins it by a product is a gate on the attention, not an MLP.
    """
    for node in path:
        if node.op not in _ops.ACTIVATION or in_norm(node):
            continue
        beside = all(core.index not in node and node.index not in core for core in cores)
        if not beside:
            continue
        joined = next((n for n in path if node.index in n and any(core.index in n for core in cores)), None)
        if joined is None:
            continue
        if joined.op == "cat":
            return True
        between = [n for n in path if node.index in n and n.index in joined and n is not joined]
        if joined.op in {"add", "stack", "sum"} and any(_has_weight(graph, n) for n in between):
            return True
    return False


def _has_weight(graph: Graph, node: Node) -> bool:
    """A product with a weight: a state that starts at zero is none."""
    if not _ops.is_matmul(node.op):
        return False
    fixed = [graph.nodes[parent] for parent in node.parents if graph.nodes[parent].fixed]
    return any(graph.nodes[i].op == "weight" for end in fixed for i in range(end.index + 1) if i in end)


def norm_of(graph: Graph, readers: list[list[int]], finding: Finding, path: list[Node], module: nn.Module) -> NormPlace:
    """Where the normalisation stands relative to the addition."""
    on_path = {node.index for node in path}
    pre = _all_norms(graph, readers, finding.root, on_path)
    out = _ends_in_norm(graph, finding.branch)
    if pre:
        return "sandwich" if out else "pre"
    inside = {n.index for n in graph.nodes[finding.add.index + 1 :] if any(owner is module for owner in n.owners)}
    if _all_norms(graph, readers, finding.add.index, inside, every=True):
        return "post"
    if out:
        return "out"
    return "inner" if any(in_norm(node) for node in path) else "none"


def _all_norms(graph: Graph, readers: list[list[int]], index: int, allowed: set[int], every: bool = False) -> bool:
    """Whether all that reads a tensor, within `allowed`, is a normalisation; with `every`, nothing else may read it."""
    frontier, seen = [index], 0
    while frontier:
        for reader in readers[frontier.pop()]:
            node = graph.nodes[reader]
            if reader not in allowed:
                if every:
                    return False
                continue
            if in_norm(node):
                seen += 1
            elif node.op in _ops.IDENTITY or node.op in _ops.PART or node.op == "cat":
                frontier.append(reader)
            else:
                return False
    return seen > 0


def _ends_in_norm(graph: Graph, index: int) -> bool:
    """Whether the branch ends in a normalisation, LayerScale, gates, dropout and rearrangement aside."""
    while True:
        node = graph.nodes[index]
        if in_norm(node):
            return True
        if not node.parents:
            return False
        if node.op in _ops.IDENTITY or node.op in _ops.PART or node.op == "native_dropout":
            index = node.parents[0]
        elif node.op in _ops.SCALE:
            index = next(
                (p for p in node.parents if graph.nodes[p].shape == node.shape and not graph.nodes[p].fixed),
                node.parents[0],
            )
        else:
            return False
