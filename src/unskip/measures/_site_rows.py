"""The rows of `measure` by site: Jacobians, attention, W_V W_O and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from unskip._words import brief, some
from unskip.anatomy import (
    AttentionParts,
    Function,
    MlpParts,
    ParallelParts,
    ReplayError,
    Sample,
    correlation_map,
    mean_weight,
    replay,
)
from unskip.errors import BadInput
from unskip.measures._collect import Samples, SiteSamples
from unskip.measures._measurement import SiteRow
from unskip.measures.attention import value_output_condition
from unskip.measures.spectrum import Spectrum, jacobian_spectrum, largest_built

Jacobians = Literal["auto", "exact", "off"]
Progress = Callable[[int, int, str], None]
ByHead = tuple[float, ...] | None


class Spectra:
    """The spectra of the first sample's Jacobians, with notes about those that cannot be computed."""

    def __init__(self, total: int, jacobians: Jacobians, steps: int, notes: list[str], progress: Progress) -> None:
        self.total, self.jacobians, self.steps, self.notes, self.progress = total, jacobians, steps, notes, progress
        self.done = 0

    def of(self, name: str, part: Callable[[torch.dtype], tuple[Function, Tensor, int]]) -> Spectrum | None:
        """The spectrum of a part: dtype -> (function, its input, number of directions that norms remove)."""
        if self.jacobians == "off":
            return None
        self.done += 1
        self.progress(self.done, self.total, f"Jacobian of {name}")
        try:
            function, value, null = part(torch.float64)
            exact = self.jacobians == "exact" or value.numel() <= largest_built(value)
            if not exact:  # float32 is precise enough for an estimate
                function, value, null = part(torch.float32)
            return jacobian_spectrum(function, value, exact=exact, steps=self.steps, null=null)
        except (ReplayError, BadInput) as reason:
            self.notes.append(f"no Jacobian of {name}: {reason}")
        except (NotImplementedError, RuntimeError) as error:
            self.notes.append(f"no Jacobian of {name}: {type(error).__name__}: {brief(error)}")
        return None


def site_rows(samples: Samples, spectra: Spectra, generator: torch.Generator) -> list[SiteRow]:
    """One row for each site; numbers that cannot be measured are None, with a note in `samples.notes`."""
    try:
        gradients = gradient_norms(samples.first, generator)
    except (ReplayError, RuntimeError, NotImplementedError) as error:
        gradients = {}
        samples.notes.append(f"no gradient norms: {brief(error)}")
    rows = [_row(each, samples, spectra, gradients.get(each.site.index)) for each in samples.sites]
    singular = [row for row in rows if row.attention_condition is not None and math.inf in row.attention_condition]
    if singular:
        names = some([f"site {row.index}" for row in singular])
        samples.notes.append(
            f"the attention matrix of a head is numerically singular at {names} (equal rows, as in near-uniform "
            "attention): its condition number is inf"
        )
    return rows


def _row(each: SiteSamples, samples: Samples, spectra: Spectra, gradient: float | None) -> SiteRow:
    site, first = each.site, samples.first
    alpha, beta = map(mean_weight, first.trace.weights[site.index])
    return SiteRow(
        index=site.index,
        path=site.path,
        kind=site.kind,
        alpha=alpha,
        beta=beta,
        ratio=sum(each.ratios) / len(each.ratios),
        branch=spectra.of(f"the branch of {site.name}", lambda dtype: first.branch(site, dtype)),
        sublayer=spectra.of(f"{site.name} with its skip", lambda dtype: first.sublayer(site, dtype)),
        entropy=_by_head([heads.entropy for heads in each.heads]),
        self_attention=_by_head([heads.self_attention for heads in each.heads]),
        attention_condition=_by_head([heads.condition for heads in each.heads], median=True),
        value_output=_value_output(samples, each),
        correlation_slope=_correlation_slope(samples, each),
        gradient=gradient,
    )


def _by_head(values: list[Tensor | None], median: bool = False) -> ByHead:
    """The mean or median over samples; condition numbers need the median because they can be infinite."""
    measured = [value for value in values if value is not None]
    if not measured:
        return None
    stacked = torch.stack(measured)
    return tuple((stacked.median(0).values if median else stacked.mean(0)).tolist())


def _correlation_slope(samples: Samples, each: SiteSamples) -> float | None:
    part = samples.traced.parts[each.site.index]
    mlp = part.mlp if isinstance(part, ParallelParts) else part
    correlation = correlation_map(mlp) if isinstance(mlp, MlpParts) else None
    return None if correlation is None else correlation.slope


def _value_output(samples: Samples, each: SiteSamples) -> float | None:
    """The condition number of W_V W_O; output weights of query heads with shared values are summed."""
    part = samples.traced.parts[each.site.index]
    attention = part.attention if isinstance(part, ParallelParts) else part
    if not isinstance(attention, AttentionParts):
        return None
    out = attention.out.double().unflatten(1, (attention.v.shape[0], -1, attention.v.shape[1])).sum(2).flatten(1)
    return float(value_output_condition(attention.v.flatten(0, 1).double(), out))


def gradient_norms(sample: Sample, generator: torch.Generator) -> dict[int, float]:
    """|d<w, x_L>/dx_l| at each site's stream, for a random sign vector w, by site index, if finite."""
    graph = sample.trace.graph
    start, end = sample.first(), sample.last()
    value = sample.value(start).detach().to(torch.float64, copy=True).requires_grad_()
    values: dict[int, Tensor] = {start: value}
    with torch.enable_grad():
        out = replay(graph, start, end, torch.float64, keep=values)(value)
        signs = torch.randint(0, 2, out.shape, generator=generator, device=generator.device).to(out) * 2 - 1
        streams = {site.index: sample.run(site).root for site in sample.sites}
        wanted = [root for root in dict.fromkeys(streams.values()) if root in values]
        gradients = torch.autograd.grad((out * signs).sum(), [values[root] for root in wanted], allow_unused=True)
    norms = {root: float(g.norm()) for root, g in zip(wanted, gradients, strict=True) if g is not None}
    return {index: norms[root] for index, root in streams.items() if math.isfinite(norms.get(root, math.nan))}
