"""The rank of the patches within an image, which self-supervised runs watch."""

from __future__ import annotations

import pytest
import torch

import unskip
from unskip.recipes._online import patch_ranks


def test_the_rank_of_patches_is_that_of_each_image_on_its_own() -> None:
    """Images that differ, with patches that are alike but for rounding, have a high rank together and none within."""
    draw = torch.Generator().manual_seed(0)
    images, patches, dim, prefix = 8, 9, 12, 1

    class Told(torch.nn.Module):
        num_prefix_tokens = prefix

        def __init__(self) -> None:
            super().__init__()
            self.alike, self.apart = torch.nn.Identity(), torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.alike(x[:, 1:2] * (1 + 3e-7 * torch.randn(x.shape, generator=draw)))
            out: torch.Tensor = self.apart(x @ torch.eye(dim))  # in bfloat16 where that is allowed
            return out

    x = 1 + 1e-3 * torch.randn(images, prefix + patches, dim, generator=draw)
    with torch.autocast("cpu", torch.bfloat16):  # as a run may be within
        alike, apart = patch_ranks(Told(), x, {"alike": -1, "apart": -1})
    expected = [unskip.measures.effective_rank(each[prefix:].double()) for each in x]
    assert alike == 0
    assert apart == pytest.approx(sum(expected) / images, rel=1e-6)


@pytest.mark.parametrize(("far", "least", "most"), [(5e-5, 0, 0), (5e-4, 1, 1.3)])
def test_one_direction_beside_rounding_is_no_high_rank(far: float, least: float, most: float) -> None:
    """Rounding of 1e-6 in all directions would make a rank of 2.5 of patches that differ by 5e-5 in a single one."""
    draw = torch.Generator().manual_seed(0)
    images, patches, dim = 4, 64, 192
    same, way = (torch.nn.functional.normalize(torch.randn(images, 1, dim, generator=draw), dim=2) for _ in range(2))
    share = torch.randn(images, patches, 1, generator=draw)
    rounding = 1e-6 * torch.randn(images, patches, dim, generator=draw) / dim**0.5
    tokens = same.double() + far * share * way + rounding

    class Told(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.block(x)
            return out

    (found,) = patch_ranks(Told(), tokens, {"block": -1})
    assert least <= found <= most


def test_products_are_exact_whatever_the_user_has_set() -> None:
    seen = []

    class Told(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            out: torch.Tensor = self.block(x)
            return out

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        patch_ranks(Told(), torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0)), {"block": -1})
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["ieee"]
