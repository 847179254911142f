"""Options of `skipless_` beyond the paper: shaped MLPs, calibrated attention, and heads that carry tokens."""

from typing import Any

import pytest
import torch
from tests.init.started import quietly, seeded
from torch import nn

import unskip
from unskip import Cut
from unskip.anatomy import Example, trace_parts
from unskip.errors import BadInput, InitError
from unskip.init import PRESETS, calibrate_, skipless_, start_, verify_skipless

timm = pytest.importorskip("timm")


class Wide(timm.layers.Attention):  # type: ignore[misc, name-defined]
    """Attention with heads of width 16 for any model width."""

    def __init__(self, dim: int, **options: Any) -> None:
        super().__init__(dim, attn_head_dim=16, **options)


def vit(heads: int = 3, **more: Any) -> Any:
    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 48, "num_heads": heads, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", class_token=False, global_pool="avg", **shape, **more)
    return model.eval().requires_grad_(False)


def images() -> torch.Tensor:
    smooth = torch.randn(16, 3, 4, 4, generator=seeded(1))
    return nn.functional.interpolate(smooth, size=16, mode="bilinear")


def self_attention(model: nn.Module) -> list[torch.Tensor]:
    """The self-attention of each head and layer, from recorded attention probabilities."""
    traced = trace_parts(model, Example.of(images()), weighted=True)
    sites = [part.site.index for part in traced.parts.attentions()]
    return [traced.probabilities(index).diagonal(dim1=-2, dim2=-1).mean((0, 2)) for index in sites]


def test_a_shaped_mlp_is_centred_and_keeps_angles() -> None:
    model = vit()
    check = quietly(model, images()[:2], **PRESETS["shaped"], generator=seeded())
    mlp = model.blocks[0].mlp
    assert (mlp.fc1.bias == 1.5).all()
    z = torch.randn(4000, 48, generator=seeded(2))
    near = 0.9 * z + (1 - 0.9**2) ** 0.5 * torch.randn(4000, 48, generator=seeded(3))
    out, moved = (mlp(nn.functional.layer_norm(x, (48,))) for x in (z, near))
    assert out.mean(0).norm() < 0.03 * out.norm(dim=1).mean()
    cosine = nn.functional.cosine_similarity(out, moved).mean()
    assert float(cosine) == pytest.approx(0.897, abs=0.012)  # E over Gaussians; 0.872 with no bias, 0.967 not centred
    row = check.rows[1].values
    assert row["C'(1)"] == pytest.approx(1.04, abs=0.02)
    assert row["C(0)"] == pytest.approx(0, abs=1e-6)


def test_the_gain_of_the_mlp_scales_only_its_output() -> None:
    one, other = vit(), vit()
    quietly(one, images()[:2], generator=seeded())
    quietly(other, images()[:2], generator=seeded(), mlp_gain=9.0)
    x = torch.randn(5, 48, generator=seeded(2))
    torch.testing.assert_close(other.blocks[1].mlp(x), 9 * one.blocks[1].mlp(x))


@pytest.mark.parametrize(("layer", "slope"), [(nn.GELU, 1.0), (nn.ReLU, 1.0), (nn.SiLU, 1.0), (nn.LeakyReLU, 1.01)])
def test_paired_units_are_an_orthogonal_map(layer: Any, slope: float) -> None:
    """With only paired units an MLP is an orthogonal map, for any activation."""
    model = vit(act_layer=layer)
    quietly(model, images()[:2], **PRESETS["paired"], mix=0.25, generator=seeded())
    mlp, x = model.blocks[0].mlp, torch.randn(200, 48, generator=seeded(2), dtype=torch.float64)
    mlp.double()
    assert torch.equal(mlp.fc1.weight[:48], -mlp.fc1.weight[48:96])
    assert float(mlp.fc2.weight[:, 0].norm()) == pytest.approx(1 / slope, rel=1e-5)
    whole = mlp(x)
    assert float((whole.norm(dim=1) / x.norm(dim=1)).mean()) == pytest.approx(1.0, abs=0.1)
    mlp.fc2.weight[:, 96:] = 0
    mlp.fc2.bias[:] = 0
    torch.testing.assert_close(mlp(x) @ mlp(x).T, x @ x.T, rtol=0, atol=1e-4)
    assert float((whole - mlp(x)).norm() / whole.norm()) == pytest.approx(0.2, abs=0.12)  # what mix adds


def test_pairs_are_refused_if_impossible_and_verification_notices_missing_ones() -> None:
    with pytest.raises(InitError, match="activation tanh"):
        skipless_(vit(act_layer=nn.Tanh), images()[:2], pairs=True)
    with pytest.raises(InitError, match="cannot have pairs"):
        skipless_(vit(mlp_ratio=1.5), images()[:2], pairs=True)
    with pytest.raises(BadInput, match="no bias"):
        start_(vit(), "skipless:shaped,pairs", example=images()[:2])
    model = vit()
    quietly(model, images()[:2], **PRESETS["paired"], generator=seeded())
    model.blocks[1].mlp.fc1.weight[50, 3] += 1e-3
    with pytest.raises(InitError, match="mirrored pairs"):
        verify_skipless(model, images()[:2], vo_gain=1.0, centre=True, pairs=True)


