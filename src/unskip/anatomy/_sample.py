"""One traced sample: the stream before and after every site, and branches, sub-layers and the network as functions.

The sample is traced once (`_model_trace`), with the weights of its wiring. A branch, a sub-layer or the whole stack of
sites is then replayed from the trace as a function of one tensor, in any floating dtype.
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

Function = Callable[[Tensor], Tensor]  # a part of the model as a function of its input


@dataclass(frozen=True, eq=False)
class Sample:
    """One traced sample."""

    trace: ModelTrace

    @property
    def sites(self) -> tuple[Site, ...]:
        """All residual additions."""
        return self.trace.sites

    def value(self, node: int) -> Tensor:
        """The tensor of a node of the trace."""
        return self.trace.graph.values[node]

    def run(self, site: Site) -> SiteRun:
        """The last run of a site."""
        return self.trace.runs[site.index][-1]

    def first(self) -> int:
        """The node of the stream that the first site reads."""
        return min(runs[0].root for site, runs in zip(self.sites, self.trace.runs, strict=True) if site.regular)

    def last(self) -> int:
        """The node of the last site's sum."""
        return max(runs[-1].add.index for site, runs in zip(self.sites, self.trace.runs, strict=True) if site.regular)

    def stream(self, site: Site) -> Tensor:
        """(tokens, dim), the tensor that the site adds its branch to."""
        return tokens(self.value(self.run(site).stream), site)

    def sum(self, site: Site) -> Tensor:
        """(tokens, dim), the sum of the site."""
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
        """The branch as a function of its normalised input, that input, and the number of input directions lost in it.

        Several branches of one site are summed.
        """
        run = self.run(site)
        source = self._normalised(run)
        functions = [replay(self.trace.graph, source, finding.branch, dtype) for finding in run.findings]

        def total(x: Tensor) -> Tensor:
            return torch.stack([function(x) for function in functions]).sum(0)

        function = functions[0] if len(functions) == 1 else total
        target = run.findings[0].branch if len(functions) == 1 else run.add.index
        lost = self._lost(source, target, (run.stream, run.findings[0].add.index))
        return function, self.value(source).to(dtype), lost

    def sublayer(self, site: Site, dtype: torch.dtype) -> tuple[Function, Tensor, int]:
        """alpha x + beta f(x) as a function of x, x, and the number of directions lost in it."""
        run = self.run(site)
        function = replay(self.trace.graph, run.root, run.add.index, dtype)
        return function, self.value(run.root).to(dtype), self._lost(run.root, run.add.index)

    def network(self, dtype: torch.dtype) -> tuple[Function, Tensor, int]:
        """All sites, from the first stream to the last sum."""
        source, target = self.first(), self.last()
        function = replay(self.trace.graph, source, target, dtype)
        return function, self.value(source).to(dtype), self._lost(source, target)

    def origins(self) -> dict[int, Site]:
        """For every regular site, by its index, the first site of its stream.

        A model may have several streams, such as encoder and decoder or two towers. A site continues the stream of the
        sum that it reads, or else of the last sum that its input was computed from.
        """
        nodes = self.trace.graph.nodes
        owner: dict[int, Site] = {}  # by the node of a sum, the site
        result: dict[int, Site] = {}
        for site in self.sites:
            if not site.regular:
                continue
            runs = self.trace.runs[site.index]
            copies = [index for index, _ in climb(nodes, runs[0].root) if index in owner]
            sums = copies[:1] or [index for index in sorted(owner, reverse=True) if index in nodes[runs[0].root]][:1]
            result[site.index] = result[owner[sums[0]].index] if sums else site
            owner |= {run.add.index: site for run in runs}
        return result

    def _normalised(self, run: SiteRun) -> int:
        """The output of a norm of the stream through which all of the branch reads it, or else the stream itself."""
        norms = [node for node in run.steps if in_norm(node)]
        norm = norm_at(self.trace.graph, self.trace.readers, norms[0]) if norms else None
        if norm is None or norm.source not in [run.root, *self._moved(run)]:
            return run.root
        result = self.trace.graph.nodes[norm.result]
        bypass = [n for n in run.steps if n.index not in result and norm.result not in n]
        return run.root if bypass else norm.result

    def _moved(self, run: SiteRun) -> set[int]:
        """The root and the nodes of the branch that are rearrangements or casts of it."""
        moved = {run.root}
        for node in run.steps:
            if node.op in _ops.IDENTITY and node.parents[0] in moved:
                moved.add(node.index)
        return moved

    def _lost(self, source: int, target: int, *gone: Edge) -> int:
        """The number of source directions that norms remove before the target; `gone` edges carry nothing."""
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
