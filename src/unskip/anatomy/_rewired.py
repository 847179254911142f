"""What a rewired model carries with it: its sites and their weights, so that it need not be traced again.

A rewiring is put on the model's root as an attribute. Here it is known only by what it offers to a reader of the model.
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
        """What was found in the model before it was rewired."""

    def weights(self) -> dict[int, tuple[Number, Number]]:
        """(alpha, beta) now, by site index."""

    def suspended(self) -> AbstractContextManager[None]:
        """The plain model while it lasts."""


def rewired_state(model: nn.Module) -> Rewired | None:
    """The state that a rewired model carries, or None for a plain model."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"expected a torch.nn.Module, got {type(model).__name__}")
    state: Rewired | None = vars(model).get(WIRING)
    return state
