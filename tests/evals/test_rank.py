"""Effective ranks: of features, and of the patches within an image, which self-supervised runs watch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.evals.digits import digits, vit
from torch import Tensor

import unskip
from unskip import evals


def patch_rank(patches: Tensor) -> float:
    split = evals.Split(torch.zeros(len(patches)), patches=patches)
    result: float = evals.PROTOCOLS["patchrank-v1"].function(split, split, samples=len(patches))["patchrank"]
    return result


def test_rank_is_that_of_the_first_samples() -> None:
    x = torch.randn(12_000, 4, generator=torch.Generator().manual_seed(0))
    x[10_000:] = 0
    ranks = evals.rank(x)
    assert ranks["rank"] == pytest.approx(math.exp(ranks["rank_entropy"]))
    assert ranks["rank"] == pytest.approx(unskip.measures.effective_rank(x[:10_000]))
    assert 3.99 < ranks["rank"] <= 4


def test_the_rank_of_patches_is_that_of_each_image_on_its_own() -> None:
    """Images that differ, with patches that are alike but for rounding, have a high rank together and none within."""
    draw = torch.Generator().manual_seed(0)
    apart = 1 + 1e-3 * torch.randn(8, 9, 12, generator=draw)
    alike = apart[:, :1] * (1 + 3e-7 * torch.randn(apart.shape, generator=draw))
    expected = [unskip.measures.effective_rank(each.double()) for each in apart]
    assert patch_rank(alike) == 0
    assert patch_rank(apart) == pytest.approx(sum(expected) / 8, rel=1e-6)


@pytest.mark.parametrize(("far", "least", "most"), [(5e-5, 0, 0), (5e-4, 1, 1.3)])
def test_one_direction_beside_rounding_is_no_high_rank(far: float, least: float, most: float) -> None:
    """Rounding of 1e-6 in all directions would make a rank of 2.5 of patches that differ by 5e-5 in a single one."""
    draw = torch.Generator().manual_seed(0)
    images, patches, dim = 4, 64, 192
    same, way = (torch.nn.functional.normalize(torch.randn(images, 1, dim, generator=draw), dim=2) for _ in range(2))
    share = torch.randn(images, patches, 1, generator=draw)
    rounding = 1e-6 * torch.randn(images, patches, dim, generator=draw) / dim**0.5
    assert least <= patch_rank(same.double() + far * share * way + rounding) <= most


def test_patches_are_exact_whatever_precision_is_asked_for() -> None:
    """In bfloat16 rounding would be most of what differs between patches that are nearly alike."""
    model = vit(reg_tokens=2).eval()
    seen: list[Any] = []
    model.blocks[0].register_forward_hook(  # type: ignore[index,union-attr]
        lambda module, inputs, output: seen.append(
            (output.dtype, torch.backends.cuda.matmul.fp32_precision, len(output))
        )
    )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        results = evals.evaluate(model, None, digits("test", 40), ["patchrank-v1"], precision="bf16")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen[-1] == (torch.float32, "ieee", 16)
    assert [(each.block, each.n) for each in results] == [(0, 16), (1, 16), (2, 16)]
    images = unskip.data.preprocess_of(model, 1).normalised(digits("test", 16).images)
    tokens = unskip.features(model, images, 1, pool=None)[1][:, 3:].detach()
    expected = sum(unskip.measures.effective_rank(each) for each in tokens) / 16
    assert results[1].values["patchrank"] == pytest.approx(expected, rel=1e-5)
