"""Audit and rewire over one model of every architecture file of timm, on meta tensors: the zoo at large."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
import timm
import torch
from timm.models._registry import _model_to_module
from torch import nn

import unskip
from unskip import Scale
from unskip.errors import ForwardError

FILES: dict[str, list[str]] = defaultdict(list)
for _name in timm.list_models():
    FILES[_model_to_module[_name]].append(_name)

# Where the audit finds no residual addition; recorded from its answers, so a guard against change.
WITHOUT = {"densenet", "inception_v3", "inception_v4", "mobilenetv3", "rdnet", "selecsls", "vgg", "vovnet"}


# Ask for the values of a tensor in forward, which meta tensors do not have.
ASKS_VALUES = {"gemma4_vit"}


def smallest(names: list[str]) -> tuple[str, nn.Module]:
    """The smallest of the first few models by name, without values."""
    built = []
    for name in sorted(names, key=len)[:4]:
        with torch.device("meta"):
            model = timm.create_model(name)
        built.append((sum(p.numel() for p in model.parameters()), name, model))
    _, name, model = min(built, key=lambda item: item[:2])
    return name, model.eval()


@pytest.mark.full
@pytest.mark.parametrize("file", sorted(FILES))
def test_every_architecture_of_timm(file: str, record_property: Callable[[str, object], None]) -> None:
    name, model = smallest(FILES[file])
    record_property("model", name)
    if file in ASKS_VALUES:
        record_property("sites", "not audited: its forward asks for values")
        with pytest.raises(ForwardError, match="meta tensors"):
            unskip.audit(model)
        return
    audit = unskip.audit(model)
    kinds = Counter(site.kind + (" (projected)" if site.projected else "") for site in audit)
    record_property("sites", ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none")
    record_property("apart", f"{len(audit.long_skips)} long" if audit.long_skips else "")
    record_property("unknown", "; ".join(sorted({unknown.reason for unknown in audit.unknown})))
    assert bool(len(audit)) == (file not in WITHOUT)
    assert [site.problem for site in audit if site.problem] == []
    if any(not site.projected for site in audit):
        before = [type(module) for module in model.modules()]
        wiring = unskip.rewire(model, Scale(0.5, 0.7))
        governed = [a for a, site in zip(wiring.alphas, wiring.sites, strict=True) if not (site.projected or site.long)]
        assert set(governed) == {0.5}
        wiring.undo()
        assert [type(module) for module in model.modules()] == before
