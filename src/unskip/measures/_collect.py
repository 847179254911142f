"""Collect block outputs, branch ratios and attention from the samples of a batch, one sample at a time.

Memory: the output of every block for all samples, (tokens, dim) each, and all activations of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from unskip.anatomy import Block, PartsTrace, Sample, Site, patch_grid, tokens
from unskip.errors import BadInput
from unskip.measures._rounding import Rounding
from unskip.measures.attention import attention_condition, attention_entropy, self_attention_mass
from unskip.measures.echo import high_frequency_share

Size = tuple[int, int]


class Heads(NamedTuple):
    """The attention of one sample at one site, by head; the last two only for self-attention."""

    entropy: Tensor
    self_attention: Tensor | None
    condition: Tensor | None


@dataclass(eq=False)
class SiteSamples:
    """The values of one site for all samples."""

    site: Site
    ratios: list[float] = field(default_factory=list)  # rms(beta f) / rms(alpha x)
    heads: list[Heads] = field(default_factory=list)


@dataclass(eq=False)
class BlockSamples:
    """The values of one block for all samples."""

    block: Block
    last: Site  # the last of its sites
    origin: int  # index of the site at which its stream starts
    outputs: list[Tensor] = field(default_factory=list)  # (tokens, dim) each
    high: list[float] = field(default_factory=list)  # high-frequency share; NaN without a grid

    @property
    def index(self) -> int:
        return self.block.index

    @property
    def path(self) -> str:
        return self.block.path


class Samples:
    """The values of all sites and blocks, and the inputs of their streams, collected sample by sample."""

    def __init__(
        self, model: nn.Module, traced: PartsTrace, blocks: Sequence[Block], grid: Size | None, image: Size | None
    ) -> None:
        self.model, self.traced, self.grid, self.image = model, traced, grid, image
        self.first = Sample(traced.trace)
        self.notes: list[str] = []
        self.rounding = Rounding()
        self.inputs: dict[int, list[Tensor]] = {}  # x_0 of each sample, by the index of the stream's first site
        self.sites = [SiteSamples(site) for site in traced.trace.sites if site.regular]
        self._origins = self.first.origins()
        lasts = [traced.trace.sites[block.last] for block in blocks]
        self.blocks = [
            BlockSamples(block, last, self._origins[last.index].index)
            for block, last in zip(blocks, lasts, strict=True)
        ]
        for site in (each.site for each in self.sites):
            if site.index in traced.parts.reasons and site.kind in ("attention", "mlp", "parallel"):
                self.notes.append(f"{site.name}: parts unknown ({traced.parts.reasons[site.index]})")

    @property
    def count(self) -> int:
        return len(next(iter(self.inputs.values())))

    @property
    def tokens(self) -> int:
        return len(next(iter(self.inputs.values()))[0])

    def in_stream(self, last: Site) -> list[Site]:
        """The sites of the same stream, from its start to `last`."""
        origin = self._origins[last.index]
        sites = [each.site for each in self.sites if each.site.index <= last.index]
        return [site for site in sites if self._origins[site.index] is origin]

    def add(self, sample: Sample) -> None:
        """Adds the values of one sample. Raises BadInput if they are not finite."""
        _check_finite(sample)
        for origin in {site.index: site for site in self._origins.values()}.values():
            first = sample.trace.runs[origin.index][0].stream
            self.inputs.setdefault(origin.index, []).append(tokens(sample.value(first), origin)[0])
        self.rounding.add(sample, {each.index: (each.block.node, each.last) for each in self.blocks})
        for block in self.blocks:
            value = sample.value(block.block.node)
            block.outputs.append(tokens(value, block.last)[0])
            block.high.append(self._high_frequencies(block.last, value))
        for each in self.sites:
            each.ratios.append(sample.ratio(each.site))
            if each.site.index in self.traced.attentions:
                self._add_attention(each, sample)

    def _add_attention(self, each: SiteSamples, sample: Sample) -> None:
        traced = PartsTrace(sample.trace, self.traced.parts, self.traced.attentions)
        p = traced.probabilities(each.site.index)
        square = p.shape[-1] == p.shape[-2]
        try:
            each.heads.append(
                Heads(
                    attention_entropy(p),
                    self_attention_mass(p) if square else None,
                    attention_condition(p) if square else None,
                )
            )
        except BadInput as reason:  # such as a token whose keys are all masked
            self.notes.append(f"{each.site.name}: attention not measured: {reason}")

    def _high_frequencies(self, site: Site, value: Tensor) -> float:
        flat = tokens(value, site)
        grid = patch_grid(self.model, value, site.axis, self.image) if self.image is not None else None
        if self.grid is not None:
            grid = (flat.shape[1] - self.grid[0] * self.grid[1], *self.grid)
        if grid is None or grid[0] < 0 or min(grid[1:]) < 2:
            return math.nan
        prefix, height, width = grid
        return high_frequency_share(flat[:, prefix:], (height, width))


def _check_finite(sample: Sample) -> None:
    """Raises BadInput that names the first site whose stream or branch is not finite."""
    for site in sample.sites:
        run = sample.run(site)
        branches = [("branch", finding.branch) for finding in run.findings]
        for name, node in [("stream", run.stream), *branches, ("sum", run.add.index)]:
            if not sample.value(node).isfinite().all():
                raise BadInput(
                    f"{site.name}: its {name} is not finite on this batch, so nothing after it can be measured"
                )
