"""One traced sample: the stream before and after every site, and branches, sub-layers and the network as functions.

The sample is traced once (`_model_trace`), with the weights of its wiring. A branch, a sub-layer or the whole
stack of sites is then computed again from the trace as a function of one tensor, in float64 where asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unskip.anatomy import _ops
from unskip.anatomy._model_trace import ModelTrace, SiteRun
from unskip.anatomy._norms import Edge, norm_at, null_directions
from unskip.anatomy._replay import replay
from unskip.anatomy._sites import Site
from unskip.anatomy._walk import climb, in_norm

Function = Callable[[Tensor], Tensor]  # a part of the model, of its input


@dataclass(frozen=True, eq=False)
class Sample:
    """One traced sample."""

    trace: ModelTrace

    @property
    def sites(self) -> tuple[Site, ...]:
        """All residual additions."""
        return self.trace.sites

    def value(self, node: int) -> Tensor:
        """What a node of the trace gave."""
        return self.trace.graph.values[node]

    def run(self, site: Site) -> SiteRun:
        """The last run of a site."""
        return self.trace.runs[site.index][-1]

    def first(self) -> int:
        """The node of the stream that the first site reads."""
        return min(runs[0].root for site, runs in zip(self.sites, self.trace.runs, strict=True) if site.regular)

    def last(self) -> int:
        """The node of the sum that the last site makes."""
        return max(runs[-1].add.index for site, runs in zip(self.sites, self.trace.runs, strict=True) if site.regular)

    def stream(self, site: Site) -> Tensor:
        """(tokens, dim), what the site adds its branch to."""
        return tokens(self.value(self.run(site).stream), site)

    def sum(self, site: Site) -> Tensor:
        """(tokens, dim), what the site makes."""
        return tokens(self.value(self.run(site).add.index), site)

    def ratio(self, site: Site) -> float:
        """rms(beta f) / rms(alpha x), over all branches of the site; infinite where the stream is cut."""
        alpha, beta = self.trace.weights[site.index]
        run = self.run(site)
        branch = sum(self.value(finding.branch).double() for finding in run.findings) * _double(beta)
        stream = self.value(run.stream).double() * _double(alpha)
        below = float(stream.square().mean().sqrt())
        return float(torch.as_tensor(branch).square().mean().sqrt()) / below if below else float("inf")

    def branch(self, site: Site, dtype: torch.dtype) -> tuple[Function, Tensor, int]:
        """The branch as a function of its normalised input, that input, and the number of directions lost on the way.

        Several branches of one site are taken together.
        """
        run = self.run(site)
        source = self._normalised(run)
        functions = [replay(self.trace.graph, source, finding.branch, dtype) for finding in run.findings]

        def together(x: Tensor) -> Tensor:
            return torch.stack([function(x) for function in functions]).sum(0)

        function = functions[0] if len(functions) == 1 else together
        target = run.findings[0].branch if len(functions) == 1 else run.add.index
        lost = self._lost(source, target, (run.stream, run.findings[0].add.index))
        return function, self.value(source).to(dtype), lost

    def sublayer(self, site: Site, dtype: torch.dtype) -> tuple[Function, Tensor, int]:
        """alpha x + beta f(x) as a function of x, x, and the number of directions lost on the way."""
        run = self.run(site)
        function = replay(self.trace.graph, run.root, run.add.index, dtype)
        return function, self.value(run.root).to(dtype), self._lost(run.root, run.add.index)

    def network(self, dtype: torch.dtype) -> tuple[Function, Tensor, int]:
        """All sites, from the first stream to the last sum."""
        source, target = self.first(), self.last()
        function = replay(self.trace.graph, source, target, dtype)
        return function, self.value(source).to(dtype), self._lost(source, target)

    def origins(self) -> dict[int, Site]:
        """For every site that is no long skip, by its index, the site at which its stream begins.

        A model may have several streams, as encoder and decoder or two towers do. A site goes on with the stream of
        the sum that it reads, or else of the last sum that its input was computed from.
        """
        nodes = self.trace.graph.nodes
        owner: dict[int, Site] = {}  # of the sums so far
        result: dict[int, Site] = {}
        for site in self.sites:
            if not site.regular:
                continue
            runs = self.trace.runs[site.index]
            whole = [index for index, _ in climb(nodes, runs[0].root) if index in owner]
            sums = whole[:1] or [index for index in sorted(owner, reverse=True) if index in nodes[runs[0].root]][:1]
            result[site.index] = result[owner[sums[0]].index] if sums else site
            owner |= {run.add.index: site for run in runs}
        return result

    def _normalised(self, run: SiteRun) -> int:
        """The node that all of the branch reads: the output of a norm of the stream, or the stream itself."""
        norms = [node for node in run.steps if in_norm(node)]
        norm = norm_at(self.trace.graph, self.trace.readers, norms[0]) if norms else None
        if norm is None or norm.source not in [run.root, *self._moved(run)]:
            return run.root
        result = self.trace.graph.nodes[norm.result]
        around = [n for n in run.steps if n.index not in result and norm.result not in n]
        return run.root if around else norm.result  # something passes the norm by: the branch reads the stream

    def _moved(self, run: SiteRun) -> set[int]:
        """The nodes of the branch that are the stream itself, rearranged or cast."""
        moved = {run.root}
        for node in run.steps:
            if node.op in _ops.IDENTITY and node.parents[0] in moved:
                moved.add(node.index)
        return moved

    def _lost(self, source: int, target: int, *gone: Edge) -> int:
        """The directions of the source that norms on the way forget, where nothing passes them by."""
        dead = list(gone)
        for site, runs in zip(self.sites, self.trace.runs, strict=True):
            alpha, beta = self.trace.weights[site.index]
            for finding in (f for run in runs for f in run.findings):
                if finding.role == "mix" and not isinstance(alpha, Tensor) and alpha == 0:
                    dead.append((finding.stream, finding.add.index))
                if not isinstance(beta, Tensor) and beta == 0:
                    dead.append((finding.branch, finding.add.index))
        return null_directions(self.trace.graph, self.trace.readers, source, target, dead)


def tokens(value: Tensor, site: Site) -> Tensor:
    """(samples, tokens, dim), whatever the layout."""
    moved = value.movedim(site.axis, -1)
    return moved.reshape(moved.shape[0], -1, moved.shape[-1]) if moved.ndim > 2 else moved[:, None]


def _double(weight: float | Tensor) -> float | Tensor:
    return weight.detach().double() if isinstance(weight, Tensor) else weight
