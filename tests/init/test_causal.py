"""`skipless_` for causal attention, rotary positions, grouped queries and gated MLPs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import unskip
from unskip.errors import InitError
from unskip.init import PRESETS, calibrate_, skipless_, verify_skipless
from unskip.recipes._causal import architecture, build_causal

pytest.importorskip("transformers")


def made(kind: str, **more: Any) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **more}
    model = build_causal(architecture(kind, sizes, vocabulary=257, context=32, end=256))
    return model, torch.randint(257, (4, 32), generator=torch.Generator().manual_seed(0))


def test_attention_under_a_causal_mask_is_calibrated() -> None:
    model, ids = made("gpt2")
    unskip.rewire(model, "cut", ids)
    options: Any = {**PRESETS["shaped"], "self_attention": 0.8, "position_code": "orthogonal"}
    check = skipless_(model, ids, generator=torch.Generator().manual_seed(0), **options)
    rows = [row.values for row in check.rows if row.site.kind == "attention"]
    assert [row["calibrated"] for row in rows] == pytest.approx([0.8] * 2, abs=0.01)
    uniform = sum(1 / n for n in range(1, 33)) / 32  # mean self-attention of uniform causal attention
    assert [row["uniform"] for row in rows] == pytest.approx([uniform] * 2)


@pytest.mark.parametrize("kind", ["llama", "stablelm"])  # rotary on the whole head, and on a quarter of it
def test_attention_with_rotary_positions_is_calibrated(kind: str) -> None:
    model, ids = made(kind)
    unskip.rewire(model, "cut", ids, where="attention")
    with warnings.catch_warnings(action="ignore"):
        skipless_(model, ids, self_attention=[0.7, 0.5], generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    reached = [float(each.diagonal(dim1=-2, dim2=-1).mean()) for each in attentions]
    assert reached == pytest.approx([0.7, 0.5], abs=0.01)


def test_calibration_does_not_depend_on_the_weights_before() -> None:
    """Large weights give attention that rounds to 0 where nothing is masked."""
    model, ids = made("gpt2")
    for block in model.transformer.h:
        block.attn.c_attn.weight.data.mul_(500)
    solved = calibrate_(model, ids, 0.8, generator=torch.Generator().manual_seed(0))
    rows = unskip.measure(model, ids, jacobians="off").sites[::2]
    reached = [sum(row.self_attention or ()) / 4 for row in rows]
    assert reached == pytest.approx([0.8] * 2, abs=0.01)
    assert reached == pytest.approx([each.self_attention for each in solved], abs=1e-4)


def test_the_effect_of_rotary_positions_and_grouped_queries_is_noted() -> None:
    model, ids = made("llama", num_key_value_heads=2)
    with warnings.catch_warnings(action="ignore"):
        check = skipless_(model, ids, generator=torch.Generator().manual_seed(0))
    assert len(check.notes) == 2
    assert "an isometry on 32 of them and loses the rest; keep this skip" in check.notes[0]
    assert "rotary positions turn queries against keys by their distance" in check.notes[1]
    verify_skipless(model, ids)
    for part in unskip.parts(model, ids).attentions():
        values = torch.linalg.svdvals(part.value_output().double())
        assert values[:32].tolist() == pytest.approx([9.0] * 32, rel=1e-4)
        assert float(values[32:].max()) < 1e-4
    with pytest.raises(InitError, match="not calibrated: its heads share keys"):
        skipless_(model, ids, self_attention=0.8)
    with pytest.raises(InitError, match="it has no mlp_bias"):
        skipless_(model, ids, **PRESETS["shaped"])
