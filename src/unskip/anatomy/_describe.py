"""Classifies residuals: the kind of the branch and the placement of the normalisation."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from math import prod
from typing import Literal

from torch import nn

from unskip.anatomy import _ops
from unskip.anatomy._find import Finding
from unskip.anatomy._graph import Graph, Node
from unskip.anatomy._walk import between, in_norm, is_product

Kind = Literal["attention", "mlp", "parallel", "conv", "ssm", "other"]  # what the branch of a site is
NormPlace = Literal["pre", "post", "out", "sandwich", "inner", "none"]

# Words that name a function: a model's prefix, as in TinyMoeAttention, does not describe each of its modules.
_EXPERTS = re.compile(r"expert|router|sparse_?(moe|mlp)|moe_?(block|layer|mlp|ffn)?$", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_LINEAR_ATTENTION = re.compile(r"attention|attn|delta", re.IGNORECASE)
_FEED_FORWARD = re.compile(r"mlp|ffn|feed_?forward", re.IGNORECASE)


def kind_of(graph: Graph, path: list[Node]) -> Kind:
    """The kind of a branch, from its operators; module names decide only if the operators are ambiguous."""
    cores = [node for node in path if _is_attention_core(graph, path, node)]
    decays = [node for node in path if _decays_state(graph, node)]
    # Linear attention may have the same decay; the names of the innermost modules tell the two apart.
    by_attention = [any(_LINEAR_ATTENTION.search(type(owner).__name__) for owner in n.owners[:1]) for n in decays]
    if not all(by_attention) and not any(_ops.is_softmax(n.op) or _ops.is_attention(n.op) for n in path):
        return "ssm"
    if cores:
        return "parallel" if _has_mlp_beside(graph, path, cores) else "attention"
    if decays:
        return "attention"
    if any(isinstance(owner, nn.RNNBase) for node in path for owner in node.owners[:1]):
        return "other"  # recurrent
    if any(node.op == "_fft_c2r" for node in path):  # an inverse FFT: a convolution in the frequency domain
        return "conv"
    spatial = [node for node in path if _ops.is_convolution(node.op) and _is_spatial(graph, node)]
    if spatial and not all(any(_FEED_FORWARD.search(type(m).__name__) for m in node.owners) for node in spatial):
        return "conv"
    weights = [node for node in path if _ops.is_matmul(node.op) and not is_product(graph.nodes, node)]
    return "mlp" if weights else "other"


def is_cross(graph: Graph, root: int, path: list[Node]) -> bool:
    """Whether the values of all attention in a branch are not computed from the stream."""
    values = [_values(graph, node) for node in path if _is_attention_core(graph, path, node)]
    known = [index for index in values if index is not None]
    return bool(known) and not any(root in graph.nodes[index] for index in known)


def _values(graph: Graph, core: Node) -> int | None:
    """The values of an attention: the third operand of a kernel, or the tensor that a softmax multiplies."""
    if _ops.is_attention(core.op):
        return core.parents[2] if len(core.parents) > 2 else None
    values = [p for p in core.parents[-2:] if _softmax_at(graph, p) is None]
    return values[0] if len(values) == 1 and len(core.parents) > 1 else None


def _is_attention_core(graph: Graph, path: list[Node], node: Node) -> bool:
    """Whether a node applies attention weights to values: a fused kernel; a product of a softmax (in linear attention,
    of another product) with activations; or values sampled at learned positions and weighted by a softmax, as in
    deformable attention. For one token, einsum runs as an elementwise product.
    """
    if _ops.is_attention(node.op):
        return True
    if _ops.is_sampler(node.op):
        return any(_ops.is_softmax(n.op) for n in path)
    if (node.op == "mul" or _ops.is_matmul(node.op)) and len(node.parents) > 1:
        softmax = next((s for p in node.parents[-2:] if (s := _softmax_at(graph, p)) is not None), None)
        if softmax is not None and (_is_scored(graph, softmax) or _is_in_attention(node)):
            return True
    if not _multiplies(graph, path, node) or _in_experts(node) or _is_by_token(path, node):
        return False
    return any(
        n.index in node for n in path if n is not node and (_ops.is_softmax(n.op) or _multiplies(graph, path, n))
    )


def _is_in_attention(node: Node) -> bool:
    """Whether the module of a matrix product is an attention by its name; covers learned keys and values."""
    return _ops.is_matmul(node.op) and bool(_ATTENTION.search(type(node.owners[0]).__name__ if node.owners else ""))


def _is_by_token(path: list[Node], node: Node) -> bool:
    """Whether a product mixes no tokens, such as that of a router's weights with the outputs of its experts."""
    tokens = prod(path[-1].shape[:-1])
    return len(node.shape) == 3 and node.shape[0] == tokens and 1 in node.shape[1:]


