"""What happens in a model on one sample: the stream before and after every site, and its parts as functions.

The sample is recorded once (`anatomy._dissect`), with the weights of its wiring. A branch, a sub-layer or the whole
stack of sites is then computed again from the recording as a function of one tensor, in float64 where asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor, nn

from unskip.anatomy import _ops
from unskip.anatomy._dissect import Cut, Dissection
from unskip.anatomy._find import climb, in_norm
from unskip.anatomy._norms import Edge, norm_at, null_directions
from unskip.anatomy._replay import ReplayError, path, replay
from unskip.anatomy.sites import Site
from unskip.errors import BadInput

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Sample:
    """One recorded sample."""

    dissection: Dissection

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.dissection.sites

    def value(self, node: int) -> Tensor:
        return self.dissection.graph.values[node]

    def cut(self, site: Site) -> Cut:
        return self.dissection.runs[site.index][-1]  # of a site that runs several times, the last run

    def first(self) -> int:
        """The node of the stream that the first site reads."""
        return min(runs[0].root for site, runs in zip(self.sites, self.dissection.runs, strict=True) if not site.long)

    def last(self) -> int:
        """The node of the sum that the last site makes."""
        return max(
            runs[-1].add.index for site, runs in zip(self.sites, self.dissection.runs, strict=True) if not site.long
        )

    def stream(self, site: Site) -> Tensor:
        return tokens(self.value(self.cut(site).stream), site)

    def sum(self, site: Site) -> Tensor:
        return tokens(self.value(self.cut(site).add.index), site)

    def ratio(self, site: Site) -> float:
        """rms(beta f) / rms(alpha x), over all branches of the site; infinite where the stream is cut."""
        alpha, beta = self.dissection.weights[site.index]
        cut = self.cut(site)
        branch = sum(self.value(finding.branch).double() for finding in cut.findings) * _double(beta)
        stream = self.value(cut.stream).double() * _double(alpha)
        below = float(stream.square().mean().sqrt())
        return float(torch.as_tensor(branch).square().mean().sqrt()) / below if below else float("inf")

    def branch(self, site: Site, dtype: torch.dtype) -> tuple[Function, Tensor, int]:
        """The branch as a function of its normalised input, that input, and the number of directions lost on the way.

        Several branches of one site are taken together.
        """
        cut = self.cut(site)
        source = self._normalised(cut)
        functions = [replay(self.dissection.graph, source, finding.branch, dtype) for finding in cut.findings]

        def together(x: Tensor) -> Tensor:
            return torch.stack([function(x) for function in functions]).sum(0)

        function = functions[0] if len(functions) == 1 else together
        target = cut.findings[0].branch if len(functions) == 1 else cut.add.index
        lost = self._lost(source, target, (cut.stream, cut.findings[0].add.index))
        return function, self.value(source).to(dtype), lost

    def sublayer(self, site: Site, dtype: torch.dtype) -> tuple[Function, Tensor, int]:
        """alpha x + beta f(x) as a function of x, x, and the number of directions lost on the way."""
        cut = self.cut(site)
        function = replay(self.dissection.graph, cut.root, cut.add.index, dtype)
        return function, self.value(cut.root).to(dtype), self._lost(cut.root, cut.add.index)

    def network(self, dtype: torch.dtype) -> tuple[Function, Tensor, int]:
        """All sites, from the first stream to the last sum."""
        source, target = self.first(), self.last()
        function = replay(self.dissection.graph, source, target, dtype)
        return function, self.value(source).to(dtype), self._lost(source, target)

    def origins(self) -> dict[int, Site]:
        """For every site that is no long skip, by its index, the site at which its stream begins.

        A model may have several streams, as encoder and decoder or two towers do. A site goes on with the stream of
        the sum that it reads, or else of the last sum that its input was computed from.
        """
        nodes = self.dissection.graph.nodes
        owner: dict[int, Site] = {}  # of the sums so far
        result: dict[int, Site] = {}
        for site in self.sites:
            if site.long:
                continue
            runs = self.dissection.runs[site.index]
            whole = [index for index, _ in climb(nodes, runs[0].root) if index in owner]
            sums = whole[:1] or [index for index in sorted(owner, reverse=True) if index in nodes[runs[0].root]][:1]
            result[site.index] = result[owner[sums[0]].index] if sums else site
            owner |= {run.add.index: site for run in runs}
        return result

    def _normalised(self, cut: Cut) -> int:
        """The node that all of the branch reads: the output of a norm of the stream, or the stream itself."""
        norms = [node for node in cut.steps if in_norm(node)]
        found = norm_at(self.dissection.graph, self.dissection.readers, norms[0]) if norms else None
        if found is None or found.source not in [cut.root, *self._moved(cut)]:
            return cut.root
        result = self.dissection.graph.nodes[found.result]
        around = [n for n in cut.steps if n.index not in result and found.result not in n]
        return cut.root if around else found.result  # something passes the norm by: the branch reads the stream

    def _moved(self, cut: Cut) -> set[int]:
        """The nodes of the branch that are the stream itself, rearranged or cast."""
        moved = {cut.root}
        for node in cut.steps:
            if node.op in _ops.IDENTITY and node.parents[0] in moved:
                moved.add(node.index)
        return moved

    def _lost(self, source: int, target: int, *gone: Edge) -> int:
        """The directions of the source that norms on the way forget, where nothing passes them by."""
        dead = list(gone)
        for site, runs in zip(self.sites, self.dissection.runs, strict=True):
            alpha, beta = self.dissection.weights[site.index]
            for finding in (f for run in runs for f in run.findings):
                if finding.role == "mix" and not isinstance(alpha, Tensor) and alpha == 0:
                    dead.append((finding.stream, finding.add.index))
                if not isinstance(beta, Tensor) and beta == 0:
                    dead.append((finding.branch, finding.add.index))
        return null_directions(self.dissection.graph, self.dissection.readers, source, target, dead)


def gradient_norms(sample: Sample, generator: torch.Generator) -> list[float]:
    """|d<w, x_L>/dx_l| at each site's stream, for a random sign vector w: how a signal from the end arrives there."""
    graph = sample.dissection.graph
    start, end = sample.first(), sample.last()
    roots = [sample.cut(site).root for site in sample.sites]
    value = sample.value(start).detach().to(torch.float64, copy=True).requires_grad_()
    kept: dict[int, Tensor] = {start: value}
    reachable = {start, *(node.index for node in path(graph, start, end))}
    with torch.enable_grad():
        out = replay(graph, start, end, torch.float64, keep=kept)(value)
        signs = torch.randint(0, 2, out.shape, generator=generator, device=generator.device).to(out) * 2 - 1
        wanted = [root for root in dict.fromkeys(roots) if root in reachable and root in kept]
        found = torch.autograd.grad((out * signs).sum(), [kept[root] for root in wanted], allow_unused=True)
    norms = {root: float(g.norm()) for root, g in zip(wanted, found, strict=True) if g is not None}
    return [norms.get(root, float("nan")) for root in roots]


