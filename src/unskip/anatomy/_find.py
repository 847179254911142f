"""Finds the residual additions in a recorded graph.

An addition `l + r` of equal shapes is a residual when one operand, the stream, comes unchanged from a tensor that the
other operand, the branch, was computed from by way of a matrix product, convolution, attention or pooling:

    identity    s = x                  f = f(x)        x + f(x)
    projected   s = P x                f = f(x)        P one linear map at most: a ResNet downsample, a pool, a slice
    more        s = x + f(x)           g = g(x)        a further branch of the same site: x + attention + mlp

Additions that only look like residuals are rejected: a position embedding shares no ancestor with the stream, a bias or
mask is added to attention logits, the sum of two branches has no stream, and x + c x^3 contains no transform.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Literal

from torch import nn

from unskip.anatomy import _doubts, _ops
from unskip.anatomy._graph import Graph, Node
from unskip.anatomy._walk import (
    bends,
    between,
    channel_axis,
    climb,
    consumers,
    is_other_part,
    is_product,
    reach,
    weight_depth,
    written,
)

Role = Literal["mix", "more"]


@dataclass(eq=False)
class Finding:
    """One execution of one residual addition."""

    add: Node
    stream: int
    branch: int
    side: Literal["left", "right"]  # operand that is the stream
    root: int  # the tensor that both stream and branch are computed from
    path: list[Node]  # nodes from the root to the branch
    projected: bool = False
    role: Role = "mix"
    first: Finding | None = None  # for role "more": the first branch of the same site
    spans: list[Finding] = field(default_factory=list)  # residuals inside the branch, without copies of the stream
    long: bool = False
    overwritten: bool = False  # the model writes into the sum in place later
    doubled: bool = False  # the branch already contains the stream: x + (x + f(x))
    scaled: bool = False  # a weight of the model scales the stream
    copies: bool = False  # the branch is a gated or shifted copy of the stream itself


@dataclass(eq=False)
class Doubt:
    """An addition that may be a residual but cannot be classified or rewired."""

    node: Node
    reason: str
    root: int | None = None  # the stream; the doubt is dropped if both lie inside the branch of a residual


def find(graph: Graph) -> tuple[list[Finding], list[Doubt]]:
    """All executions of residual additions, in order, and the additions that could not be classified."""
    search = _Search(graph)
    for node in graph.nodes:
        # Additions inside a recurrent layer update its state and are not residuals.
        if node.calls and len(node.parents) > 1 and not isinstance(next(iter(node.owners), None), nn.RNNBase):
            search.visit(node)
    overwritten = written(graph)
    for finding in search.found:
        finding.overwritten = finding.add.index in overwritten
    return search.found, search.doubts


class _Search:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = graph.nodes
        self.consumers = consumers(graph)
        self.logits = self._logits()
        self.found: list[Finding] = []
        self.doubts: list[Doubt] = []
        self.output_of: dict[int, Finding] = {}

    def visit(self, node: Node) -> None:
        left, right = node.parents[0], node.parents[1]
        if node.op in _ops.STACK:
            self._doubt(node, _doubts.stacked(self.nodes, self.consumers, node))
            return
        if not node.floating or node.index in self.logits:
            return
        if node.op not in _ops.ADD or not node.plain:
            self._doubt(node, _doubts.fused(self.nodes, node))
        elif self.nodes[left].shape == self.nodes[right].shape == node.shape and node.shape:
            self._add(node, left, right)
        else:
            self._doubt(node, _doubts.broadcast(self.nodes, node))

    def _doubt(self, node: Node, reason: str | None) -> None:
        if reason is not None:
            self.doubts.append(Doubt(node, reason))

    def _add(self, node: Node, left: int, right: int) -> None:
        finding = (
            self._identity(node, left, right, "left")
            or self._identity(node, right, left, "right")
            or self._more(node, left, right, "left")
            or self._more(node, right, left, "right")
            or self._projected(node, left, right, "left")
            or self._projected(node, right, left, "right")
        )
        if finding is None:
            self._undecided(node)
            return
        on_path = {n.index for n in finding.path}
        self.doubts = [d for d in self.doubts if not {d.root, d.node.index} <= on_path]
        self._drop_decorations(finding, on_path)
        finding.spans = [f for f in self.found if f.role == "mix" and f.add.index in on_path and not f.copies]
        self._drop_inner(finding)
        if self._is_side_input(finding):
            self._doubt(node, "a side input that is added again at another depth, not the stream of a branch")
            return
        finding.doubled = self._carries(finding.branch, finding.root)
        finding.long = finding.doubled or self._is_long(finding)
        self.found.append(finding)
        self.output_of[node.index] = finding

    def _undecided(self, node: Node) -> None:
        reason = _doubts.several(self.graph, node)
        root = None if reason else _doubts.gated(self.nodes, node, self.output_of)
        if reason or root is not None:
            self.doubts.append(Doubt(node, reason or _doubts.GATED, root))

    def _drop_decorations(self, finding: Finding, on_path: set[int]) -> None:
        """Drops x + p in x + f(x + p), where x and p come from one larger tensor: p is only added to the input of f, as
        a query position is, and not to the stream.
        """
        inside = [inner for inner in self.found if inner.projected and inner.add.index in on_path]
        for inner in inside:
            if (finding.root, False) in climb(self.nodes, inner.stream):
                self._remove(inner)

    def _drop_inner(self, outer: Finding) -> None:
        """Drops residuals that are part of the outer branch: x * w + f(x) with a weight w, such as D x in a state-space
        model, and recurrent states S + k (v - k S), as in a delta rule.
        """
        scaled = [f for f in outer.spans if f.scaled and not f.doubled]
        states = [f for f in outer.spans if f not in scaled and self._is_state(f)]
        for inner in [*scaled, *states]:
            outer.spans.remove(inner)
            self._remove(inner)
        for inner in scaled:
            self._doubt(inner.add, "a skip with a learned scale inside the branch of another")

    def _remove(self, finding: Finding) -> None:
        """Removes a finding and the further branches of its site."""
        self.found = [f for f in self.found if f is not finding and f.first is not finding]
        self.output_of = {index: f for index, f in self.output_of.items() if f in self.found}

    def _is_state(self, finding: Finding) -> bool:
        """Whether the branch has no weights and is linear in the stream."""
        transforms = [node for node in finding.path if _ops.is_transform(node.op)]
        return all(
            is_product(self.nodes, node) and sum(finding.root in self.nodes[p] for p in node.parents[-2:]) == 1
            for node in transforms
        )

    def _identity(self, node: Node, s: int, f: int, side: Literal["left", "right"]) -> Finding | None:
        # A stream with a learned scale is still the stream.
        for root, narrowed in climb(self.nodes, s, scaled_by_weights=True):
            if root not in self.nodes[f]:
                continue
            path = between(self.nodes, root, f)
            if not any(_ops.is_transform(n.op) for n in path):
                continue
            if narrowed:
                return None
            if self.nodes[root].fixed and not self._ends_in_transform(f):
                return None  # a weight added repeatedly, such as a position embedding at every layer
            scaled = root not in (i for i, _ in climb(self.nodes, s))
            return Finding(node, s, f, side, root, path, scaled=scaled, copies=self._is_copy(s, f))
        return None

    def _is_copy(self, s: int, f: int) -> bool:
        """Whether a branch is a gated or shifted copy of the stream: `x[:, 1:] + g * x[:, :-1]` (token smearing), or
        `x + (shifted - x) * g`.
        """
        source, product = self._source(s), self._source(f)
        return product != source and self._gates(product, source)

    def _gates(self, index: int, source: int) -> bool:
        """Whether a tensor is the source, a difference of copies of it, or a gate times one of these."""
        last = self._source(index)
        node = self.nodes[last]
        if last == source or node.op not in ("mul", "sub") or len(node.parents) != 2:
            return last == source
        copies = (self._gates(parent, source) for parent in node.parents)
        return any(copies) if node.op == "mul" else all(copies)

    def _source(self, index: int) -> int:
        """The tensor that this one copies, directly or by a write into a new tensor."""
        *_, (last, _) = climb(self.nodes, index)
        node = self.nodes[last]
        fresh = node.op == "overwrite" and self.nodes[node.parents[0]].fixed
        return self._source(node.parents[1]) if fresh else last

    def _more(self, node: Node, s: int, f: int, side: Literal["left", "right"]) -> Finding | None:
        for index, _ in climb(self.nodes, s):
            first = self.output_of.get(index)
            if first is None or first.root not in self.nodes[f] or index in self.nodes[f]:
                continue
            if first.add.owners[:1] != node.owners[:1]:
                continue
            path = between(self.nodes, first.root, f)
            if any(_ops.is_transform(n.op) for n in path):
                return Finding(node, s, f, side, first.root, path, first.projected, "more", first.first or first)
        return None

    def _projected(self, node: Node, s: int, f: int, side: Literal["left", "right"]) -> Finding | None:
        common = self.nodes[s].ancestors & self.nodes[f].ancestors & self.graph.moving
        if not common:
            return None
        root = common.bit_length() - 1
        if root in (s, f):
            return None
        shortcut, path = between(self.nodes, root, s), between(self.nodes, root, f)
        if is_other_part(root, shortcut, path):
            return None
        if any(bends(self.nodes, n) for n in shortcut) or not any(bends(self.nodes, n) for n in path):
            return None
        if weight_depth(self.nodes, shortcut) > 1 or weight_depth(self.nodes, path) < 2:
            return None
        return Finding(node, s, f, side, root, path, projected=True)

    def _ends_in_transform(self, index: int) -> bool:
        """Whether a tensor is the output of a transform (a branch), not of a sum or norm (a stream)."""
        *_, (last, _) = climb(self.nodes, index, scaled_by_weights=True)
        return _ops.is_transform(self.nodes[last].op)

    def _logits(self) -> set[int]:
        """Nodes that feed the softmax of an attention: additions there are masks and biases."""
        through = (
            _ops.IDENTITY | _ops.PART | _ops.SCALE | {"add", "sub", "tanh", "masked_fill", "where", "maximum", "amax"}
        )
        softmaxes = [node for node in self.nodes if _ops.is_softmax(node.op)]
        weighing = [
            softmax
            for softmax in softmaxes
            if any(is_product(self.nodes, self.nodes[i]) for i in reach(self.nodes, self.consumers, softmax.index))
        ]
        frontier = [parent for softmax in weighing for parent in softmax.parents]
        found = set(frontier)
        while frontier:
            node = self.nodes[frontier.pop()]
            if node.op in through:
                fresh = [parent for parent in node.parents if parent not in found]
                found.update(fresh)
                frontier += fresh
        return found

    def _is_side_input(self, finding: Finding) -> bool:
        """Whether an inner residual's stream does not come from the root: the root enters only through its branch."""
        return any(finding.root not in self.nodes[inner.root] and finding.root != inner.root for inner in finding.spans)

    def _is_long(self, finding: Finding) -> bool:
        """Whether the branch spans several residuals, or one at another resolution, as in a U-Net.

        One residual at the same resolution is a nested residual, not a long skip.
        """
        return len(finding.spans) > 1 or any(self._resolution_changes(finding, inner) for inner in finding.spans)

    def _resolution_changes(self, outer: Finding, inner: Finding) -> bool:
        here, there = outer.add.shape, inner.add.shape
        if len(here) != len(there):  # split into heads or windows: the same elements in another order
            return prod(here) != prod(there)
        axis = channel_axis(self.nodes, outer.path, here) % len(here)
        return any(a != b for i, (a, b) in enumerate(zip(here, there, strict=True)) if i not in (0, axis))

    def _carries(self, index: int, root: int) -> bool:
        """Whether a tensor is the root plus branches."""
        for start, _ in climb(self.nodes, index, scaled_by_weights=True):
            if start == root:
                return True
            if start in self.output_of:
                return self._carries(self.output_of[start].stream, root)
        last = self.nodes[start]  # a sum of the root with itself, as a first a * x + b * x0 is
        return last.op in _ops.ADD and len(last.parents) == 2 and all(self._carries(p, root) for p in last.parents)
