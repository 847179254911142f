"""Finds the residual additions in a recorded graph.

An addition `l + r` of equal shapes is a residual when one operand, the stream, comes unchanged from a tensor that the
other operand, the branch, was computed from by way of a matrix product, convolution, attention or pooling:

    identity    s = x                  f = f(x)        x + f(x)
    projected   s = P x                f = f(x)        P one linear map at most: a ResNet downsample, a pool, a slice
    more        s = x + f(x)           g = g(x)        a further branch of the same site: x + attention + mlp

What only looks like one is told apart: a position embedding has no ancestor in common, a bias or mask is added to
attention logits, the sum of two branches has no stream, and a polynomial such as x + c x^3 has no transformation in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Literal

from torch import nn

from unskip.anatomy import _ops
from unskip.anatomy._graph import Graph, Node
from unskip.anatomy._walk import between, channel_axis, climb, consumers, in_norm, is_product, written

Role = Literal["mix", "more"]


@dataclass(eq=False)
class Finding:
    """One execution of one residual addition."""

    add: Node
    stream: int
    branch: int
    side: Literal["left", "right"]  # where the stream stands in the source
    root: int  # the tensor that stream and branch both come from
    path: list[Node]  # what was computed between the root and the branch
    projected: bool = False
    role: Role = "mix"
    first: Finding | None = None  # of a further branch: the finding it continues
    spans: list[Finding] = field(default_factory=list)  # residuals inside the branch
    long: bool = False
    overwritten: bool = False  # the model writes into the sum later
    doubled: bool = False  # the branch ends on the stream it is added to: x + (x + f(x))
    scaled: bool = False  # a weight of the model scales the stream
    copies: bool = False  # the branch is a gated or shifted copy of the stream itself


@dataclass(eq=False)
class Doubt:
    """Something that may be a residual and cannot be told or touched."""

    node: Node
    reason: str


def find(graph: Graph) -> tuple[list[Finding], list[Doubt]]:
    """Every execution of a residual addition, in order, and what could not be decided."""
    search = _Search(graph)
    for node in graph.nodes:
        # What a recurrent layer adds to its state is its own affair.
        if node.calls and len(node.parents) > 1 and not isinstance(next(iter(node.owners), None), nn.RNNBase):
            search.look(node)
    overwritten = written(graph)
    for finding in search.found:
        finding.overwritten = finding.add.index in overwritten
    return search.found, search.doubts


_FUSED = {
    "sub": "a residual with a minus sign: write x + (-f(x)) for one that can be weighed",
    "add": "a residual with a factor of its own (torch.add with alpha)",
}


class _Search:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = graph.nodes
        self.consumers = consumers(graph)
        self.logits = self._logits()
        self.found: list[Finding] = []
        self.doubts: list[Doubt] = []
        self.output_of: dict[int, Finding] = {}

    def look(self, node: Node) -> None:
        left, right = node.parents[0], node.parents[1]
        if node.op in _ops.STACK:
            self._stacked(node)
            return
        same = self.nodes[left].shape == self.nodes[right].shape == node.shape and len(node.shape) > 0
        if node.op in _ops.ADD and node.plain:
            if node.floating and node.index not in self.logits:
                if same:
                    self._add(node, left, right)
                else:
                    self._broadcast(node, left, right)
        elif node.floating and node.index not in self.logits:
            self._fused(node)

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
            self._gated(node, left, right)
            self._several(node, left, right)
            return
        on_path = {n.index for n in finding.path}
        self._drop_decorations(finding, on_path)
        finding.spans = [f for f in self.found if f.role == "mix" and f.add.index in on_path]
        self._drop_inner_scales(finding)
        if self._is_side_input(finding):
            self.doubts.append(
                Doubt(node, "a side input that is added again at another depth, not the stream of a branch")
            )
            return
        finding.doubled = self._carries(finding.branch, finding.root)
        finding.long = finding.doubled or self._is_long(finding)
        self.found.append(finding)
        self.output_of[node.index] = finding

    def _drop_decorations(self, finding: Finding, on_path: set[int]) -> None:
        """x + f(x + p), where x is a part of a larger tensor that p was computed from: p only decorates the input of f,
        as the position of a query does, and x + p is no residual. The stream goes on without it.
        """

        inside = [inner for inner in self.found if inner.projected and inner.add.index in on_path]
        for inner in inside:
            if (finding.root, False) in climb(self.nodes, inner.stream):
                self.found = [each for each in self.found if each is not inner and each.first is not inner]
                del self.output_of[inner.add.index]

    def _drop_inner_scales(self, outer: Finding) -> None:
        """Inside a branch, x * w + f(x) with a weight w is part of the branch, as the D x of a state-space model."""
        for inner in [f for f in outer.spans if f.scaled and not f.doubled]:
            outer.spans.remove(inner)
            self.found = [f for f in self.found if f is not inner and f.first is not inner]
            self.output_of = {index: f for index, f in self.output_of.items() if f in self.found}
            self.doubts.append(Doubt(inner.add, "a skip with a learnt scale inside the branch of another"))

    def _identity(self, node: Node, s: int, f: int, side: Literal["left", "right"]) -> Finding | None:
        # A scale that the model learns on its stream leaves it the stream.
        for root, narrowed in climb(self.nodes, s, scaled_by_weights=True):
            if root not in self.nodes[f]:
                continue
            path = between(self.nodes, root, f)
            if not any(_ops.is_transform(n.op) for n in path):
                continue
            if narrowed:
                return None
            if self.nodes[root].fixed and not self._ends_in_transform(f):
                return None  # a weight added again, such as a position embedding at every layer
            scaled = root not in (i for i, _ in climb(self.nodes, s))
            return Finding(node, s, f, side, root, path, scaled=scaled, copies=self._is_copy(s, f))
        return None

    def _is_copy(self, s: int, f: int) -> bool:
        """Whether a branch is the stream again, times gates: `x[:, 1:] + g * x[:, :-1]`, as smeared tokens are."""
        *_, (source, _) = climb(self.nodes, s)
        *_, (product, _) = climb(self.nodes, f)
        return product != source and self._gates(product, source)

    def _gates(self, index: int, source: int) -> bool:
        """Whether a tensor is another one times gates, or that tensor itself."""
        *_, (last, _) = climb(self.nodes, index)
        return last == source or (
            self._is_gating(last) and any(self._gates(parent, source) for parent in self.nodes[last].parents)
        )

    def _is_gating(self, index: int) -> bool:
        return self.nodes[index].op == "mul" and len(self.nodes[index].parents) == 2

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
        if self._is_other_part(root, shortcut, path):
            return None
        if any(self._bends(n) for n in shortcut) or not any(self._bends(n) for n in path):
            return None
        if self._depth(shortcut) > 1 or self._depth(path) < 2:
            return None
        return Finding(node, s, f, side, root, path, projected=True)

    def _is_other_part(self, root: int, shortcut: list[Node], path: list[Node]) -> bool:
        """Whether the stream is one part of the root and the branch was computed from other parts of it alone."""
        if not shortcut or shortcut[0].op not in _ops.PART:
            return False
        readers = [node for node in path if root in node.parents]
        return all(node.op in _ops.PART and node is not shortcut[0] for node in readers)

    def _bends(self, node: Node) -> bool:
        """Not an affine map of its input: an activation, attention, or a product of two activations."""
        if node.op in _ops.ACTIVATION or _ops.is_softmax(node.op) or _ops.is_attention(node.op):
            return not in_norm(node)
        return is_product(self.nodes, node)

    def _depth(self, path: list[Node]) -> int:
        """The longest chain of weight products on the path."""
        depth: dict[int, int] = {}
        for node in path:
            below = max((depth.get(parent, 0) for parent in node.parents), default=0)
            depth[node.index] = below + (_ops.is_matmul(node.op) and not is_product(self.nodes, node))
        return depth[path[-1].index] if path else 0

    def _ends_in_transform(self, index: int) -> bool:
        """Whether the last thing that happened is a product, not a sum or norm: a branch's output, not a stream."""
        *_, (last, _) = climb(self.nodes, index, scaled_by_weights=True)
        return _ops.is_transform(self.nodes[last].op)

    def _logits(self) -> set[int]:
        """What is handed to a softmax whose result weighs values: attention logits, where a mask or bias is added."""
        through = (
            _ops.IDENTITY | _ops.PART | _ops.SCALE | {"add", "sub", "tanh", "masked_fill", "where", "maximum", "amax"}
        )
        weighing = [
            node.index
            for node in self.nodes
            if _ops.is_softmax(node.op) and any(is_product(self.nodes, self.nodes[i]) for i in self._reach(node.index))
        ]
        frontier = [parent for index in weighing for parent in self.nodes[index].parents]
        found = set(frontier)
        while frontier:
            node = self.nodes[frontier.pop()]
            if node.op in through:
                fresh = [parent for parent in node.parents if parent not in found]
                found.update(fresh)
                frontier += fresh
        return found

    def _reach(self, index: int) -> set[int]:
        """The consumers of a tensor through rearrangements and dropout."""
        reached: set[int] = set()
        frontier = [index]
        while frontier:
            for consumer in self.consumers[frontier.pop()]:
                if consumer not in reached:
                    reached.add(consumer)
                    if self.nodes[consumer].op in _ops.IDENTITY | {"native_dropout", "mul", "masked_fill", "where"}:
                        frontier.append(consumer)
        return reached

    def _broadcast(self, node: Node, left: int, right: int) -> None:
        """x + f(x) with a branch of fewer elements, which is added to many positions at once: reported, not weighed."""
        for s, f in ((left, right), (right, left)):
            if self.nodes[s].shape != node.shape:
                continue
            for root, _ in climb(self.nodes, s, scaled_by_weights=True):
                path = between(self.nodes, root, f) if root in self.nodes[f] and not self.nodes[root].fixed else []
                if any(_ops.is_transform(n.op) for n in path):
                    self.doubts.append(Doubt(node, "a residual whose branch broadcasts over the stream"))
                    return

    def _gated(self, node: Node, left: int, right: int) -> None:
        """(1 - t) * x + t * f(x): the stream is weighed by the data, as in a highway network or a GRU."""
        gates = {side: self._factors(side) for side in (left, right)}
        if not any(self._complements(a, b) for a in gates[left] for b in gates[right]):
            return
        for s, f in ((left, right), (right, left)):
            for factor in gates[s]:
                for root, _ in climb(self.nodes, factor):
                    path = between(self.nodes, root, f) if root in self.nodes[f] else []
                    if any(_ops.is_transform(n.op) for n in path):
                        self.doubts.append(Doubt(node, "the stream is weighed by the data (a gate), not by a number"))
                        return

    def _several(self, node: Node, left: int, right: int) -> None:
        """One part of a tensor as the stream, and a branch that was computed from another part of it: several streams,
        as in hyper-connections and reversible networks.
        """
        for s, f in ((left, right), (right, left)):
            common = self.nodes[s].ancestors & self.nodes[f].ancestors & self.graph.moving
            root = common.bit_length() - 1
            if not common or root in (s, f):
                continue
            shortcut, path = between(self.nodes, root, s), between(self.nodes, root, f)
            if not self._is_other_part(root, shortcut, path) or any(self._bends(n) for n in shortcut):
                continue
            if any(self._bends(n) for n in path) and self._depth(path) > max(1, self._depth(shortcut)):
                self.doubts.append(
                    Doubt(node, "several streams: the branch reads another part of them than it is added to")
                )
                return

    def _stacked(self, node: Node) -> None:
        """A stream and what was computed from it, stacked and summed, or mixed by weights that depend on the input."""
        if len({self.nodes[parent].shape for parent in node.parents}) > 1 or not self._is_summed(node):
            return
        sources = list(dict.fromkeys(list(climb(self.nodes, parent))[-1][0] for parent in node.parents))
        pairs = ((s, f) for s in sources for f in sources if s != f and s in self.nodes[f] and not self.nodes[s].fixed)
        if any(_ops.is_transform(n.op) for s, f in pairs for n in between(self.nodes, s, f)):
            self.doubts.append(Doubt(node, "a stream and its branch are stacked, and the stack is summed"))

    def _is_summed(self, stack: Node) -> bool:
        """Whether a stack is reduced, multiplied with another tensor that depends on the input, or, where it has an
        axis of its own, with a weight that leaves one of its tensors.
        """
        one = prod(self.nodes[stack.parents[0]].shape)
        readers = [self.nodes[reader] for reader in self._reach(stack.index)]
        sums = [node for node in readers if node.op in ("sum", "mean") or is_product(self.nodes, node)]
        mixed = [node for node in readers if stack.op == "stack" and _ops.is_matmul(node.op)]
        # One such tensor is left, or several mixtures.
        return any(prod(node.shape) % one == 0 for node in sums) or any(prod(node.shape) == one for node in mixed)

    def _factors(self, index: int) -> tuple[int, ...]:
        """The operands of a product of two tensors that depend on the input."""
        *_, (last, _) = climb(self.nodes, index)
        factors = self.nodes[last].parents[:2] if self.nodes[last].op == "mul" else ()
        return factors if len(factors) == 2 and not any(self.nodes[p].fixed for p in factors) else ()

    def _complements(self, a: int, b: int) -> bool:
        """Whether one is 1 minus the other."""
        return any(self.nodes[x].op in ("rsub", "sub") and y in self.nodes[x].parents for x, y in ((a, b), (b, a)))

    def _is_side_input(self, finding: Finding) -> bool:
        """The root enters some residual inside the path by its branch alone: it was handed in beside that stream."""
        return any(finding.root not in self.nodes[inner.root] and finding.root != inner.root for inner in finding.spans)

    def _is_long(self, finding: Finding) -> bool:
        """Reaches over several residuals, or over one at another resolution, as in a U-Net.

        One residual inside the branch at the same resolution is a nested residual, not a long skip, unless the branch
        is that residual's own stream: x + (x + f(x)).
        """
        return len(finding.spans) > 1 or any(self._resolution_changes(finding, inner) for inner in finding.spans)

    def _resolution_changes(self, outer: Finding, inner: Finding) -> bool:
        here, there = outer.add.shape, inner.add.shape
        if len(here) != len(there):  # heads split off, or windows: the same elements in another order
            return prod(here) != prod(there)
        axis = channel_axis(self.nodes, outer.path, here) % len(here)
        return any(a != b for i, (a, b) in enumerate(zip(here, there, strict=True)) if i not in (0, axis))

    def _carries(self, index: int, root: int) -> bool:
        """Whether a tensor is the root with branches added to it."""
        for start, _ in climb(self.nodes, index, scaled_by_weights=True):
            if start == root:
                return True
            if start in self.output_of:
                return self._carries(self.output_of[start].stream, root)
        last = self.nodes[start]  # a sum of the root with itself, as a first a * x + b * x0 is
        return last.op in _ops.ADD and len(last.parents) == 2 and all(self._carries(p, root) for p in last.parents)

    def _fused(self, node: Node) -> None:
        """A residual inside a larger operator (addcmul, lerp, baddbmm, ...), or with a sign or factor of its own."""
        s, *rest = node.parents
        if self.nodes[s].shape != node.shape:
            return
        for root, _ in climb(self.nodes, s):
            for f in rest:
                if self.nodes[root].fixed or root not in self.nodes[f]:
                    continue
                if _ops.is_matmul(node.op) or any(_ops.is_transform(n.op) for n in between(self.nodes, root, f)):
                    self.doubts.append(Doubt(node, _FUSED.get(node.op, f"a residual fused into torch.{node.op}")))
                    return
        if node.op == "sub":
            self._subtracted(node, s, rest[0])

    def _subtracted(self, node: Node, f: int, s: int) -> None:
        """f(x) - x, where f is more than a pooling, which is a mixer of tokens with its mean taken off."""
        for root, _ in climb(self.nodes, s, scaled_by_weights=True):
            path = between(self.nodes, root, f) if root in self.nodes[f] and not self.nodes[root].fixed else []
            if self.nodes[s].shape == node.shape and any(_ops.is_matmul(n.op) for n in path):
                self.doubts.append(Doubt(node, "the stream is subtracted: f(x) - x, with a minus sign"))
                return
