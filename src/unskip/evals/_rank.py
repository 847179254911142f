"""How many directions features use, as a protocol: see `unskip.measures.rank` for the formulas."""

from __future__ import annotations

import math

from torch import Tensor

from unskip.evals._protocols import protocol as find
from unskip.measures import rank_entropy


def rank(features: Tensor, protocol: str = "rank-v1") -> dict[str, float]:
    """The entropy of the singular values of (samples, dim), and its exponential, over the protocol's first samples."""
    settings = find(protocol, "rank").settings
    entropy = rank_entropy(features[: settings["samples"]], settings["center"])
    return {"rank": math.exp(entropy), "rank_entropy": entropy}
