"""Warnings that point to the user's line."""

from __future__ import annotations

import sys
import warnings

from unskip.errors import UnskipWarning


def warn(message: str) -> None:
    """Warns at the line that called unskip."""
    # Frames of contextlib are between ours for context managers, those of torch for its no_grad as a decorator.
    between = ("unskip.", "contextlib", "torch.utils._contextlib")
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(between):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UnskipWarning, stacklevel=level)
