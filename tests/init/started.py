"""Models after `skipless_`, and the names of weights that changed."""

import warnings
from typing import Any

import tests.zoo.more  # noqa: F401  (enters its families into the registry)
import torch
from tests.zoo.families import FAMILIES
from torch import Tensor, nn

import unskip
from unskip.errors import UnskipWarning
from unskip.init import Check, skipless_


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def quietly(*args: Any, **kwargs: Any) -> Check:
    """`skipless_` without the warnings that small models give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnskipWarning)
        return skipless_(*args, **kwargs)


def started(name: str, **options: Any) -> tuple[nn.Module, Check, unskip.anatomy.Parts]:
    family = FAMILIES[name]
    model = family.build()
    check = quietly(model, generator=seeded(), example=family.inputs(2), **options)
    return model, check, unskip.parts(model, family.inputs(2))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
