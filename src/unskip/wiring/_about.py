"""Plain data attached to a model, and saved and loaded with it: its preprocessing, the run it comes from."""

from __future__ import annotations

from typing import Any

from torch import nn

_ABOUT = "_unskip_about"  # an attribute of the module, so that copies keep it


def about(model: nn.Module) -> dict[str, Any]:
    """The plain data of a model: a mutable mapping of JSON values."""
    data: dict[str, Any] = vars(model).setdefault(_ABOUT, {})
    return data
