"""Small generative runs on digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import unskip
from unskip import recipes
from unskip.data import ImageSet, open_images

TINY: dict[str, Any] = {
    "steps": 6,
    "batch": 32,
    "log_every": 2,
    "checkpoint_every": 4,
    "online_images": 300,
    "ema": 0.5,
    "device": "cpu",
}
SIT = "width=16,depth=5,heads=2"


def tiny(recipe: str = "sit", **changes: Any) -> Any:
    return getattr(recipes, recipe)("digits", **{"model_args": SIT, **TINY, **changes})


def trained(recipe: str, out: Path) -> Path:
    """A finished run."""
    assert unskip.train(tiny(recipe), out, quiet=True).finished
    return out


def few(count: int = 48) -> ImageSet:
    return open_images("digits", split="test").select(range(count))
