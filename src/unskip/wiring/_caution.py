"""What a user should hear before a shortcut is cut."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from unskip._warn import warn
from unskip.anatomy import Site, drop_paths, named

_SILENT = 1e-3  # rms(branch) / rms(stream) under which a branch has not begun to speak


def before_cut(model: nn.Module, sites: Sequence[Site]) -> None:
    """Warns where the site's branch cannot stand in for the stream."""
    silent = [site for site in sites if site.ratio is not None and site.ratio < _SILENT]
    if silent:
        warn(
            f"{named(silent)}: the branch is under {_SILENT:g} of its stream on the example (LayerScale, a "
            "zero-initialised projection or gate). Cut, it passes almost nothing on: initialise it first, or weaken "
            "the stream instead."
        )
    dropped = [site for site in sites if drop_paths(model, site)]
    if dropped:
        warn(
            f"{named(dropped)}: drop path is on. A dropped sample has nothing but its stream, and with the stream cut "
            "it becomes zeros. Set drop_path to 0."
        )
    projected = [site for site in sites if site.projected]
    if projected:
        warn(
            f"{named(projected)}: cutting a projected shortcut leaves its weights without gradients; "
            "DistributedDataParallel needs find_unused_parameters=True."
        )


def left_alone(reasons: Sequence[str]) -> None:
    """Warns of additions that may be residuals and were not touched."""
    if reasons:
        warn("additions that could not be decided were left alone: " + "; ".join(reasons))
