"""Plain data attached to a model, and saved and loaded with it: its preprocessing, the run it comes from."""

from __future__ import annotations

from typing import Any

from torch import nn

from unskip.anatomy import ABOUT


def about(model: nn.Module) -> dict[str, Any]:
    """The plain data of a model: a mutable mapping of JSON values, in an attribute, so that copies keep it."""
    data: dict[str, Any] = vars(model).setdefault(ABOUT, {})
    return data
