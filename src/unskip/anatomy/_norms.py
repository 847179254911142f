"""Normalisations in a recorded graph: their nodes, their kind, and the input directions that they are invariant to.

    LayerNorm(s x + c) = LayerNorm(x)        RMSNorm(s x) = RMSNorm(x)        one s > 0 and one c per token

The kind is found by replaying the norm on such inputs, not from its name: T5's LayerNorm is an RMSNorm. The invariance
removes two directions per token for LayerNorm and one for RMSNorm, which bounds the rank of any Jacobian through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from unskip.anatomy._graph import Graph, Node
from unskip.anatomy._replay import ReplayError, path, replay
from unskip.anatomy._walk import in_norm, norm_module

NormKind = Literal["layernorm", "rmsnorm", "other"]  # kind of normalisation
Edge = tuple[int, int]  # (node, node that reads it)


@dataclass(frozen=True, eq=False)
class NormRun:
    """One run of one normalisation."""

    source: int  # the node it reads
    result: int
    module: nn.Module | None  # the module that runs it
    kind: NormKind
    forgets: int  # number of input directions that it is invariant to
    eps: float | None
    offset: float  # the effective gain is offset + the stored one


def norm_at(graph: Graph, readers: Sequence[Sequence[int]], node: Node) -> NormRun | None:
    """The normalisation that a node is part of, or None if it does not have one input and one output."""
    group = _group(graph, readers, node)
    sources = {p for i in group for p in graph.nodes[i].parents if p not in group and not graph.nodes[p].fixed}
    results = [i for i in group if any(reader not in group for reader in readers[i])]
    results = results or [i for i in group if not readers[i] and not _is_statistic(graph.nodes[i])]
    if len(sources) != 1 or len(results) != 1:
        return None
    source, result = sources.pop(), results[0]
    module = norm_module(node)
    kind, axis = _kind(graph, source, result, module)
    per_token = {"layernorm": 2, "rmsnorm": 1, "other": 0}[kind]
    forgets = per_token * (prod(graph.nodes[source].shape) // graph.nodes[source].shape[axis])
    if node.op == "native_group_norm" and node.step is not None:
        forgets = 2 * node.step.args[3] * node.step.args[6]  # samples, groups
    offset = _offset(graph, source, result, module, kind, axis)
    eps = _eps(node, module)
    eps = _written_eps(graph, group) if eps is None else eps
    return NormRun(source, result, module, kind, forgets, eps, offset)


def _is_statistic(node: Node) -> bool:
    """Whether a node is a further output of a kernel, such as the mean or standard deviation."""
    return node.step is not None and node.step.output > 0


def null_directions(
    graph: Graph, readers: Sequence[Sequence[int]], source: int, target: int, gone: Iterable[Edge] = ()
) -> int:
    """How many directions of the source have no effect on the target, whatever the weights, because of norms.

    A norm counts if all paths pass through it. `gone` are edges that carry nothing, such as a cut stream.
    """
    readers_of = _readers_on_paths(graph, source, target, set(gone))
    inputs, lost = prod(graph.nodes[source].shape), 0
    furthest = source  # the last node that any edge from an earlier node leads to
    for index in sorted(readers_of):
        following = readers_of[index]
        if furthest <= index and following and all(in_norm(graph.nodes[i]) for i in following):
            norms = [norm_at(graph, readers, graph.nodes[i]) for i in following]
            forgets = [n.forgets if n is not None and n.source == index else 0 for n in norms]
            lost = max(lost, inputs - prod(graph.nodes[index].shape) + min(forgets))
        furthest = max([furthest, *following])
    return lost


def _readers_on_paths(graph: Graph, source: int, target: int, gone: set[Edge]) -> dict[int, list[int]]:
    """The nodes on the paths from the source to the target, each with its readers on these paths."""
    nodes = path(graph, source, target)
    reached = {source}
    for node in nodes:
        if any(parent in reached and (parent, node.index) not in gone for parent in node.parents):
            reached.add(node.index)
    result: dict[int, list[int]] = {target: []}
    for node in reversed(nodes):
        for parent in dict.fromkeys(node.parents):
            if node.index in result and parent in reached and (parent, node.index) not in gone:
                result.setdefault(parent, []).append(node.index)
    return result


def _group(graph: Graph, readers: Sequence[Sequence[int]], node: Node) -> set[int]:
    """The nodes of one run of a norm: the connected nodes of its module."""
    if node.norm is not None:
        return {n.index for n in graph.nodes[: node.norm + 1] if n.norm == node.norm}
    if norm_module(node) is None:
        return {node.index}
    group: set[int] = set()
    frontier = [node.index]
    while frontier:
        index = frontier.pop()
        here = graph.nodes[index]
        if index not in group and not here.fixed and _same(here.owners, node.owners):
            group.add(index)
            frontier += [*readers[index], *here.parents]
    return group


def _same(one: tuple[nn.Module, ...], other: tuple[nn.Module, ...]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _kind(graph: Graph, source: int, result: int, module: nn.Module | None) -> tuple[NormKind, int]:
    """The kind, and the axis that it normalises."""
    shape = graph.nodes[source].shape
    try:
        function = replay(graph, source, result, torch.float64)
        for axis in [-1, 1] if len(shape) == 4 else [-1]:
            x, shift, scale = _inputs(graph, source, axis)
            out = function(x)
            same = [bool(torch.allclose(function(other), out, rtol=1e-4, atol=1e-6)) for other in (shift, scale)]
            if same[1] and out.isfinite().all() and not torch.allclose(out, out.flatten()[0]):
                return ("layernorm" if same[0] else "rmsnorm"), axis
    except (ReplayError, RuntimeError, NotImplementedError):  # no values: go by the class
        is_rms = "rms" in type(module).__name__.lower()
        return ("rmsnorm" if is_rms else "layernorm" if isinstance(module, nn.LayerNorm) else "other"), -1
    return "other", -1


def _inputs(graph: Graph, source: int, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random x, x + c and s x, one c and s per token. Large, so that eps does not matter."""
    generator = torch.Generator().manual_seed(0)
    shape = list(graph.nodes[source].shape)
    per_token = shape.copy()
    per_token[axis] = 1
    device = graph.values[source].device
    if device.type == "meta":
        raise ReplayError("constants without values")
    x = 1e3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    shift = 1e3 * torch.randn(per_token, generator=generator, dtype=torch.float64)
    scale = 1 + torch.rand(per_token, generator=generator, dtype=torch.float64)
    return x.to(device), (x + shift).to(device), (x * scale).to(device)


