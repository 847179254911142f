"""Next-token accuracy: how often the likeliest token is the one that follows."""

from __future__ import annotations

from typing import Any

import numpy

from unskip.evals._registry import register
from unskip.evals._split import Split


@register(
    "next-token-v1",
    needs="predictions",
    about="How often the likeliest token is the next one, with an interval over documents.",
    train=False,
)
def evaluate_next_token(train: Split, test: Split) -> dict[str, Any]:
    correct = test.predictions.right.double().numpy()
    value, low, high = test.predictions.ratio(correct, numpy.ones_like(correct))
    return {"next_token_accuracy": (value, max(0.0, low), min(1.0, high))}
