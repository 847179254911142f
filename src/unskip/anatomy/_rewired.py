"""The state of a rewired model: its sites and their weights, so that it need not be traced again.

The wiring is an attribute of the model's root. This room only uses the protocol below, because it cannot import wiring.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from unskip.errors import BadInput

if TYPE_CHECKING:
    from unskip.anatomy._sites import Survey

WIRING = "_unskip_wiring"  # attribute of a rewired model's root
PATCH = "_unskip_patch"  # attribute of the classes made by rewiring

Number = float | Tensor


class Rewired(Protocol):
    """The state of a rewired model."""

    @property
    def survey(self) -> Survey:
        """The survey of the model from before it was rewired."""

    def weights(self) -> dict[int, tuple[Number, Number]]:
        """The current (alpha, beta) by site index."""

    def suspended(self) -> AbstractContextManager[None]:
        """A context in which the model runs without the wiring."""


def rewired_state(model: nn.Module) -> Rewired | None:
    """The state of a rewired model, or None for a plain model."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"expected a torch.nn.Module, got {type(model).__name__}")
    state: Rewired | None = vars(model).get(WIRING)
    return state
