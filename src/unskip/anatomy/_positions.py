"""Position embeddings: weights with a row for each token, added to the tokens before the first block.

They are added as they are, or looked up at 0, 1, 2, ... from any start. Word embeddings are looked up at the input, and
token types at one index for all tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskip.anatomy import _ops
from unskip.anatomy._graph import Graph
from unskip.anatomy._model_trace import ModelTrace

_LOOKUPS = frozenset({"embedding", "index", "index_select"})
_SUMS = _ops.IDENTITY | _ops.PART | _ops.ADD | _ops.SCALE


def find_positions(trace: ModelTrace) -> dict[int, int]:
    """By the node of each weight that may hold position embeddings, the node of the tokens to which it is added."""
    graph, nodes = trace.graph, trace.graph.nodes
    first = min((run.root for runs in trace.runs for run in runs[:1]), default=0)
    found: dict[int, int] = {}
    for node in nodes[: first + 1]:
        if node.op not in _ops.ADD or len(node.parents) != 2 or node.index not in nodes[first]:
            continue
        for code, tokens in (node.parents, node.parents[::-1]):
            shape = nodes[tokens].shape
            if len(shape) < 3 or nodes[code].shape[-2:] != shape[-2:] or _tables(graph, tokens) is not None:
                continue
            for table in _tables(graph, code) or ():
                found.setdefault(table, tokens)
    return found


def _tables(graph: Graph, index: int) -> list[int] | None:
    """The weights with a row for each token in a sum of such weights and of vectors that all tokens share; None if the
    tensor has content of the input.
    """
    dim = graph.nodes[index].shape[-1]
    found: list[int] = []
    frontier, seen = [index], {index}
    while frontier:
        node = graph.nodes[frontier.pop()]
        parents = node.parents
        if node.op in _LOOKUPS and node.step is not None and len(node.step.refs) == 2:
            table, indices = node.step.refs
            if _is_input(graph, indices):
                return None
            if _are_positions(graph.values[indices]):
                parents = (table,)
            elif node.fixed or _are_equal(graph.values[indices]):
                parents = ()
            else:
                return None
        elif not node.fixed and node.op not in _SUMS:
            return None
        elif math.prod(node.shape) <= dim or _ops.is_matmul(node.op):  # one row for all; computed from coordinates
            parents = ()
        elif node.op == "weight" and node.shape[-1] == dim and math.prod(node.shape) == math.prod(node.shape[-2:]):
            found.append(node.index)
        frontier += [parent for parent in parents if parent not in seen]
        seen.update(parents)
    return found


def _is_input(graph: Graph, index: int) -> bool:
    """Whether indices are the input itself, not computed by the model."""
    node = graph.nodes[index]
    while node.op in _ops.IDENTITY | _ops.PART and node.step is not None and node.step.refs:  # integers have no parents
        node = graph.nodes[node.step.refs[-1 if node.op == "copy" else 0]]
    return node.op == "input"


def _are_positions(indices: Tensor) -> bool:
    """Whether indices (..., tokens) count the tokens from any start; padding may have a lower index of its own."""
    rows = indices.reshape(-1, indices.shape[-1])
    for kept in (torch.ones_like(rows, dtype=torch.bool), rows > rows.min()):
        steps = torch.cat([row[keep].diff() for row, keep in zip(rows, kept, strict=True)])
        if len(steps) and bool((steps == 1).all()):
            return True
    return False


def _are_equal(indices: Tensor) -> bool:
    """Whether all tokens of a sample have one index."""
    return bool((indices == indices[..., :1]).all())
