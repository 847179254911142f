"""Effective rank of features, and of the patches within an image."""

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


def test_rank_uses_the_first_samples() -> None:
    x = torch.randn(12_000, 4, generator=torch.Generator().manual_seed(0))
    x[10_000:] = 0
    ranks = evals.rank(x)
    assert ranks["rank"] == pytest.approx(math.exp(ranks["rank_entropy"]))
    assert ranks["rank"] == pytest.approx(unskip.measures.effective_rank(x[:10_000]))
    assert 3.99 < ranks["rank"] <= 4


def test_patch_rank_is_computed_within_each_image() -> None:
    """Different images whose patches are equal, up to rounding, have rank 0 within."""
    draw = torch.Generator().manual_seed(0)
    different = 1 + 1e-3 * torch.randn(8, 9, 12, generator=draw)
    equal = different[:, :1] * (1 + 3e-7 * torch.randn(different.shape, generator=draw))
    expected = [unskip.measures.effective_rank(each.double()) for each in different]
    assert patch_rank(equal) == 0
    assert patch_rank(different) == pytest.approx(sum(expected) / 8, rel=1e-6)


@pytest.mark.parametrize(("distance", "least", "most"), [(5e-5, 0, 0), (5e-4, 1, 1.3)])
def test_rounding_does_not_raise_the_rank_of_one_direction(distance: float, least: float, most: float) -> None:
    """With rounding of 1e-6 in all directions, patches that differ by 5e-5 in only one would have rank 2.5."""
    draw = torch.Generator().manual_seed(0)
    images, patches, dim = 4, 64, 192
    mean, direction = (
        torch.nn.functional.normalize(torch.randn(images, 1, dim, generator=draw), dim=2) for _ in range(2)
    )
    factor = torch.randn(images, patches, 1, generator=draw)
    rounding = 1e-6 * torch.randn(images, patches, dim, generator=draw) / dim**0.5
    assert least <= patch_rank(mean.double() + distance * factor * direction + rounding) <= most


def test_patches_are_exact_at_any_precision() -> None:
    """In bfloat16 nearly equal patches would differ mostly by rounding."""
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
