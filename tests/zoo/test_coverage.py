"""Audit and rewire one model of each architecture file of timm.

Models of up to 50 million parameters have values, so that the rewiring is verified; larger ones are on the meta device.
"""

from __future__ import annotations

import gc
import json
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
import timm
import torch
from tests.tables import RESULTS, shares
from timm.models._registry import _model_to_module
from torch import nn

import unskip
from unskip import Scale

FILES: dict[str, list[str]] = defaultdict(list)
for _name in timm.list_models():
    FILES[_model_to_module[_name]].append(_name)

# Architectures without a residual addition according to the audit; recorded, to detect changes.
WITHOUT = {"densenet", "inception_v3", "inception_v4", "mobilenetv3", "rdnet", "selecsls", "vgg", "vovnet"}


# Large models that need values in forward, so they are made smaller instead of using the meta device.
CUT_SHORT = {"gemma4_vit": {"depth": 2}}


def smallest(names: list[str], **changes: int) -> tuple[str, nn.Module]:
    """The smallest of the first few models by name; on the meta device if it is large."""
    built = []
    for name in sorted(names, key=len)[:4]:
        with torch.device("meta"):
            model = timm.create_model(name, **changes)
        built.append((sum(p.numel() for p in model.parameters()), name, model))
    size, name, model = min(built, key=lambda item: item[:2])
    if size <= 50e6:
        torch.manual_seed(0)
        model = timm.create_model(name, **changes)
    return name, model.eval()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:additions that could not be decided")  # they are recorded
@pytest.mark.parametrize("file", sorted(FILES))
def test_every_architecture_of_timm(file: str, record_property: Callable[[str, object], None]) -> None:
    name, model = smallest(FILES[file], **CUT_SHORT.get(file, {}))
    record_property("model", name)
    audit = unskip.audit(model)
    kinds = Counter(site.kind + (" (projected)" if site.projected else "") for site in audit)
    record_property("sites", ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none")
    record_property("apart", f"{len(audit.long_skips)} long" if audit.long_skips else "")
    record_property("unknown", "; ".join(sorted({unknown.reason for unknown in audit.unknown})))
    assert bool(len(audit)) == (file not in WITHOUT)
    assert [site.problem for site in audit if site.problem] == []
    record_property("verified", "")
    if any(not site.projected for site in audit):
        before = [type(module) for module in model.modules()]
        wiring = unskip.rewire(model, Scale(0.5, 0.7))
        governed = [a for a, site in zip(wiring.alphas, wiring.sites, strict=True) if not (site.projected or site.long)]
        assert set(governed) == {0.5}
        meta = any(parameter.device.type == "meta" for parameter in model.parameters())
        assert wiring.verified == (not meta)
        record_property("verified", "on meta tensors" if meta else "y")
        wiring.undo()
        assert [type(module) for module in model.modules()] == before
        del model, wiring
    gc.collect()  # a hundred models in one process


def test_the_page_has_the_recorded_counts() -> None:
    whole = json.loads(RESULTS.read_text(encoding="utf-8"))
    count = {name: len(whole[name]["rows"]) for name in ("timm", "transformers")}
    files, types = shares(whole)["timm"], shares(whole)["transformers"]
    missing = types["does not build small"] + types["no forward"]
    rows = [
        [count["timm"], files["rewired"], files["no residual"], 0, files["failed"]],
        [count["transformers"], types["done"], types["no residual"], types["refused"], missing],
    ]
    page = (RESULTS.parents[1] / "compatibility.md").read_text(encoding="utf-8")
    for row in rows:
        assert " | ".join(str(number) for number in row) in page
