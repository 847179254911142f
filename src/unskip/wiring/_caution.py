"""What a user should hear before a shortcut is cut."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Sequence

from torch import nn

from unskip.anatomy.sites import Site
from unskip.errors import UnskipWarning

_DROP_PATH = re.compile(r"drop_?path|stochastic_?depth", re.IGNORECASE)
_SILENT = 1e-3  # rms(branch) / rms(stream) under which a branch has not begun to speak


def before_cut(model: nn.Module, sites: Sequence[Site]) -> None:
    """Warns where the site's branch cannot stand in for the stream."""
    silent = [site for site in sites if site.ratio is not None and site.ratio < _SILENT]
    if silent:
        _warn(
            f"{_list(silent)}: the branch is under {_SILENT:g} of its stream on the example (LayerScale, a "
            "zero-initialised projection or gate). Cut, it passes almost nothing on: initialise it first, or weaken "
            "the stream instead."
        )
    dropped = [site for site in sites if _drops(model, site)]
    if dropped:
        _warn(
            f"{_list(dropped)}: drop path is on. A dropped sample has nothing but its stream, and with the stream cut "
            "it becomes zeros. Set drop_path to 0."
        )
    projected = [site for site in sites if site.projected]
    if projected:
        _warn(
            f"{_list(projected)}: cutting a projected shortcut leaves its weights without gradients; "
            "DistributedDataParallel needs find_unused_parameters=True."
        )


def _drops(model: nn.Module, site: Site) -> bool:
    """Whether a module of the site drops whole branches in training. An inactive drop path may not have run in the
    trace, so the module that adds is searched too.
    """
    prefix = site.path + "." if site.path else ""
    holder = model.get_submodule(site.path)
    inside = [prefix + name for name, _ in holder.named_children()]
    for name in {*site.branch, *inside}:
        for module in model.get_submodule(name).modules():
            rate = getattr(module, "drop_prob", getattr(module, "p", 0.0))
            if _DROP_PATH.search(type(module).__name__) and rate:
                return True
    return False


def left_alone(reasons: Sequence[str]) -> None:
    """Warns of additions that may be residuals and were not touched."""
    if reasons:
        _warn("additions that could not be decided were left alone: " + "; ".join(reasons))


def _warn(message: str) -> None:
    # The line that called unskip, however deep in it we are.
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("unskip."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UnskipWarning, stacklevel=level - 1)


def _list(sites: Sequence[Site]) -> str:
    names = [site.name for site in sites]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