@pytest.mark.parametrize("goal", [0.6, (0.8, 0.5)])
def test_calibrated_attention_reaches_its_target(goal: Any) -> None:
    model = vit()
    unskip.rewire(model, Cut(), images()[:1])
    shaped: dict[str, Any] = {**PRESETS["shaped"], "position_code": "orthogonal"}
    quietly(model, images(), **shaped, self_attention=goal, generator=seeded())
    goals = goal if isinstance(goal, tuple) else (goal, goal)
    for found, expected in zip(self_attention(model), goals, strict=True):
        assert float(found.mean()) == pytest.approx(expected, abs=0.02)
    checked: dict[str, Any] = {name: shaped[name] for name in ("vo_gain", "mlp_gain", "mlp_bias", "centre")}
    verify_skipless(model, images(), **checked, self_attention=goal)
    with pytest.raises(InitError, match=r"expected 0\.9"):
        verify_skipless(model, images(), **checked, self_attention=0.9)


def test_heads_with_a_low_target_stay_near_uniform() -> None:
    model = vit()
    quietly(model, images(), **PRESETS["shaped"], position_code="orthogonal", generator=seeded())
    solved = calibrate_(model, images(), 0.6, even=1, generator=seeded())
    assert [each.site.kind for each in solved] == ["attention", "attention"]
    for found, each in zip(self_attention(model), solved, strict=True):
        assert float(found[:2].mean()) == pytest.approx(each.self_attention, abs=1e-4)
        assert found[2] < 0.1  # uniform: 1/16


def test_an_unreachable_target_is_noted() -> None:
    model = vit()
    model.pos_embed.zero_()
    check = quietly(model, torch.ones(2, 3, 16, 16), self_attention=0.9, generator=seeded())
    assert any("below its target" in note and "0.06" in note for note in check.notes)  # all tokens are equal: 1/16


def test_carrying_heads_pass_tokens_on_and_the_gain_of_others_is_lower() -> None:
    model = vit(6, attn_layer=Wide)
    options = {"vo_gain": 2.0, "carry": 3, "mix": 0.5}
    quietly(model, images()[:2], **options, generator=seeded())
    part = next(unskip.parts(model, images()[:1]).attentions())
    v, out = part.v.double(), part.out.double()
    product = out[:, :48] @ v[:3].flatten(0, 1)
    torch.testing.assert_close(product @ product.T, 16 * torch.eye(48).double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(out[:, 48:] @ out[:, 48:].T, torch.eye(48).double(), rtol=0, atol=1e-5)
    verify_skipless(model, images()[:2], **options)
    with pytest.raises(InitError, match="isometry"):
        verify_skipless(model, images()[:2], **{**options, "mix": 0.3})
    with pytest.raises(InitError, match="carry is 2"):
        skipless_(model, images()[:2], carry=2)


def test_carry_changes_no_other_weights() -> None:
    one, other = vit(6, attn_layer=Wide), vit(6, attn_layer=Wide)
    quietly(one, images()[:2], generator=seeded())
    quietly(other, images()[:2], carry=3, generator=seeded())
    for a, b in zip(
        unskip.parts(one, images()[:1]).attentions(), unskip.parts(other, images()[:1]).attentions(), strict=True
    ):
        assert torch.equal(a.q, b.q)
        assert not torch.equal(a.v, b.v)
    assert torch.equal(one.blocks[1].mlp.fc2.weight, other.blocks[1].mlp.fc2.weight)


def test_all_options_can_be_given_as_text() -> None:
    one, other = vit(6, attn_layer=Wide), vit(6, attn_layer=Wide)
    start_(one, "skipless:shaped,position_code=orthogonal,carry=3,mix=0.5,self_attention=0.8,c=3", seeded(), images())
    options: dict[str, Any] = {**PRESETS["shaped"], "vo_gain": 3.0, "carry": 3, "mix": 0.5, "self_attention": 0.8}
    skipless_(other, images(), **options, position_code="orthogonal", generator=seeded())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"parts": ("mlp",), "carry": 3}, "carry applies to value-output"),
        ({"parts": ("mlp",), "self_attention": 0.5}, "self_attention applies to query-key"),
        ({"parts": ("query-key",), "mlp_bias": 1.0}, "mlp_bias applies to mlp"),
        ({"self_attention": 1.0}, "skipless_: self_attention"),
        ({"self_attention": (0.5, 0.5, 0.5)}, "3 targets for 2"),
        ({"mlp_gain": 0.0}, "mlp_gain"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        skipless_(vit(), images()[:2], **options)


def test_mlp_bias_of_gated_mlps_and_calibration_with_relative_positions_are_refused() -> None:
    with pytest.raises(InitError, match="no mlp_bias"):
        skipless_(vit(mlp_layer=timm.layers.SwiGLU), images()[:2], mlp_bias=1.0)
    shape = {"img_size": 16, "patch_size": 4, "depth": 1, "embed_dim": 48, "num_heads": 3}
    with pytest.raises(InitError, match="score bias"):
        calibrate_(timm.create_model("beit_base_patch16_224", **shape), images()[:2], 0.5)


class Loop(nn.Module):
    """One block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = vit().blocks[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self.block(x)
        return x


def test_calibration_of_attention_that_runs_twice_is_refused() -> None:
    with pytest.raises(InitError, match="runs 2 times"):
        calibrate_(Loop(), torch.randn(2, 16, 48, generator=seeded()), 0.5)
