"""`verify_skipless`: the numbers in its table, and its errors."""

import json
import math

import pytest
import torch
from tests.init.started import quietly, seeded, started
from tests.zoo.families import FAMILIES

import unskip
from unskip.errors import InitError
from unskip.init import verify_skipless


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("blocks.1.attn.proj.weight", r"W_V W_O has condition"),
        ("blocks.1.attn.qkv.weight", r"W_V W_O has condition"),
        ("blocks.0.mlp.fc2.weight", r"from orthogonal"),
    ],
)
def test_verify_raises_for_a_changed_weight(name: str, reason: str) -> None:
    family = FAMILIES["timm_vit"]
    model = family.build()
    quietly(model, generator=seeded(), example=family.inputs(2))
    held = verify_skipless(model, family.inputs(2))
    assert not held.failed
    assert all(row.failed == () for row in held.rows)
    with torch.no_grad():
        model.get_parameter(name)[-1].mul_(1.01)
    with pytest.raises(InitError, match=reason):
        verify_skipless(model, family.inputs(2))
    found = verify_skipless(model, family.inputs(2), check=False)
    assert len(found.failed) == 1
    with pytest.raises(InitError, match="1 of 4 sites fail"):
        found.raise_if_failed()
    assert reason.split()[-1] in str(found)


@pytest.mark.parametrize("name", ["blocks.0.mlp.fc1.weight", "blocks.1.attn.proj.weight", "blocks.0.attn.qkv.weight"])
def test_verify_raises_for_non_finite_weights(name: str) -> None:
    family = FAMILIES["timm_vit"]
    model = family.build()
    quietly(model, generator=seeded(), example=family.inputs(2))
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = torch.nan
    with pytest.raises(InitError, match="nan"):
        verify_skipless(model, family.inputs(2))


def test_verify_raises_for_a_default_model() -> None:
    family = FAMILIES["timm_vit"]
    with pytest.raises(InitError, match="sites fail"):
        verify_skipless(family.build(), family.inputs(2))
    with pytest.raises(InitError, match="no site"):
        verify_skipless(family.build(), family.inputs(2), where=lambda site: False)


def test_self_attention_matches_the_formula() -> None:
    model, check, found = started("timm_vit")
    part = next(found.attentions())
    tokens = torch.randn(64, 16, generator=seeded(), dtype=torch.float64)
    tokens = (tokens - tokens.mean(-1, keepdim=True)) / tokens.var(-1, keepdim=True, correction=0).add(1e-5).sqrt()
    masses = []
    for q, k in zip(part.q.double(), part.k.double(), strict=True):
        p = ((tokens @ q.T) @ (tokens @ k.T).T / math.sqrt(8)).softmax(-1)
        masses.append(float(p.diagonal().mean()))
    assert check.rows[0].values["self-attention"] == pytest.approx(sum(masses) / 2)
    assert check.rows[0].values["least"] == pytest.approx(min(masses))
    p_example = unskip.measure(model, FAMILIES["timm_vit"].inputs(2), jacobians="off").sites[0].self_attention
    assert p_example is not None
    assert check.rows[0].values["on example"] == pytest.approx(sum(p_example) / 2)
    assert check.rows[0].values["uniform"] == pytest.approx(1 / 5)


def test_a_check_can_be_serialised() -> None:
    _, check, _ = started("timm_vit")
    data = json.loads(json.dumps(check.to_dict(), allow_nan=False))
    assert [row["path"] for row in data["rows"]] == ["blocks.0", "blocks.0", "blocks.1", "blocks.1"]
    assert data["rows"][0]["failed"] == []
    assert "cond(W_V W_O)" in str(check)
    assert "mlp error" in str(check)


def test_models_with_normalised_queries_have_a_note() -> None:
    family = FAMILIES["timm_swinv2"]
    model = family.build()
    check = quietly(model, generator=seeded(), example=family.inputs(2))
    assert any("normalises or scales its queries" in note for note in check.notes)
    assert "self-attention" not in check.rows[0].values
    assert "on example" in check.rows[0].values
