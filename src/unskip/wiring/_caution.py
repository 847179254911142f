"""Warnings before a shortcut is cut."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from unskip._warn import warn
from unskip.anatomy import Site, drop_paths, named

_NEAR_ZERO = 1e-3  # rms(branch) / rms(stream)


def before_cut(model: nn.Module, sites: Sequence[Site]) -> None:
    """Warns about sites whose branch cannot replace the stream."""
    small = [site for site in sites if site.ratio is not None and site.ratio < _NEAR_ZERO]
    if small:
        warn(
            f"{named(small)}: near-zero branch, under {_NEAR_ZERO:g} of its stream on the example (LayerScale, a "
            "zero-initialised projection or gate). Without the stream the output is almost zero: initialise the branch "
            "first, or weaken the stream instead."
        )
    dropped = [site for site in sites if drop_paths(model, site)]
    if dropped:
        warn(
            f"{named(dropped)}: drop path is on. A dropped sample keeps only the stream, so with the stream cut it "
            "becomes zero. Set drop_path to 0."
        )
    projected = [site for site in sites if site.projected]
    if projected:
        warn(
            f"{named(projected)}: cutting a projected shortcut leaves its weights without gradients; "
            "DistributedDataParallel needs find_unused_parameters=True."
        )


def left_alone(reasons: Sequence[str]) -> None:
    """Warns about additions that may be residuals and were not changed."""
    if reasons:
        warn("additions that could not be decided were not changed: " + "; ".join(reasons))
