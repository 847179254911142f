"""Options of an initialisation that would have no effect, or that no model can have, are refused by name."""

from typing import Any

import pytest
import torch
from tests.init.started import changed, quietly, seeded, weights
from torch import nn

from unskip.errors import BadInput, InitError
from unskip.init import PRESETS, calibrate_, position_code_, skipless_, start_, verify_skipless

timm = pytest.importorskip("timm")


def vit() -> nn.Module:
    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **shape)
    return model


def images() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=seeded(1))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mix": 0.1}, "mix=0.1 applies to .* carry or pairs"),
        ({"self_attention": "0.5"}, "self_attention must be a number"),
        ({"where": "mlp", "self_attention": 0.5}, "no attention is among the chosen sites"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], told: str) -> None:
    model = vit()
    before = weights(model)
    with pytest.raises(BadInput, match=told):
        skipless_(model, images(), **options)
    assert not changed(before, model)


@pytest.mark.parametrize("words", ["skipless:alpha=1,qk_noise=2", "skipless:mix=0.5,pairs,mix=0.1"])
def test_an_option_set_twice_is_refused(words: str) -> None:
    with pytest.raises(BadInput, match="is set twice"):
        start_(vit(), words, seeded(), images())


@pytest.mark.parametrize("noise", [float("nan"), "1", -1.0])
def test_calibration_checks_its_noise(noise: Any) -> None:
    with pytest.raises(BadInput, match="qk_noise must be"):
        calibrate_(vit(), images(), 0.5, qk_noise=noise)


@pytest.mark.parametrize("options", [{"carry": 0}, {"mix": float("nan"), "carry": 3}, {"mlp_gain": -1.0}])
def test_verification_checks_its_options(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(options))):
        verify_skipless(vit(), images(), **options, check=False)


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_a_position_code_without_a_scale_is_refused(value: float) -> None:
    model = vit()
    nn.init.zeros_(model.patch_embed.proj.bias)  # type: ignore[union-attr, arg-type]
    before = weights(model)
    with pytest.raises(InitError, match="patch tokens have norm"):
        position_code_(model, torch.full((2, 3, 16, 16), value))
    assert not changed(before, model)


def test_the_slope_of_mirrored_pairs_is_near_one() -> None:
    """Pairs cancel the curvature of the activation, so an MLP of pairs and a few other units is nearly linear."""
    check = quietly(vit(), images(), **PRESETS["paired"], generator=seeded())
    slopes = [row.values["C'(1)"] for row in check.rows if "C'(1)" in row.values]
    assert slopes == pytest.approx([1.0, 1.0], abs=0.02)  # 1.3 if units were independent
