"""A model traced on one example: the graph of its forward with every tensor, and the nodes of each site.

A rewired model is traced with its wiring suspended, and the weights (alpha, beta) are kept with the sites. If values
matter, the additions are computed with those weights.
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
    """A weight as one number: the mean of a learned weight per channel."""
    return float(weight.detach().double().mean()) if isinstance(weight, Tensor) else float(weight)


@dataclass(frozen=True, eq=False)
class SiteRun:
    """One run of one site in the graph."""

    add: Node  # the sum, including the last branch
    findings: tuple[Finding, ...]  # the first branch, then those added to the same stream
    steps: list[Node]  # the nodes of all branches, in order

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
    """Runs the model on the example in evaluation mode. With `weighted`, the additions apply the wiring's weights.

    Attention runs as separate products and a softmax, so that its probabilities are in the graph.
    """
    state = rewired_state(model)
    weights: dict[int, tuple[Number, Number]] = state.weights() if state is not None else {}
    with state.suspended() if state is not None else contextlib.nullcontext():
        refuse_wrapped(model)
        graph = _record(model, example)
        sites, findings = sites_in(graph, model)
        if state is not None:
            sites = _check_sites(model, state.survey.sites, sites)
        weights = weights or {site.index: (1.0, 1.0) for site in sites}
        sums = _weighted_sums(sites, findings, weights)
        if weighted and sums:
            graph = _record(model, example, sums)
            _check_additions(model, graph, findings)
    return ModelTrace(graph, consumers(graph), tuple(sites), tuple(tuple(map(_site_run, r)) for r in findings), weights)


def trace_again(model: nn.Module, example: Example, like: ModelTrace) -> ModelTrace:
    """Traces another example of the same shape, reusing the sites of an earlier trace."""
    state = rewired_state(model)
    with state.suspended() if state is not None else contextlib.nullcontext():
        findings = [[run.findings for run in runs] for runs in like.runs]
        graph = _record(model, example, _weighted_sums(like.sites, findings, like.weights))
    if [node.op for node in graph.nodes] != [node.op for node in like.graph.nodes]:
        raise BadInput(
            f"{type(model).__name__}: the operators that run depend on the sample. Pass samples that run the same "
            "operators, such as texts of one length without padding, or one sample."
        )
    return ModelTrace(graph, like.readers, like.sites, like.runs, like.weights)


def _weighted_sums(
    sites: Sequence[Site], findings: list[list[tuple[Finding, ...]]], weights: dict[int, tuple[Number, Number]]
) -> Weigh:
    """By node, the weighted sum that replaces each addition whose weights are not both 1."""
    return {
        finding.add.index: _sum(finding, *weights[site.index])
        for site, runs in zip(sites, findings, strict=True)
        for finding in (f for run in runs for f in run)
        if any(isinstance(w, Tensor) or w != 1 for w in weights[site.index])
    }


def _record(model: nn.Module, example: Example, sums: Weigh | None = None) -> Graph:
    try:
        with sdpa_kernel(SDPBackend.MATH):
            return mark_norms(record(model, example, training=False, keep=True, weigh=sums))
    except Exception as error:
        raise ForwardError(
            f"{type(model).__name__}: its forward failed on the example: {type(error).__name__}: {error}. Pass a "
            "tensor, a tuple of arguments or a mapping of keyword arguments that the model takes."
        ) from error


def _check_sites(model: nn.Module, rewired: tuple[Site, ...], traced: tuple[Site, ...]) -> tuple[Site, ...]:
    """The sites of the wiring. Raises BadInput if the example runs other ones."""
    if [(site.path, site.places[:1]) for site in rewired] != [(site.path, site.places[:1]) for site in traced]:
        raise BadInput(
            f"{type(model).__name__}: the {len(traced)} sites that run on this example are not the {len(rewired)} that "
            "were rewired. Pass an example like the one given to rewire."
        )
    return rewired


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
    # As in a rewired model, weight 0 also removes NaN.
    return torch.zeros_like(value) if weight == 0 else value * weight


def _check_additions(model: nn.Module, graph: Graph, findings: list[list[tuple[Finding, ...]]]) -> None:
    """Raises BadInput if the additions have other nodes in the weighted forward than in the plain one."""
    for finding in (f for runs in findings for run in runs for f in run):
        node = graph.nodes[finding.add.index] if finding.add.index < len(graph.nodes) else None
        if node is None or not node.calls or node.calls[0].code is not finding.add.calls[0].code:
            raise BadInput(
                f"{type(model).__name__}: the operators that run depend on values, so the rewired model cannot be "
                "traced. Undo the wiring, or measure with fixed weights."
            )


def _site_run(run: tuple[Finding, ...]) -> SiteRun:
    steps = {node.index: node for finding in run for node in finding.path}
    return SiteRun(run[-1].add, run, [steps[index] for index in sorted(steps)])
