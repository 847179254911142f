"""Warnings of rewire: weights that would not train, and additions left unchanged."""

from __future__ import annotations

import warnings

import pytest
import timm
import torch
from tests.anatomy import doubtful as d
from tests.anatomy import handmade as h
from tests.wiring.folders import X
from torch import nn

import unskip
from unskip import Anneal, Cut, Decay, Keep
from unskip.errors import BadInput, UnskipWarning


def test_cutting_a_projected_shortcut_warns_of_unused_weights() -> None:
    model = h.Projected()
    with pytest.raises(BadInput, match="governs no site"):
        unskip.rewire(model, Cut(), X)
    with pytest.warns(UnskipWarning, match="find_unused_parameters"):
        unskip.rewire(model, Cut(), X, where=lambda site: site.projected)
    assert torch.equal(model(X), model.f(X))


def test_warnings_point_at_the_caller() -> None:
    model = h.Projected()
    with pytest.warns(UnskipWarning) as from_rewire:
        wiring = unskip.rewire(model, Cut(), X, where=lambda site: site.projected)
    with pytest.warns(UnskipWarning) as from_set:
        wiring.set(Cut(), where=lambda site: site.projected)
    with (
        pytest.warns(UnskipWarning) as in_context,
        unskip.rewired(model, Cut(), X, where=lambda site: site.projected),
    ):
        pass
    assert [each.filename for each in (*from_rewire, *from_set, *in_context)] == [__file__] * 3


def test_cutting_at_a_near_zero_branch_warns() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, num_heads=2, depth=1, init_values=1e-6
    )
    with pytest.warns(UnskipWarning, match=r"under 0\.001 of its stream"):
        unskip.rewire(model, Cut())
    with pytest.warns(UnskipWarning, match=r"under 0\.001 of its stream"):
        unskip.rewire(model, Anneal(Keep(), Cut(), steps=5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unskip.rewire(model, Decay(0.6))


def test_cutting_under_drop_path_warns() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, num_heads=2, depth=2, drop_path_rate=0.1
    )
    with pytest.warns(UnskipWarning, match=r"blocks\.1 \[attention\].*drop path is on"):
        unskip.rewire(model, Cut())


def test_unsupported_addition_warns() -> None:
    with pytest.warns(UnskipWarning, match=r"torch\.lerp"):
        unskip.rewire(d.TrainingFused(), Cut(), X)


def test_cutting_zero_initialised_branches_warns() -> None:
    model = nn.Sequential(h.PreNorm(), h.PreNorm())
    nn.init.zeros_(model[1].f[2].weight)
    nn.init.zeros_(model[1].f[2].bias)
    with pytest.warns(UnskipWarning, match=r"^1 \[mlp\]: near-zero branch"):
        unskip.rewire(model, Cut(), X)


def test_cutting_behind_an_adaln_zero_gate_warns() -> None:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=8, num_embeds_ada_norm=10
    )
    gate = model.transformer_blocks[0].norm1.linear
    nn.init.zeros_(gate.weight)
    nn.init.zeros_(gate.bias)
    with pytest.warns(UnskipWarning, match="gate"):
        unskip.rewire(model, Cut())