def _offset(graph: Graph, source: int, result: int, module: nn.Module | None, kind: NormKind, axis: int) -> float:
    """1 for a norm that multiplies by 1 + its weight, as Gemma's does."""
    gain = getattr(module, "weight", None)
    if kind == "other" or axis != -1 or not isinstance(gain, Tensor):
        return 0.0
    try:
        x, _, _ = _inputs(graph, source, axis)
        out = replay(graph, source, result, torch.float64)(x)
    except (ReplayError, RuntimeError, NotImplementedError):
        return 0.0
    x = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    plain = x / x.square().mean(-1, keepdim=True).sqrt()
    bias = getattr(module, "bias", None)
    bias = bias.detach().double() if isinstance(bias, Tensor) else 0.0
    tolerance = 1e-4 if gain.element_size() >= 4 else 1e-2  # 1 + weight is rounded to the weight's dtype
    for offset in (0.0, 1.0):
        expected = plain * (offset + gain.detach().double()) + bias
        if torch.allclose(out, expected, rtol=tolerance, atol=tolerance / 10):
            return offset
    return 0.0


def _written_eps(graph: Graph, group: set[int]) -> float | None:
    """The number added to the mean square, for modules whose eps has another attribute name."""
    steps = [graph.nodes[i].step for i in sorted(group) if graph.nodes[i].op == "add"]
    numbers = [step.args[1] for step in steps if step is not None and isinstance(step.args[1], float)]
    return numbers[0] if numbers else None


def _eps(node: Node, module: nn.Module | None) -> float | None:
    if node.op == "native_layer_norm" and node.step is not None:
        return float(node.step.args[4])
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    return None if eps is None else float(eps)
