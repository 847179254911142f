"""How many directions features use, as a protocol: see `unskip.measures.rank` for the formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from unskip.evals._protocols import settings_of
from unskip.measures import rank_entropy


def rank(features: Tensor, protocol: str = "rank-v1", *, changes: Mapping[str, Any] | None = None) -> dict[str, float]:
    """The entropy of the singular values of (samples, dim), and its exponential, over the protocol's first samples."""
    settings = settings_of(protocol, "rank", changes)
    entropy = rank_entropy(features[: settings["samples"]], settings["center"])
    return {"rank": math.exp(entropy), "rank_entropy": entropy}