def _softmax_at(graph: Graph, index: int) -> int | None:
    """The softmax whose output a tensor is, up to rearrangement, dropout and casts; None if it is not one."""
    node = graph.nodes[index]
    while node.parents and not _ops.is_softmax(node.op):
        if node.op not in _ops.IDENTITY | _ops.PART | {"native_dropout"}:
            return None
        node = graph.nodes[node.parents[0]]
    return node.index if _ops.is_softmax(node.op) else None


def _is_scored(graph: Graph, softmax: int) -> bool:
    """Whether a softmax is over products of queries and keys, not over the output of one weight as in a router."""
    return any(is_product(graph.nodes, node) for node in _back(graph, softmax, _ops.IDENTITY | _ops.PART | _SCORES))


def _decays_state(graph: Graph, node: Node) -> bool:
    """Whether a node is a scan kernel or the decay of a state: exp(dt A) with A = -exp(a weight) (S4, Mamba) or
    A = -softplus(a weight) (RG-LRU), dt fixed or from the input; or exp(state + A) (RWKV).
    """
    if _ops.is_scan(node.op):
        return True
    if node.op == "mul":
        return any(_exp_of_exp(graph, parent) for parent in node.parents)
    if node.op != "exp":
        return False
    terms = _back(graph, node.index, _ops.IDENTITY | _ops.PART | _DECAYS)
    return any(_exp_of_weight(graph, p) for term in terms if term.op in ("mul", "add") for p in term.parents)


def _exp_of_weight(graph: Graph, index: int) -> bool:
    return graph.nodes[index].fixed and any(
        node.op in ("exp", "softplus") for node in _back(graph, index, _ops.IDENTITY | {"neg", "mul"})
    )


def _exp_of_exp(graph: Graph, index: int) -> bool:
    end = graph.nodes[index]
    if not end.fixed or end.op != "exp":
        return False
    return any(_exp_of_weight(graph, n.index) for n in _back(graph, end.parents[0], _ops.IDENTITY | {"neg", "mul"}))


_SCORES = frozenset("_softmax softmax mul div add sub masked_fill where tanh native_dropout amax maximum".split())
_DECAYS = frozenset("exp mul add cumsum sub masked_fill where neg".split())


def _back(graph: Graph, index: int, through: frozenset[str]) -> Iterator[Node]:
    """A node and its ancestors back through the given operators, including the first ones that are not among them."""
    frontier, seen = [index], {index}
    while frontier:
        node = graph.nodes[frontier.pop()]
        yield node
        if node.op in through:
            fresh = [parent for parent in node.parents if parent not in seen]
            seen.update(fresh)
            frontier += fresh


def _in_experts(node: Node) -> bool:
    """Whether a product combines the outputs of experts, by the names of the two innermost modules."""
    names = [type(owner).__name__ for owner in node.owners[:2]]
    return not _ATTENTION.search(names[0] if names else "") and any(_EXPERTS.search(name) for name in names)


def _multiplies(graph: Graph, path: list[Node], node: Node) -> bool:
    """Whether a node is a product of two tensors of the branch; these may come from learned queries."""
    if is_product(graph.nodes, node):
        return True
    return _ops.is_matmul(node.op) and {graph.nodes[p] for p in node.parents[-2:]} <= set(path)


