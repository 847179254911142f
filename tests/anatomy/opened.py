"""The parts of small models, computed once."""

import functools
from typing import Any

import tests.zoo.more  # noqa: F401  (enters its families into the registry)
from tests.zoo.families import FAMILIES
from torch import nn

import unskip
from unskip.anatomy import AttentionParts, MlpParts, ParallelParts, Parts


@functools.cache
def open_family(name: str) -> tuple[nn.Module, Parts]:
    """Shared by tests that do not change the model."""
    model = FAMILIES[name].build()
    return model, unskip.parts(model, FAMILIES[name].inputs(2))


def flat(part: Any) -> list[AttentionParts | MlpParts]:
    return [part.attention, part.mlp] if isinstance(part, ParallelParts) else [] if part is None else [part]
