"""Patch features of any backbone: tokens, keys, queries and values, on their grid; and models without them."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from tests.evals.small import colours, vit, windows
from torch import Tensor, nn

import unskip
from unskip import evals
from unskip.errors import BadInput


def qkv(model: Any, x: Tensor, block: int) -> Tensor:
    """(3, images, tokens, dim) from the timm block."""
    seen: list[Tensor] = []
    handle = model.blocks[block].attn.qkv.register_forward_hook(lambda module, args, out: seen.append(out))
    model(x)
    handle.remove()
    return seen[0].unflatten(2, (3, -1)).movedim(2, 0)


@pytest.mark.parametrize("shortcut", ["keep", "cut", "decay:0.5"])
@pytest.mark.parametrize("registers", [0, 4])
def test_keys_queries_values_and_tokens(shortcut: str, registers: int) -> None:
    model: Any = vit(reg_tokens=registers)
    unskip.rewire(model, shortcut)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = qkv(model, x, 1)[:, :, 1 + registers :]
        tokens = unskip.features(model, x, 1, pool=None)[1][:, 1 + registers :]
    for index, what in enumerate(("queries", "keys", "values")):
        patches = evals.patches(model, x, 1, what)  # type: ignore[arg-type]
        assert patches.grid == (4, 4)
        assert torch.allclose(patches.blocks[1], expected[index], atol=1e-5)
    assert torch.allclose(evals.patches(model, x, 1).blocks[1], tokens, atol=1e-6)


def test_other_libraries_and_layouts() -> None:
    from torchvision.models import vision_transformer

    model = vision_transformer.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
    ).eval()
    x = torch.randn(2, 3, 32, 32)
    patches = evals.patches(model, x, "all", "keys")
    assert {block: tuple(value.shape) for block, value in patches.blocks.items()} == {0: (2, 16, 16), 1: (2, 16, 16)}
    attention: Any = model.encoder.layers[0].self_attention
    seen: list[Tensor] = []
    model.encoder.layers[0].ln_1.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        model(x)
    expected = nn.functional.linear(seen[0], attention.in_proj_weight[16:32], attention.in_proj_bias[16:32])
    assert torch.allclose(patches.blocks[0], expected[:, 1:], atol=1e-5)
    maps = evals.patches(timm.create_model("resnet10t", num_classes=0), torch.randn(1, 3, 64, 96))
    assert maps.grid == (2, 3)  # the positions of a convolutional network


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "eva02_tiny_patch14_224"])
def test_attention_that_uses_the_weight_of_a_layer_without_calling_it(name: str) -> None:
    model: Any = timm.create_model(name, img_size=28, patch_size=7, depth=2, embed_dim=24, num_heads=3, num_classes=0)
    x, seen = torch.randn(2, 3, 28, 28), list[Tensor]()
    model.eval().blocks[1].attn.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    result = evals.patches(model, x, 1, "keys").blocks[1]
    keys = nn.functional.linear(seen[-1], model.blocks[1].attn.qkv.weight[24:48])  # neither has a key bias
    assert torch.allclose(result, keys[:, 1:], atol=1e-5)
    assert evals.attention_maps(model, x).shape == (2, 3, 4, 4)


def test_images_are_padded_to_whole_patches() -> None:
    model = vit(dynamic_img_size=True)
    x = torch.randn(1, 3, 30, 41)
    patches = evals.patches(model, x)
    assert patches.grid == (4, 6)
    assert patches.stride == (8.0, 8.0)
    padded = nn.functional.pad(x, (0, 7, 0, 2))
    assert torch.equal(patches.blocks[2], evals.patches(model, padded).blocks[2])


def test_bytes_are_normalised() -> None:
    """By the model's mean and std, which are 0.5 here, or by the caller's."""
    images, _ = colours(2)
    model = vit()
    expected = evals.patches(model, (images / 255 - 0.5) / 0.5).blocks[2]
    assert torch.allclose(evals.patches(model, images).blocks[2], expected, atol=1e-5)
    plain = evals.patches(model, images, normalise=((0, 0, 0), (1, 1, 1))).blocks[2]
    assert torch.allclose(plain, evals.patches(model, images / 255).blocks[2], atol=1e-5)


def padded() -> nn.Module:
    """Its windows of 14 x 14 are larger than the grid, which is padded, so the last tokens are not patches."""
    size: dict[str, int] = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3}
    model: nn.Module = timm.create_model("samvit_base_patch16_224", **size)
    return model.eval()


@pytest.mark.parametrize(
    ("make", "shape", "options", "message"),
    [
        (vit, (1, 3, 4, 4), {}, "smaller than a patch"),
        (vit, (1, 3, 40, 40), {}, "dynamic_img_size=True"),
        (vit, (1, 1, 32, 32), {}, "takes 3 channels"),
        (vit, (1, 3, 32, 32), {"blocks": 7}, "not among .* 3 blocks"),
        (vit, (1, 3, 32, 32), {"blocks": []}, "at least one block"),
        (lambda: nn.Linear(3, 3), (1, 3, 32, 32), {}, "no blocks"),
        (lambda: timm.create_model("resnet10t"), (1, 3, 64, 64), {"what": "keys"}, "cannot compute its keys"),
        (windows, (1, 3, 56, 56), {"what": "keys", "blocks": 0}, "parts of the image"),
        (padded, (1, 3, 64, 64), {"what": "keys"}, r"\(1, 196, 48\), .* 16 patches"),
    ],
    ids="tiny,other size,channels,block,no block,no patches,no attention,windows,padded".split(","),
)
def test_patches_refuses(make: Any, shape: tuple[int, ...], options: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        evals.patches(make(), torch.zeros(shape), **options)


def test_the_mode_is_restored_and_hooks_are_removed() -> None:
    model = vit().train()
    evals.patches(model, torch.randn(1, 3, 32, 32), -1, "keys")
    assert model.training
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in model.modules())
