"""Plain data that is kept with a model, and saved and loaded with it: its preprocessing, the run it comes from."""

from __future__ import annotations

from typing import Any

from torch import nn

_ABOUT = "_unskip_about"  # an attribute of the module, so that copies have it too


def about(model: nn.Module) -> dict[str, Any]:
    """What is kept with a model: a mapping of JSON values, which may be changed."""
    kept: dict[str, Any] = vars(model).setdefault(_ABOUT, {})
    return kept
