"""Families as test parameters, and a function that rewires one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tests.zoo.more  # noqa: F401  (registers further families)
from tests.zoo.families import FAMILIES, Family
from tests.zoo.harness import (
    expected_warnings,
)
from tests.zoo.oracle import Weights
from torch import nn

import unskip
from unskip import Scale, Site, Wiring

HALF = Scale(0.5, 0.7)
CLOSE = 1e-6
PARAMETERS = {f.name: pytest.param(f, id=f.name, marks=() if f.core else pytest.mark.full) for f in FAMILIES.values()}
each_family = pytest.mark.parametrize("family", PARAMETERS.values())
# One family of each structure, for quick tests; the full tests run all.
_SHAPES = "timm_vit nn_encoder_post hf_llama hf_albert hand_control_flow hand_spellings"
SOME = {
    name: pytest.param(f, id=name, marks=() if name in _SHAPES.split() else pytest.mark.full)
    for name, f in FAMILIES.items()
}
some_families = pytest.mark.parametrize("family", SOME.values())


def some_families_and(*rules: Any) -> pytest.MarkDecorator:
    """Quick: the first rule with one family of each structure, other rules with timm's ViT. Full: all combinations."""
    cases = [(family, rule) for rule in rules for family in FAMILIES.values()]
    return pytest.mark.parametrize(
        ("family", "rule"),
        [
            pytest.param(f, rule, id=f"{rule}-{f.name}", marks=() if _quick(f, rule is rules[0]) else pytest.mark.full)
            for f, rule in cases
        ],
    )


def _quick(family: Family, first: bool) -> bool:
    return family.name in (_SHAPES.split() if first else ["timm_vit"])


def rewired(family: Family, rule: Any = HALF, **options: Any) -> tuple[nn.Module, Wiring]:
    model = family.build()
    with expected_warnings(family):
        return model, unskip.rewire(model, rule, family.inputs(2), **options)


def spread(family: Family, weights: Weights) -> list[tuple[float, float]]:
    """Weights of the governed sites, and 1 for the others."""
    found = dict(zip(family.governed, weights, strict=True))
    return [found.get(i, (1.0, 1.0)) for i in range(len(family.sites))]


def at(index: int) -> Callable[[Site], bool]:
    return lambda site: site.index == index
