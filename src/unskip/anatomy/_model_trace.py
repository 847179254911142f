"""A model traced on one example: the graph of its plain forward with every tensor, and each site's place in it.

A rewired model is recorded as the plain model it was, for its sites, and its weights are kept beside them; where values
matter the additions are computed with those weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from unskip.anatomy._example import Example
from unskip.anatomy._find import Finding
from unskip.anatomy._graph import Graph, Node
from unskip.anatomy._guard import refuse_wrapped
from unskip.anatomy._rewired import Number, rewired_state
from unskip.anatomy._sites import Site, sites_in
from unskip.anatomy._trace import Weigh, record
from unskip.anatomy._walk import consumers
from unskip.anatomy._written import mark_norms
from unskip.errors import BadInput, ForwardError


def mean_weight(weight: Number) -> float:
    """A weight as one number: the mean where it is learned by channel."""
    return float(weight.detach().double().mean()) if isinstance(weight, Tensor) else float(weight)


@dataclass(frozen=True, eq=False)
class SiteRun:
    """One run of one site in the graph."""

    add: Node  # the sum, its last branch included
    findings: tuple[Finding, ...]  # the first branch, then those added to the same stream
    steps: list[Node]  # what the branches are computed by, in order

    @property
    def stream(self) -> int:
        return self.findings[0].stream

    @property
    def root(self) -> int:
        return self.findings[0].root


@dataclass(frozen=True, eq=False)
class ModelTrace:
    """The graph, and for each site its runs and its weights."""

    graph: Graph
    readers: list[list[int]]
    sites: tuple[Site, ...]
    runs: tuple[tuple[SiteRun, ...], ...]  # by site
    weights: dict[int, tuple[Number, Number]]  # by site index: alpha, beta

    @property
    def last_runs(self) -> tuple[SiteRun, ...]:
        """The last run of each site."""
        return tuple(runs[-1] for runs in self.runs)


def trace_model(model: nn.Module, example: Example, weighted: bool = False) -> ModelTrace:
    """Runs the model on the example in evaluation mode. With `weighted`, a rewired model's sums are its own.

    Attention runs as plain products and a softmax, so that its probabilities are in the graph.
    """
    state = rewired_state(model)
    held: dict[int, tuple[Number, Number]] = state.weights() if state is not None else {}
    with state.suspended() if state is not None else contextlib.nullcontext():
        refuse_wrapped(model)
        graph = _record(model, example)
        sites, findings = sites_in(graph, model)
        if state is not None:
            sites = _same(model, state.survey.sites, sites)
        weights = held or {site.index: (1.0, 1.0) for site in sites}
        weigh = _weighed(sites, findings, weights)
        if weighted and weigh:
            graph = _record(model, example, weigh)
            _refuse_moved(model, graph, findings)
    return ModelTrace(graph, consumers(graph), tuple(sites), tuple(tuple(map(_site_run, r)) for r in findings), weights)


def trace_again(model: nn.Module, example: Example, like: ModelTrace) -> ModelTrace:
    """The same for another example of the same shape, without finding the sites again."""
    state = rewired_state(model)
    with state.suspended() if state is not None else contextlib.nullcontext():
        findings = [[run.findings for run in runs] for runs in like.runs]
        graph = _record(model, example, _weighed(like.sites, findings, like.weights))
    if [node.op for node in graph.nodes] != [node.op for node in like.graph.nodes]:
        raise BadInput(
            f"{type(model).__name__}: which operators run depends on values or shapes of the example, and its samples "
            "differ in it. Pass samples that run alike, such as texts of one length without padding, or one sample."
        )
    return ModelTrace(graph, like.readers, like.sites, like.runs, like.weights)


def _weighed(
    sites: Sequence[Site], findings: list[list[tuple[Finding, ...]]], weights: dict[int, tuple[Number, Number]]
) -> Weigh:
    """The sums that are not plain, by their nodes."""
    return {
        finding.add.index: _sum(finding, *weights[site.index])
        for site, runs in zip(sites, findings, strict=True)
        for finding in (f for run in runs for f in run)
        if any(isinstance(w, Tensor) or w != 1 for w in weights[site.index])
    }


def _record(model: nn.Module, example: Example, weigh: Weigh | None = None) -> Graph:
    try:
        with sdpa_kernel(SDPBackend.MATH):
            return mark_norms(record(model, example, training=False, keep=True, weigh=weigh))
    except Exception as error:
        raise ForwardError(
            f"{type(model).__name__}: its forward failed on the example: {type(error).__name__}: {error}. Pass a "
            "tensor, a tuple of arguments or a mapping of keyword arguments that the model takes."
        ) from error


def _same(model: nn.Module, before: tuple[Site, ...], now: tuple[Site, ...]) -> tuple[Site, ...]:
    """The sites of the wiring, where the example ran the same ones."""
    if [(site.path, site.places[:1]) for site in before] != [(site.path, site.places[:1]) for site in now]:
        raise BadInput(
            f"{type(model).__name__}: {len(now)} sites run on this example, which are not the {len(before)} that were "
            "rewired. Pass an example like the one given to rewire."
        )
    return before


def _sum(finding: Finding, alpha: Number, beta: Number) -> Callable[[Tensor, Tensor], Tensor]:
    stream, branch = (1.0 if finding.role == "more" else alpha), beta
    a, b = (stream, branch) if finding.side == "left" else (branch, stream)

    def weighted(left: Tensor, right: Tensor) -> Tensor:
        return scaled(left, a) + scaled(right, b)

    return weighted


def scaled(value: Tensor, weight: Number) -> Tensor:
    """A tensor times a weight."""
    if isinstance(weight, Tensor):
        return value * weight.detach().to(value.device, value.dtype)
    # At 0 nothing of it is left, NaN included, as in a rewired model.
    return torch.zeros_like(value) if weight == 0 else value * weight


def _refuse_moved(model: nn.Module, graph: Graph, findings: list[list[tuple[Finding, ...]]]) -> None:
    for finding in (f for runs in findings for run in runs for f in run):
        node = graph.nodes[finding.add.index] if finding.add.index < len(graph.nodes) else None
        if node is None or not node.calls or node.calls[0].code is not finding.add.calls[0].code:
            raise BadInput(
                f"{type(model).__name__}: which operators run depends on values, so its rewired form cannot be "
                "traced. Undo the wiring, or measure with fixed weights."
            )


def _site_run(run: tuple[Finding, ...]) -> SiteRun:
    steps = {node.index: node for finding in run for node in finding.path}
    return SiteRun(run[-1].add, run, [steps[index] for index in sorted(steps)])
