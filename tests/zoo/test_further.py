"""Families without a reference written out by hand: that the audit's answer stays, that rewiring verifies and moves the
output, and that undo restores it bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from diffusers import FluxTransformer2DModel, UNet2DModel
from torch import nn
from torch.utils._pytree import tree_leaves
from torchvision.models import convnext, resnet, swin_transformer
from transformers import CLIPConfig, CLIPModel

import unskip
from unskip import Scale

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def torchvision_convnext() -> nn.Module:
    sizes = [convnext.CNBlockConfig(8, 16, 2), convnext.CNBlockConfig(16, None, 1)]
    return convnext.ConvNeXt(sizes, layer_scale=0.5)


def torchvision_swin() -> nn.Module:
    return swin_transformer.SwinTransformer([4, 4], 16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4])


def torchvision_resnet() -> nn.Module:
    return resnet.ResNet(resnet.BasicBlock, [1, 2, 1, 1])


def timm_mobilenetv2() -> nn.Module:
    return timm.create_model("mobilenetv2_035")


def hf_clip() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    tokens = {"vocab_size": 50, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return CLIPModel(
        CLIPConfig(text_config={**sizes, **tokens}, vision_config={**sizes, "image_size": 32, "patch_size": 8})
    )


def diffusers_unet() -> nn.Module:
    return UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


def diffusers_flux() -> nn.Module:
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


# Recorded from the audit's own answers: they guard against change and are no independent expectation, unlike those of
# families.py and more.py, which were written from the sources. A P marks a projected shortcut.
FURTHER: list[tuple[Callable[[], nn.Module], Any, dict[str, int]]] = [
    (torchvision_convnext, IMAGES, {"conv": 3}),
    (torchvision_swin, IMAGES, {"attention": 4, "mlp": 4}),
    (torchvision_resnet, IMAGES, {"conv": 2, "conv P": 3}),
    (timm_mobilenetv2, IMAGES, {"conv": 10}),
    (hf_clip, None, {"attention": 4, "mlp": 4}),
    (diffusers_unet, None, {"conv": 3, "conv P": 5, "attention": 4}),
    (diffusers_flux, None, {"attention": 2, "mlp": 2, "parallel": 1}),
]


@pytest.mark.parametrize(("build", "example", "kinds"), FURTHER, ids=lambda v: getattr(v, "__name__", ""))
def test_further_families(build: Callable[[], nn.Module], example: Any, kinds: dict[str, int]) -> None:
    model = build().eval()
    audit = unskip.audit(model, example)
    assert Counter(site.kind + (" P" if site.projected else "") for site in audit) == kinds
    assert not audit.unknown
    assert not audit.long_skips
    given = unskip.anatomy._example.example_for(model, example)

    @torch.no_grad()
    def run() -> list[torch.Tensor]:
        return [leaf.clone() for leaf in tree_leaves(given.copy().run(model)) if isinstance(leaf, torch.Tensor)]

    plain = run()
    classes = [type(module) for module in model.modules()]
    wiring = unskip.rewire(model, Scale(0.5, 0.7), example)
    assert wiring.verified
    assert any(not torch.allclose(a, b) for a, b in zip(run(), plain, strict=True))
    wiring.undo()
    assert all(torch.equal(a, b) for a, b in zip(run(), plain, strict=True))
    assert [type(module) for module in model.modules()] == classes
