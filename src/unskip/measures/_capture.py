"""What `measure` reads from a traced sample: gradients at every stream, the grid of its patches, values not finite."""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor, nn

from unskip.anatomy import Sample, Site, replay
from unskip.errors import BadInput


def gradient_norms(sample: Sample, generator: torch.Generator) -> list[float]:
    """|d<w, x_L>/dx_l| at each site's stream, for a random sign vector w: how a signal from the end arrives there."""
    graph = sample.trace.graph
    start, end = sample.first(), sample.last()
    roots = [sample.run(site).root for site in sample.sites]
    value = sample.value(start).detach().to(torch.float64, copy=True).requires_grad_()
    kept: dict[int, Tensor] = {start: value}
    with torch.enable_grad():
        out = replay(graph, start, end, torch.float64, keep=kept)(value)
        signs = torch.randint(0, 2, out.shape, generator=generator, device=generator.device).to(out) * 2 - 1
        wanted = [root for root in dict.fromkeys(roots) if root in kept]
        found = torch.autograd.grad((out * signs).sum(), [kept[root] for root in wanted], allow_unused=True)
    norms = {root: float(g.norm()) for root, g in zip(wanted, found, strict=True) if g is not None}
    return [norms.get(root, float("nan")) for root in roots]


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
        run = sample.run(site)
        branches = [("branch", finding.branch) for finding in run.findings]
        for what, node in [("stream", run.stream), *branches, ("sum", run.add.index)]:
            if not sample.value(node).isfinite().all():
                raise BadInput(
                    f"{site.name}: its {what} is not finite on this batch, so nothing after it can be measured"
                )
