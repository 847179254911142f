"""What a residual is: the kind of its branch and where the normalisation stands."""

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

# By what they do: a model's name, such as TinyMoeAttention, says nothing of its modules.
_EXPERTS = re.compile(r"expert|router|sparse_?(moe|mlp)|moe_?(block|layer|mlp|ffn)?$", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_LINEAR_ATTENTION = re.compile(r"attention|attn|delta", re.IGNORECASE)
_FEED_FORWARD = re.compile(r"mlp|ffn|feed_?forward", re.IGNORECASE)


def kind_of(graph: Graph, path: list[Node]) -> Kind:
    """What the branch is made of, by its operators; names decide only where the operators leave two readings."""
    cores = [node for node in path if _is_attention_core(graph, path, node)]
    decays = [node for node in path if _decays_state(graph, node)]
    # Linear attention may decay in the same way: there the names of the innermost modules decide.
    named = [any(_LINEAR_ATTENTION.search(type(owner).__name__) for owner in n.owners[:1]) for n in decays]
    if not all(named) and not any(_ops.is_softmax(n.op) or _ops.is_attention(n.op) for n in path):
        return "ssm"
    if cores:
        return "parallel" if _has_mlp_beside(graph, path, cores) else "attention"
    if decays:
        return "attention"
    if any(isinstance(owner, nn.RNNBase) for node in path for owner in node.owners[:1]):
        return "other"  # recurrent
    if any(node.op == "_fft_c2r" for node in path):  # there and back: a convolution by its spectrum
        return "conv"
    spatial = [node for node in path if _ops.is_convolution(node.op) and _is_spatial(graph, node)]
    if spatial and not all(any(_FEED_FORWARD.search(type(m).__name__) for m in node.owners) for node in spatial):
        return "conv"
    weights = [node for node in path if _ops.is_matmul(node.op) and not is_product(graph.nodes, node)]
    return "mlp" if weights else "other"


def is_cross(graph: Graph, root: int, path: list[Node]) -> bool:
    """Whether the values of all attention in a branch come from elsewhere than the stream."""
    values = [_values(graph, node) for node in path if _is_attention_core(graph, path, node)]
    known = [index for index in values if index is not None]
    return bool(known) and not any(root in graph.nodes[index] for index in known)


def _values(graph: Graph, core: Node) -> int | None:
    """What an attention weighs: the third operand of a kernel, or what a softmax is multiplied with."""
    if _ops.is_attention(core.op):
        return core.parents[2] if len(core.parents) > 2 else None
    weighed = [p for p in core.parents[-2:] if _softmax_at(graph, p) is None]
    return weighed[0] if len(weighed) == 1 and len(core.parents) > 1 else None


def _is_attention_core(graph: Graph, path: list[Node], node: Node) -> bool:
    """A fused attention kernel, or a product of activations that a softmax weighs (or, in linear attention, another
    product); or values sampled at learned places and weighed by a softmax, as in deformable attention. Over one token
    an einsum is written as a plain product.
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
    """A product with a weight, by the name of its module: of keys and values that are learned, or of an activation."""
    return _ops.is_matmul(node.op) and bool(_ATTENTION.search(type(node.owners[0]).__name__ if node.owners else ""))


def _is_by_token(path: list[Node], node: Node) -> bool:
    """A product for every token apart, as a router's weights with the outputs of its experts: no tokens are mixed."""
    tokens = prod(path[-1].shape[:-1])
    return len(node.shape) == 3 and node.shape[0] == tokens and 1 in node.shape[1:]


def _softmax_at(graph: Graph, index: int) -> int | None:
    """The softmax that a tensor is, rearrangement, dropout and casts aside."""
    node = graph.nodes[index]
    while node.parents and not _ops.is_softmax(node.op):
        if node.op not in _ops.IDENTITY | _ops.PART | {"native_dropout"}:
            return None
        node = graph.nodes[node.parents[0]]
    return node.index if _ops.is_softmax(node.op) else None


def _is_scored(graph: Graph, softmax: int) -> bool:
    """Whether a softmax is taken of products of queries and keys, and not of what one weight says, as a router's is."""
    return any(is_product(graph.nodes, node) for node in _back(graph, softmax, _ops.IDENTITY | _ops.PART | _SCORES))


def _decays_state(graph: Graph, node: Node) -> bool:
    """A scan kernel, or a decay by which a state is carried on: exp(dt A) with A = -exp(a weight), dt from the input or
    not (S4, Mamba), or A = -softplus(a weight) (RG-LRU); or exp(state + A) (RWKV).
    """
    if _ops.is_scan(node.op):
        return True
    if node.op == "mul":
        return any(_exp_of_exp(graph, parent) for parent in node.parents)
    if node.op != "exp":
        return False
    terms = _back(graph, node.index, _ops.IDENTITY | _ops.PART | _DECAYS)
    return any(_exp_of_weight(graph, p) for each in terms if each.op in ("mul", "add") for p in each.parents)


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
    """A node and what it was computed from, back through some operators; the nodes that end the way included."""
    frontier, seen = [index], {index}
    while frontier:
        node = graph.nodes[frontier.pop()]
        yield node
        if node.op in through:
            fresh = [parent for parent in node.parents if parent not in seen]
            seen.update(fresh)
            frontier += fresh


def _in_experts(node: Node) -> bool:
    """Whether a product gathers what experts made, by the names of the two innermost modules."""
    names = [type(owner).__name__ for owner in node.owners[:2]]
    return not _ATTENTION.search(names[0] if names else "") and any(_EXPERTS.search(name) for name in names)


def _multiplies(graph: Graph, path: list[Node], node: Node) -> bool:
    """A product of two tensors of the branch, also where these are made from learned queries and not from the input."""
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
        on_the_way = [n for n in path if node.index in n and n.index in joined and n is not joined]
        if joined.op in {"add", "stack", "sum"} and any(_has_weight(graph, n) for n in on_the_way):
            return True
    return False


def _has_weight(graph: Graph, node: Node) -> bool:
    """A product with a weight: a state that starts at zero is none."""
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
    """Where the normalisation stands relative to the addition.

    A norm after the sum is post-norm inside the module that adds (None for one line that adds in every turn of a loop,
    whose module may end in a final norm), or where its result is a stream: `roots` are those of all sites, sorted.
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
    if _streams_on(graph, readers, finding, roots):
        return "post"
    return "inner" if any(in_norm(node) for node in path) else "none"


def _streams_on(graph: Graph, readers: list[list[int]], finding: Finding, roots: list[int]) -> bool:
    """Whether nothing but norms reads the sum, and a norm of it is the stream of a later site; or, for the last site,
    all streams before it but the first are norms.
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
    """Whether all that reads a tensor, within `allowed` where given, is a normalisation; with `every`, nothing else may
    read it.
    """
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