def tokens(value: Tensor, site: Site) -> Tensor:
    """(samples, tokens, dim), whatever the layout."""
    moved = value.movedim(site.axis, -1)
    return moved.reshape(moved.shape[0], -1, moved.shape[-1]) if moved.ndim > 2 else moved[:, None]


def grid_of(model: nn.Module, site: Site, value: Tensor, image: tuple[int, int]) -> tuple[int, int, int] | None:
    """(prefix tokens, rows, columns) of the patches at a site, or None where tokens fill no grid of its form."""
    if site.axis == 1 and value.ndim == 4:
        return 0, value.shape[2], value.shape[3]
    if value.ndim == 4:
        return 0, value.shape[1], value.shape[2]
    if value.ndim != 3:
        return None
    height, width = image
    said = getattr(model, "num_prefix_tokens", None)
    for prefix in [said] if isinstance(said, int) else (0, 1):
        count = value.shape[1] - prefix
        rows = isqrt(max(count, 0) * height // width)
        columns = count // rows if rows else 0
        if min(rows, columns) > 1 and rows * columns == count and rows * width == columns * height:
            return prefix, rows, columns
    return None


def refuse_not_finite(sample: Sample) -> None:
    """Names the first site whose stream or branch is not finite."""
    for site in sample.sites:
        cut = sample.cut(site)
        branches = [("branch", finding.branch) for finding in cut.findings]
        for what, node in [("stream", cut.stream), *branches, ("sum", cut.add.index)]:
            if not sample.value(node).isfinite().all():
                raise BadInput(
                    f"{site.name}: its {what} is not finite on this batch, so nothing after it can be measured"
                )


def _double(weight: float | Tensor) -> float | Tensor:
    return weight.detach().double() if isinstance(weight, Tensor) else weight


__all__ = ["ReplayError", "Sample", "gradient_norms", "grid_of", "refuse_not_finite", "tokens"]