def _is_spatial(graph: Graph, node: Node) -> bool:
    """Whether a convolution's kernel is larger than one position."""
    return any(
        len(graph.nodes[p].shape) > 2 and max(graph.nodes[p].shape[2:]) > 1
        for p in node.parents
        if graph.nodes[p].fixed
    )


def _has_mlp_beside(graph: Graph, path: list[Node], cores: list[Node]) -> bool:
    """Whether an activation in parallel to the attention is concatenated with it or, after a weight, added to it.

    An activation that multiplies the attention is a gate, not an MLP.
    """
    for node in path:
        if node.op not in _ops.ACTIVATION or in_norm(node):
            continue
        if any(core.index in node or node.index in core for core in cores):
            continue
        joined = next((n for n in path if node.index in n and any(core.index in n for core in cores)), None)
        if joined is None:
            continue
        if joined.op == "cat":
            return True
        middle = [n for n in path if node.index in n and n.index in joined and n is not joined]
        if joined.op in {"add", "stack", "sum"} and any(_has_weight(graph, n) for n in middle):
            return True
    return False


def _has_weight(graph: Graph, node: Node) -> bool:
    """Whether a node is a product with a weight, not with a constant such as a zero initial state."""
    if not _ops.is_matmul(node.op):
        return False
    fixed = [graph.nodes[parent] for parent in node.parents if graph.nodes[parent].fixed]
    return any(graph.nodes[i].op == "weight" for end in fixed for i in range(end.index + 1) if i in end)


def norm_of(
    graph: Graph,
    readers: list[list[int]],
    finding: Finding,
    path: list[Node],
    module: nn.Module | None,
    roots: list[int],
) -> NormPlace:
    """The placement of the normalisation relative to the addition.

    A norm of the sum is post-norm if it runs in `module`, the one that adds (None for an addition in a loop, whose
    module may end in a final norm), or if its result is the stream of a later site. `roots` are those of all sites,
    sorted.
    """
    on_path = {node.index for node in path}
    pre = _all_norms(graph, readers, finding.root, on_path)
    out = _ends_in_norm(graph, finding.branch)
    if pre:
        return "sandwich" if out else "pre"
    add = finding.add.index
    inside = {n.index for n in graph.nodes[add + 1 :] if any(owner is module for owner in n.owners)}
    if _all_norms(graph, readers, add, inside, every=True):
        return "post"
    if out:
        return "out"
    if _is_normed_stream(graph, readers, finding, roots):
        return "post"
    return "inner" if any(in_norm(node) for node in path) else "none"


def _is_normed_stream(graph: Graph, readers: list[list[int]], finding: Finding, roots: list[int]) -> bool:
    """Whether only norms read the sum, and a norm of it is the stream of a later site; for the last site, whether the
    earlier streams except the first are outputs of norms.
    """
    add = finding.add.index
    if not _all_norms(graph, readers, add, None, every=True):
        return False
    later = next((root for root in roots[bisect_right(roots, add) :] if add in graph.nodes[root]), None)
    if later is not None:
        return _only_norms(between(graph.nodes, add, later))
    before = [root for root in roots if root in graph.nodes[add]]
    return len(before) > 1 and all(in_norm(graph.nodes[root]) for root in before[1:])


def _only_norms(nodes: list[Node]) -> bool:
    return any(map(in_norm, nodes)) and all(in_norm(node) or node.op in _ops.IDENTITY for node in nodes)


def _all_norms(
    graph: Graph, readers: list[list[int]], index: int, allowed: set[int] | None, every: bool = False
) -> bool:
    """Whether only normalisations read a tensor; readers outside `allowed` are ignored, with `every` they count too."""
    frontier, seen = [index], 0
    while frontier:
        for reader in readers[frontier.pop()]:
            node = graph.nodes[reader]
            if allowed is not None and reader not in allowed:
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
    """Whether the branch ends in a normalisation, up to LayerScale, gates, dropout and rearrangement."""
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
